"""One call of the Inference service as the log and the metrics tell of it when it is over."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Iterable, Sequence

from google.rpc import code_pb2  # type: ignore[import-untyped]

from cluster.core.errors import HeadwayError, Overloaded, Unavailable
from cluster.gateway.status import to_status
from cluster.logs import REQUEST_ID
from cluster.metrics.router import RouterMeter
from cluster.router.stream import StreamTiming

logger = logging.getLogger(__name__)


class Call:
    """What becomes known of a call while it is served. request_id: also told to the caller."""

    __slots__ = ("arrived_s", "method", "output_tokens", "prompt_tokens", "request_id", "timings")

    def __init__(self, method: str) -> None:
        self.method = method
        self.request_id = uuid.uuid4().hex
        self.arrived_s = time.monotonic()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.timings: list[StreamTiming] = []
        """Of its choices, as far as they were begun."""


async def observed(call: Call, meter: RouterMeter, work: Awaitable[None]) -> None:
    """Run the call's work; refusals are counted, and its end is logged."""
    REQUEST_ID.set(call.request_id)
    code = "OK"
    try:
        await work
    except BaseException as error:
        code = _code_of(error)
        if isinstance(error, Overloaded | Unavailable):
            meter.refused(error.reason)
        raise
    finally:
        if logger.isEnabledFor(logging.INFO):
            _log(call, code)


def _code_of(error: BaseException) -> str:
    if isinstance(error, HeadwayError):
        return str(code_pb2.Code.Name(to_status(error).code))
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"


def _log(call: Call, code: str) -> None:
    timings = call.timings
    total_s = time.monotonic() - call.arrived_s
    facts: dict[str, object] = {
        "method": call.method,
        "code": code,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "total_ms": round(total_s * 1e3, 1),
        "first_token_ms": _ms(timing.first_token_s for timing in timings),
        "queue_ms": _ms(timing.queue_s for timing in timings),
        "preemptions": sum(timing.preemptions for timing in timings),
        "replays": sum(timing.replays for timing in timings),
        "engines": _engines(timings),
    }
    if len(timings) > 1:
        facts["choices"] = len(timings)
    logger.info(
        "%s ended with %s: %d + %d tokens in %.3f s",
        call.method,
        code,
        call.prompt_tokens,
        call.output_tokens,
        total_s,
        extra={"request_id": call.request_id, "facts": facts},
    )


def _ms(seconds: Iterable[float | None]) -> float | None:
    """The first choice to get there is the call's."""
    known = [one for one in seconds if one is not None]
    return round(min(known) * 1e3, 1) if known else None


def _engines(timings: Sequence[StreamTiming]) -> list[str]:
    """In the order in which each choice went from one to the next; with several, each once."""
    if len(timings) == 1:
        return timings[0].engine_ids
    return list(dict.fromkeys(one for timing in timings for one in timing.engine_ids))
