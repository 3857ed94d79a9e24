"""`python -m loadtests.mockserver`: speaks Headway's protocol and emits tokens on known ticks.

The reference that a load test is held against: a stream's token k leaves at start + k * gap,
whatever the client does. On SIGTERM it writes a ledger: what it really sent, and when.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

MAX_LEN = 1 << 20


class MockInference(inference_pb2_grpc.InferenceServicer):
    """gap_s: between the tokens of a stream. first_s: from request to first token.
    fail_every: every so many-th request ends with UNAVAILABLE after half its tokens; 0 none."""

    def __init__(self, gap_s: float, first_s: float = 0.005, fail_every: int = 0) -> None:
        self._gap_s = gap_s
        self._first_s = first_s
        self._fail_every = fail_every
        self.requests = 0
        self.finished = 0
        self.failed = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.gaps = array("d")

    async def Generate(self, request: Any, context: Any) -> Any:
        arrived = time.perf_counter()
        self.requests += 1
        fails = self._fail_every > 0 and self.requests % self._fail_every == 0
        count = request.sampling.max_tokens
        prompt = len(request.token_ids.ids)
        self.prompt_tokens += prompt
        yield inference_pb2.GenerateEvent(
            accepted=inference_pb2.Accepted(
                request_id=str(self.requests), prompt_tokens=prompt, max_tokens=count
            )
        )
        first = last = 0.0
        for index in range(count // 2 if fails else count):
            await asyncio.sleep(arrived + self._first_s + index * self._gap_s - time.perf_counter())
            now = time.perf_counter()
            if index:
                self.gaps.append(now - last)
            else:
                first = now
            last = now
            self.tokens += 1
            yield inference_pb2.GenerateEvent(
                delta=inference_pb2.Delta(
                    first_index=index,
                    token_ids=(index % 1000,),
                    text="a ",
                    emit_time_unix_us=time.time_ns() // 1000,
                )
            )
        if fails:
            self.failed += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "as asked")
        self.finished += 1
        yield inference_pb2.GenerateEvent(finished=_finished(prompt, count, first - arrived))

    async def Tokenize(self, request: Any, context: Any) -> Any:
        words = len(request.text.split())
        return inference_pb2.TokenizeResponse(token_ids=range(words))

    async def GetModel(self, request: Any, context: Any) -> Any:
        model = inference_pb2.Model(name="mock", vocab_size=MAX_LEN, max_model_len=MAX_LEN)
        return inference_pb2.GetModelResponse(model=model)

    def ledger(self) -> dict[str, Any]:
        ordered = sorted(self.gaps)
        return {
            "requests": self.requests,
            "finished": self.finished,
            "failed": self.failed,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "gap_p50_ms": 1e3 * _rank(ordered, 0.50),
            "gap_p99_ms": 1e3 * _rank(ordered, 0.99),
        }


class MockAdmin(admin_pb2_grpc.AdminServicer):
    """One pretended engine."""

    def __init__(self, inference: MockInference) -> None:
        self._inference = inference

    async def GetStatus(self, request: Any, context: Any) -> Any:
        mock = self._inference
        engine = admin_pb2.EngineStatus(
            engine_id="mock",
            connected=True,
            blocks_total=1000,
            blocks_free=1000,
            running=mock.requests - mock.finished - mock.failed,
            step=mock.tokens,
        )
        return admin_pb2.GetStatusResponse(
            router=admin_pb2.RouterStatus(version="mock", ready=True), engines=[engine]
        )


class MockHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc,unused-ignore]
    async def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _finished(prompt: int, count: int, first_s: float) -> inference_pb2.Finished:
    return inference_pb2.Finished(
        reason=inference_pb2.FINISH_REASON_LENGTH,
        usage=inference_pb2.Usage(prompt_tokens=prompt, completion_tokens=count),
        timing=inference_pb2.Timing(queue_s=0.001, first_token_s=first_s),
    )


def _rank(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def serve(args: argparse.Namespace) -> None:
    mock = MockInference(args.gap_ms / 1e3, args.first_ms / 1e3, args.fail_every)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(mock, server)  # type: ignore[no-untyped-call]
    admin_pb2_grpc.add_AdminServicer_to_server(MockAdmin(mock), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(MockHealth(), server)
    port = server.add_insecure_port(args.address)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await stop.wait()
    await server.stop(0)
    if args.ledger is not None:
        args.ledger.write_text(json.dumps(mock.ledger()), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.mockserver", description="A server with known gaps."
    )
    parser.add_argument("--address", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--first-ms", type=float, default=5.0)
    parser.add_argument("--fail-every", type=int, default=0, metavar="N")
    parser.add_argument("--ledger", type=Path, metavar="FILE")
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
