"""Streams that change routers: what travels with a log, and asking the engines for one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.hop.link import EngineLink
from cluster.hop.messages import Adopt, Adopted, Keep, KeptLog
from cluster.router.active import ActiveStream
from cluster.router.stream import GenerationRequest

ANSWER_S = 2.0
"""An engine that has not answered by then does not know the stream, or is lost."""


def keep_of(stream: ActiveStream) -> Keep | None:
    """What the engine is to keep besides the log; None for a stream that cannot be resumed."""
    request = stream.request
    if not stream.resume_token:
        return None
    return Keep(
        stream.kept_as,
        request.resume_window_s,
        request.request_id,
        list(request.stop),
        request.session,
    )


def request_of(kept: KeptLog, choice: int) -> GenerationRequest:
    """The request as it was asked for, with all ids that its engine knew. choice: the token says
    which."""
    keep = kept.keep
    return GenerationRequest(
        keep.request_id,
        tuple(kept.prompt_ids),
        kept.sampling,
        tenant=kept.tenant,
        priority=kept.priority,
        session=keep.session,
        stop=tuple(keep.stop),
        resume_window_s=keep.window_s,
        emitted_ids=tuple(kept.emitted_ids),
        choice=choice,
    )


class Adoptions:
    """Questions to engines that are not answered yet. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, asyncio.Future[KeptLog | None]] = {}

    async def ask(self, links: Sequence[EngineLink], token: str, least: int) -> KeptLog | None:
        """The log of a stream from an engine that has it; None if none answers with it.

        An engine from which the stream was moved while its connection was down may have a copy that
        has been overtaken: the first with `least` ids is taken, or else the longest there is.
        """
        questions: dict[int, asyncio.Future[KeptLog | None]] = {}
        for link in links:
            self._last += 1
            questions[self._last] = asyncio.get_running_loop().create_future()
            self._open[self._last] = questions[self._last]
            link.send(Adopt(self._last, token))
        best: KeptLog | None = None
        try:
            for answer in asyncio.as_completed(questions.values(), timeout=ANSWER_S):
                log = await answer
                if log is not None and len(log.emitted_ids) >= least:
                    return log
                best = max(best, log, key=_length)
        except asyncio.TimeoutError:
            pass
        finally:
            for number in questions:
                self._open.pop(number, None)
        return best

    def answered(self, message: Adopted) -> None:
        """An engine's answer; one that comes too late is passed over."""
        future = self._open.pop(message.number, None)
        if future is not None and not future.done():
            future.set_result(message.log)


def _length(log: KeptLog | None) -> int:
    return -1 if log is None else len(log.emitted_ids)
