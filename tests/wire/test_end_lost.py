"""A connection that is lost after the last event, and before the call's status."""

from __future__ import annotations

from typing import Any

import grpc.aio

from headway.client import AsyncClient, Delivery, Delta, Finished, Sampling
from headway.v1 import inference_pb2, inference_pb2_grpc
from tests.wire.wire_support import in_loop


class EndsBadly(inference_pb2_grpc.InferenceServicer):
    """All of an output, and then a router that dies."""

    def __init__(self) -> None:
        self.calls = 0

    async def Generate(self, request: Any, context: Any) -> None:
        self.calls += 1
        event = inference_pb2.GenerateEvent
        token = inference_pb2.Accepted(resume_token="kept", seed=1)
        await context.write(event(accepted=token))
        await context.write(event(delta=inference_pb2.Delta(token_ids=[7], text="x")))
        await context.write(event(finished=inference_pb2.Finished()))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def Forget(self, request: Any, context: Any) -> inference_pb2.ForgetResponse:
        return inference_pb2.ForgetResponse()


@in_loop
async def test_a_whole_output_is_no_failure_whatever_becomes_of_the_call() -> None:
    servicer, server = EndsBadly(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        delivery = Delivery(resume_window_s=5.0)
        events = [e async for e in client.generate([5], Sampling(max_tokens=1), delivery=delivery)]
    await server.stop(None)
    assert [type(event) for event in events][-2:] == [Delta, Finished]
    assert servicer.calls == 1
