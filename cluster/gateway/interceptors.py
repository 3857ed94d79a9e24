"""What is decided about a call before its handler runs: who calls, and whether there is room."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.core.errors import ConfigError, InvalidRequest, Overloaded
from cluster.core.outcome import Refusal
from cluster.gateway.status import Unauthenticated, abort
from cluster.metrics.router import RouterMeter

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Open without a key: probes of an orchestrator have none, and it tells no secret."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler"]]
Behaviour: TypeAlias = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]


class ApiKeys:
    """The keys that are admitted. Only their hashes are kept in memory.

    keys: at least one, each non-empty ASCII without spaces.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """One key per line; empty lines and lines that begin with '#' are skipped.

        Raises ConfigError when the file cannot be read, has no key, or one with a space in it.
        """
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"API keys file {path}: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"API keys file {path}: has no key; without keys leave it unset")
        for number, line in enumerate(lines, start=1):
            if line in keys and not (line.isascii() and line.isprintable() and " " not in line):
                raise ConfigError(f"API keys file {path}, line {number}: must be ASCII, no spaces")
        return cls(keys)

    def admits(self, key: str) -> bool:
        """Whether it is one of the keys; how long that takes does not depend on which."""
        digest = _digest(key)
        # A sum looks at every key; any() would stop at the first hit.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits calls with the metadata `authorization: Bearer <key>`; UNAUTHENTICATED otherwise."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        open_to_all = handler_call_details.method.startswith(HEALTH_PREFIX)
        if handler is None or open_to_all or self._admits(handler_call_details):
            return handler

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await abort(context, Unauthenticated("a valid API key is required"))

        return _with_behaviour(handler, refuse)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        key = _key_in(details.invocation_metadata or ())
        return key is not None and self._keys.admits(key)


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """A name for whoever calls, from the API key that was sent; "" without one. Callers with
    different keys have different names, and no key can be told from its name."""
    key = _key_in(context.invocation_metadata() or ())
    return "" if key is None else _digest(key).hex()[:16]


def _key_in(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, key = value.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else None
    return None


class InFlight:
    """Generations in progress in this process, and how many there may be."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        self.active = 0
        self._limit = limit
        self._retry_after_s = retry_after_s

    def enter(self) -> None:
        """Take a place. Raises Overloaded when there is none."""
        if self.active >= self._limit:
            raise Overloaded(
                f"{self._limit} requests are in progress here already",
                self._retry_after_s,
                Refusal.CALLS,
            )
        self.active += 1

    def leave(self) -> None:
        self.active -= 1


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Reads the messages of `services` ("package.Service"), so that one that cannot be read is
    INVALID_ARGUMENT like every bad request; gRPC itself would say UNKNOWN. It goes last: what goes
    before it sees bytes."""

    def __init__(self, services: Iterable[str]) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefixes):
            return handler
        inner: Behaviour = handler.unary_stream or handler.unary_unary  # type: ignore[assignment]
        decode: Callable[[bytes], Any] = handler.request_deserializer  # type: ignore[assignment]

        async def decoded(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                request = decode(raw)
            except DecodeError as error:
                reason = f"cannot be read as what {handler_call_details.method} takes: {error}"
                await abort(context, InvalidRequest.single("request", reason))
            return await inner(request, context)

        return _with_behaviour(handler, decoded, _takes_bytes)


class _AroundCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts something around the calls of `methods` ("/package.Service/Method")."""

    def __init__(self, methods: Collection[str]) -> None:
        self._methods = frozenset(methods)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method not in self._methods:
            return handler
        inner: Behaviour = handler.unary_stream or handler.unary_unary  # type: ignore[assignment]
        return _with_behaviour(handler, self._around(inner, method))

    def _around(self, inner: Behaviour, method: str) -> Behaviour:
        raise NotImplementedError


class InFlightInterceptor(_AroundCalls):
    """Counts the calls of `methods` and refuses those beyond the limit."""

    def __init__(self, in_flight: InFlight, methods: Collection[str], meter: RouterMeter) -> None:
        super().__init__(methods)
        self._in_flight = in_flight
        self._meter = meter

    def _around(self, inner: Behaviour, method: str) -> Behaviour:
        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                self._in_flight.enter()
            except Overloaded as error:
                self._meter.refused(error.reason)
                await abort(context, error)
            try:
                return await inner(request, context)
            finally:
                self._in_flight.leave()

        return counted


class CallsInterceptor(_AroundCalls):
    """Tells the meter how the calls of `methods` end, those that other interceptors refuse too: it
    goes first."""

    def __init__(self, meter: RouterMeter, methods: Collection[str]) -> None:
        super().__init__(methods)
        self._meter = meter

    def _around(self, inner: Behaviour, method: str) -> Behaviour:
        name = method.rpartition("/")[2]

        async def measured(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._meter.began()
            code = grpc.StatusCode.OK
            try:
                return await inner(request, context)
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                self._meter.ended(name, code.name)

        return measured


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _code_of(error: BaseException, context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    """What the client sees, or would see if it were still there."""
    if isinstance(error, grpc.aio.AbortError):
        # Declared as a StatusCode; grpc gives the number.
        code: Any = context.code()
        return code if isinstance(code, grpc.StatusCode) else _CODES[code]
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, asyncio.CancelledError) or context.done():
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.UNKNOWN


def _digest(key: str) -> bytes:
    # Equal lengths for compare_digest, which would otherwise tell the length of a key.
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _takes_bytes(raw: bytes) -> bytes:
    """For a handler that reads messages itself."""
    return raw


def _with_behaviour(
    handler: Handler, behaviour: Behaviour, deserializer: Callable[[bytes], Any] | None = None
) -> Handler:
    """A handler of the same kind and codecs, but for what is given, that runs `behaviour`."""
    makers: dict[tuple[bool, bool], Callable[..., Handler]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        behaviour,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
