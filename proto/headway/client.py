"""Talking to Headway, from threads (`Client`) or from asyncio (`AsyncClient`).

>>> from headway.client import Client, Delta, Message, Sampling
>>> with Client("127.0.0.1:50051") as client:
...     client.wait_ready(timeout_s=60)
...     for event in client.generate([Message("user", "Hello!")], Sampling(max_tokens=64)):
...         if isinstance(event, Delta):
...             print(event.text, end="", flush=True)

A prompt is a raw text, a list of token ids, or a list of `Message` for the chat template.
`timeout_s` is a deadline for the whole call, a year at most, enforced by client and server; None
waits for ever.
Every call raises errors of `headway.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway import messages
from headway.connection import DEFAULT_ADDRESS, Connection
from headway.errors import (
    Cancelled,
    ClientError,
    DeadlineExceeded,
    FieldViolation,
    HeadwayRpcError,
    InvalidRequest,
    RetryableError,
    ServerError,
    from_rpc_error,
)
from headway.resuming import Progress
from headway.types import (
    Accepted,
    Choice,
    Completion,
    Delivery,
    Delta,
    Event,
    Finished,
    Message,
    Model,
    Prompt,
    Sampling,
    Status,
)
from headway.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

__all__ = [
    "Accepted",
    "AsyncClient",
    "Cancelled",
    "Choice",
    "Client",
    "ClientError",
    "Completion",
    "Connection",
    "DeadlineExceeded",
    "Delivery",
    "Delta",
    "Event",
    "FieldViolation",
    "Finished",
    "HeadwayRpcError",
    "InvalidRequest",
    "Message",
    "Model",
    "Prompt",
    "RetryableError",
    "Sampling",
    "ServerError",
    "Status",
]

READY_POLL_S = 0.2
FORGET_TIMEOUT_S = 2.0
"""A request that is given up should be freed at once; it expires by itself if nobody answers."""


class Client:
    """Blocking client; one per process is enough, all methods may be called from any thread. Each
    has a connection of its own, which routers on one address are dealt.

    connection: an address ("host:port") or a Connection.
    """

    def __init__(self, connection: str | Connection = DEFAULT_ADDRESS) -> None:
        if isinstance(connection, str):
            connection = Connection(connection)
        self._channel = connection.channel()
        self._metadata = connection.metadata()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        delivery: Delivery | None = None,
        timeout_s: float | None = None,
    ) -> Generator[Event, None, None]:
        """Stream an output: Accepted, Deltas, Finished. The call starts with the first next().
        With Sampling.n above 1 the events of all choices come as they come about, each with its
        `choice`, and the stream ends with the last Finished.

        Closing the iterator (or leaving the loop and dropping it) gives the request up. With a
        resume window a lost call is gone on with; timeout_s is then each call's own.
        """
        messages.check_timeout(timeout_s)
        request = messages.generate_request(prompt, sampling, model, delivery)
        if request.resume_window_s > 0:
            return self._resuming(request, timeout_s)
        return self._events(self._inference.Generate, request, timeout_s)

    def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        delivery: Delivery | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """A whole output at once, or all of them."""
        request = messages.generate_request(prompt, sampling, model, delivery)
        return messages.completion_of(self._call(self._inference.Complete, request, timeout_s))

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """Token ids of a text or a conversation, as generate() would prefill them."""
        request = messages.tokenize_request(prompt, model)
        return list(self._call(self._inference.Tokenize, request, timeout_s).token_ids)

    def get_model(self, *, timeout_s: float | None = None) -> Model:
        """The served model."""
        request = inference_pb2.GetModelRequest()
        return messages.model_of(self._call(self._inference.GetModel, request, timeout_s).model)

    def status(self, *, timeout_s: float | None = None) -> Status:
        """The fleet as the router that answers sees it."""
        request = admin_pb2.GetStatusRequest()
        return messages.status_of(self._call(self._admin.GetStatus, request, timeout_s))

    def ready(self, *, timeout_s: float | None = 5.0) -> bool:
        """Whether a request would be served now; False also when nobody answers."""
        request = health_pb2.HealthCheckRequest()
        try:
            answer = self._call(self._health.Check, request, timeout_s)
        except (RetryableError, DeadlineExceeded):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server serves. Raises DeadlineExceeded."""
        messages.check_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self.ready(timeout_s=_left(deadline, timeout_s)):
            time.sleep(min(READY_POLL_S, _left(deadline, timeout_s)))

    def resume(
        self,
        resume_token: str,
        next_index: int | Mapping[int, int],
        *,
        timeout_s: float | None = None,
    ) -> Generator[Event, None, None]:
        """A kept stream from output token `next_index` on. With several choices: choice -> index
        for those that are wanted, or {} for all from the start."""
        messages.check_timeout(timeout_s)
        request = messages.resume_request(resume_token, next_index)
        return self._events(self._inference.Resume, request, timeout_s)

    def forget(self, resume_token: str, *, timeout_s: float | None = None) -> None:
        """Give up a kept stream."""
        request = inference_pb2.ForgetRequest(resume_token=resume_token)
        self._call(self._inference.Forget, request, timeout_s)

    def drain(
        self,
        engine_id: str,
        *,
        undo: bool = False,
        move: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """No new work for an engine (or work again); the sequences it still has. move: they go on
        elsewhere."""
        request = admin_pb2.DrainEngineRequest(engine_id=engine_id, undo=undo, move=move)
        return int(self._call(self._admin.DrainEngine, request, timeout_s).remaining)

    def _resuming(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> Generator[Event, None, None]:
        progress = Progress(request)
        try:
            while not progress.finished:
                message = progress.next_request()
                method = _method_for(message, self._inference)
                try:
                    for event in self._events(method, message, timeout_s):
                        if (fresh := progress.take(event)) is not None:
                            yield fresh
                except HeadwayRpcError as error:
                    if progress.finished:
                        # All of the output is here; what was lost is the end of the call.
                        return
                    time.sleep(progress.pause_s(error))
        finally:
            if progress.token and not progress.finished:
                # ValueError: the client was closed before its generators.
                with contextlib.suppress(HeadwayRpcError, ValueError):
                    self.forget(progress.token, timeout_s=FORGET_TIMEOUT_S)

    def _events(
        self, method: Any, request: Any, timeout_s: float | None
    ) -> Generator[Event, None, None]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            for message in call:
                event = messages.event_of(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        messages.check_timeout(timeout_s)
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class AsyncClient:
    """The same for asyncio. To be made and used in one event loop.

    >>> async with AsyncClient() as client:
    ...     async with contextlib.aclosing(client.generate("Once upon a time")) as events:
    ...         async for event in events:
    ...             print(event)
    """

    def __init__(self, connection: str | Connection = DEFAULT_ADDRESS) -> None:
        if isinstance(connection, str):
            connection = Connection(connection)
        self._channel = connection.aio_channel()
        self._metadata = connection.metadata()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        await self._channel.close(None)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        delivery: Delivery | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Stream an output: Accepted, Deltas, Finished. The call starts with the first event.
        With Sampling.n above 1 the events of all choices come as they come about, each with its
        `choice`, and the stream ends with the last Finished.

        aclose() gives the request up. A loop that is left early closes an asynchronous generator
        only when that is collected; contextlib.aclosing does it at once. With a resume window a
        lost call is gone on with; timeout_s is then each call's own.
        """
        messages.check_timeout(timeout_s)
        request = messages.generate_request(prompt, sampling, model, delivery)
        if request.resume_window_s > 0:
            return self._resuming(request, timeout_s)
        return self._events(self._inference.Generate, request, timeout_s)

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        delivery: Delivery | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """A whole output at once, or all of them."""
        request = messages.generate_request(prompt, sampling, model, delivery)
        response = await self._call(self._inference.Complete, request, timeout_s)
        return messages.completion_of(response)

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """Token ids of a text or a conversation, as generate() would prefill them."""
        request = messages.tokenize_request(prompt, model)
        return list((await self._call(self._inference.Tokenize, request, timeout_s)).token_ids)

    async def get_model(self, *, timeout_s: float | None = None) -> Model:
        """The served model."""
        request = inference_pb2.GetModelRequest()
        return messages.model_of(
            (await self._call(self._inference.GetModel, request, timeout_s)).model
        )

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """The fleet as the router that answers sees it."""
        request = admin_pb2.GetStatusRequest()
        return messages.status_of(await self._call(self._admin.GetStatus, request, timeout_s))

    async def ready(self, *, timeout_s: float | None = 5.0) -> bool:
        """Whether a request would be served now; False also when nobody answers."""
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await self._call(self._health.Check, request, timeout_s)
        except (RetryableError, DeadlineExceeded):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server serves. Raises DeadlineExceeded."""
        messages.check_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            if await self.ready(timeout_s=_left(deadline, timeout_s)):
                return
            await asyncio.sleep(min(READY_POLL_S, _left(deadline, timeout_s)))

    def resume(
        self,
        resume_token: str,
        next_index: int | Mapping[int, int],
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """A kept stream from output token `next_index` on. With several choices: choice -> index
        for those that are wanted, or {} for all from the start."""
        messages.check_timeout(timeout_s)
        request = messages.resume_request(resume_token, next_index)
        return self._events(self._inference.Resume, request, timeout_s)

    async def forget(self, resume_token: str, *, timeout_s: float | None = None) -> None:
        """Give up a kept stream."""
        request = inference_pb2.ForgetRequest(resume_token=resume_token)
        await self._call(self._inference.Forget, request, timeout_s)

    async def drain(
        self,
        engine_id: str,
        *,
        undo: bool = False,
        move: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """No new work for an engine (or work again); the sequences it still has. move: they go on
        elsewhere."""
        request = admin_pb2.DrainEngineRequest(engine_id=engine_id, undo=undo, move=move)
        return int((await self._call(self._admin.DrainEngine, request, timeout_s)).remaining)

    async def _resuming(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        progress = Progress(request)
        try:
            while not progress.finished:
                message = progress.next_request()
                method = _method_for(message, self._inference)
                try:
                    async with contextlib.aclosing(
                        self._events(method, message, timeout_s)
                    ) as events:
                        async for event in events:
                            if (fresh := progress.take(event)) is not None:
                                yield fresh
                except HeadwayRpcError as error:
                    if progress.finished:
                        # All of the output is here; what was lost is the end of the call.
                        return
                    await asyncio.sleep(progress.pause_s(error))
        finally:
            if progress.token and not progress.finished:
                with contextlib.suppress(HeadwayRpcError, ValueError, grpc.aio.UsageError):
                    await self.forget(progress.token, timeout_s=FORGET_TIMEOUT_S)

    async def _events(
        self, method: Any, request: Any, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                event = messages.event_of(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        messages.check_timeout(timeout_s)
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def _method_for(
    message: inference_pb2.GenerateRequest | inference_pb2.ResumeRequest,
    stub: inference_pb2_grpc.InferenceStub,
) -> Any:
    return stub.Resume if isinstance(message, inference_pb2.ResumeRequest) else stub.Generate


def _left(deadline: float, timeout_s: float) -> float:
    """Seconds until `deadline`. Raises DeadlineExceeded when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"the server was not ready within {timeout_s:g} s"
        )
    return left
