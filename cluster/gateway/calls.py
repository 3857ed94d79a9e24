"""One call of the Inference service as the log and the metrics tell of it when it is over."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable

from google.rpc import code_pb2  # type: ignore[import-untyped]

from cluster.core.errors import HeadwayError, Overloaded, Unavailable
from cluster.gateway.status import to_status
from cluster.logs import REQUEST_ID
from cluster.metrics.router import RouterMeter
from cluster.router.stream import StreamTiming

logger = logging.getLogger(__name__)


class Call:
    """What becomes known of a call while it is served. request_id: also told to the caller."""

    __slots__ = ("arrived_s", "method", "output_tokens", "prompt_tokens", "request_id", "timing")

    def __init__(self, method: str) -> None:
        self.method = method
        self.request_id = uuid.uuid4().hex
        self.arrived_s = time.monotonic()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.timing: StreamTiming | None = None


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
    timing = call.timing or StreamTiming()
    total_s = time.monotonic() - call.arrived_s
    facts = {
        "method": call.method,
        "code": code,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "total_ms": round(total_s * 1e3, 1),
        "first_token_ms": _ms(timing.first_token_s),
        "queue_ms": _ms(timing.queue_s),
        "preemptions": timing.preemptions,
        "replays": timing.replays,
        "engines": timing.engine_ids,
    }
    logger.info(
        "%s ended with %s: %d + %d tokens in %.3f s",
        call.method,
        code,
        call.prompt_tokens,
        call.output_tokens,
        total_s,
        extra={"request_id": call.request_id, "facts": facts},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
