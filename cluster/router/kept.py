"""Streams that outlive their call: kept by token, resumed here or taken over from an engine.

One token stands for a call and all of its choices. Each choice is a log of its own, kept under a
token of its own that follows from the call's: so whoever has the call's token can ask any engine
for each of them, and which choices there are need not be stored anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from cluster.core.errors import InvalidRequest, UnknownResumeToken
from cluster.core.outcome import ResumedFrom
from cluster.core.sampling import MAX_CHOICES
from cluster.hop.link import EngineLink
from cluster.hop.messages import Adopted, KeptLog
from cluster.router.active import ActiveStream
from cluster.router.adoption import Adoptions, request_of
from cluster.router.stream import GenerationRequest, Resumed

_SECRET_BYTES = 24
_BITS = re.compile(rf"[1-9a-f][0-9a-f]{{0,{(MAX_CHOICES - 1) // 4}}}")
_MAX_TOKEN_CHARS = 64
"""Longer ones are nobody's, and engines take no message with a name of any length."""


def new_token(choices: Iterable[int]) -> str:
    """Names a call with these choices: a secret, and unless it is choice 0 alone, which there are,
    as the bits of a number."""
    secret, bits = secrets.token_urlsafe(_SECRET_BYTES), sum(1 << choice for choice in choices)
    return secret if bits == 1 else f"{secret}.{bits:x}"


def tokens_of(call: str) -> dict[int, str]:
    """Choice -> under which token it is kept. Raises UnknownResumeToken."""
    secret, dot, bits = call.partition(".")
    if len(call) <= _MAX_TOKEN_CHARS and secret:
        if not dot:
            return {0: call}
        if _BITS.fullmatch(bits):
            found = [choice for choice in range(MAX_CHOICES) if int(bits, 16) >> choice & 1]
            return {choice: f"{call}.{choice}" for choice in found}
    raise UnknownResumeToken("no such stream is kept; this is no token of ours")


class Home(Protocol):
    """The dispatcher, as far as kept streams need it."""

    def begin(self, request: GenerationRequest) -> ActiveStream:
        """A stream that is in flight here, and nowhere placed."""

    def go_on(self, stream: ActiveStream, log: KeptLog) -> None:
        """It has been taken over with this log: have it produced, if anything is left."""

    def give_up(self, stream: ActiveStream) -> None:
        """Nobody wants it any more, now or later."""

    def links(self) -> Sequence[EngineLink]: ...


class KeptStreams:
    """Belongs to one asyncio loop. resumed: called with where each stream was found."""

    def __init__(self, home: Home, resumed: Callable[[ResumedFrom], None]) -> None:
        self._home = home
        self._resumed = resumed
        self._streams: dict[str, ActiveStream] = {}
        self._adoptions = Adoptions()

    def __contains__(self, token: str) -> bool:
        return token in self._streams

    def keep(self, streams: Sequence[ActiveStream]) -> None:
        """All choices of a call that can be resumed, from now on."""
        call = new_token(stream.request.choice for stream in streams)
        tokens = tokens_of(call)
        for stream in streams:
            self._keep(stream, call, tokens[stream.request.choice])

    def _keep(self, stream: ActiveStream, call: str, token: str) -> None:
        stream.resume_token, stream.kept_as = call, token
        self._streams[token] = stream

    def drop(self, stream: ActiveStream) -> None:
        """Idempotent."""
        if self._streams.get(stream.kept_as) is stream:
            del self._streams[stream.kept_as]

    def of(self, call: str) -> list[ActiveStream]:
        """Those of the call that are kept here."""
        found = map(self._streams.get, tokens_of(call).values())
        return [stream for stream in found if stream is not None]

    def expired(self, now: float) -> list[ActiveStream]:
        return [
            stream
            for stream in self._streams.values()
            if stream.expires_s is not None and now >= stream.expires_s
        ]

    def answered(self, message: Adopted) -> None:
        self._adoptions.answered(message)

    async def resume(self, call: str, positions: Mapping[int, int]) -> list[Resumed]:
        """See TokenSource.resume_all. The readers until now are cut off only if all is well."""
        tokens = tokens_of(call)
        wanted = dict(positions) or dict.fromkeys(tokens, 0)
        for choice in wanted:
            if choice not in tokens:
                there = ", ".join(map(str, tokens))
                raise InvalidRequest.single(
                    "positions", f"choice {choice} is not one of this call, which has {there}"
                )
        here = {choice for choice in wanted if tokens[choice] in self._streams}
        links = self._home.links()
        await asyncio.gather(
            *(self._adopt(links, call, c, least) for c, least in wanted.items() if c not in here)
        )
        # Looked up only now: while engines were asked, one that was here may have expired.
        found = {
            choice: self._streams[tokens[choice]]
            for choice in wanted
            if tokens[choice] in self._streams
        }
        for choice, stream in found.items():
            _check_index(stream, wanted[choice])
        try:
            if len(found) < len(wanted):
                raise UnknownResumeToken("no such stream is kept; it may have expired")
            for choice, stream in found.items():
                _check_copy(stream, wanted[choice])
        except UnknownResumeToken:
            # The rest alone is of no use to this client; it would be computed for nobody.
            for choice in found.keys() - here:
                if found[choice].expires_s is not None:
                    self._home.give_up(found[choice])
            raise
        resumed = []
        for choice, stream in found.items():
            self._resumed(ResumedFrom.HERE if choice in here else ResumedFrom.ENGINE)
            emitted = tuple(stream.log.emitted[: wanted[choice]])
            request = dataclasses.replace(stream.request, emitted_ids=emitted)
            resumed.append(Resumed(request, stream.attach(wanted[choice])))
        return resumed

    async def _adopt(self, links: Sequence[EngineLink], call: str, choice: int, least: int) -> None:
        """Keep here what another router had, from the engine that produced it, if any did."""
        token = tokens_of(call)[choice]
        log = await self._adoptions.ask(links, token, least)
        # Two calls asked at the same time: the engine's answer went to one of them.
        if log is None or token in self._streams:
            return
        stream = self._home.begin(request_of(log, choice))
        self._keep(stream, call, token)
        # Until somebody reads it, which may come to nothing.
        stream.expires_s = time.monotonic() + log.keep.window_s
        self._home.go_on(stream, log)


def _check_index(stream: ActiveStream, index: int) -> None:
    """One that no copy of the log can have is the caller's mistake."""
    log = stream.log
    over = log.finish is not None
    limit = len(log.emitted) if over else stream.request.sampling.max_tokens
    if not 0 <= index <= limit:
        raise InvalidRequest.single(
            "positions",
            f"next_index of choice {stream.request.choice} must be between 0 and {limit}, "
            f"{'what was produced' if over else 'its max_tokens'}; got {index}",
        )


def _check_copy(stream: ActiveStream, index: int) -> None:
    """A copy may be behind the client: the router and the engine that knew more are gone, or this
    router was cut off while the stream went on at another. The client has what is missing."""
    held = len(stream.log.emitted)
    if index > held:
        raise UnknownResumeToken(
            f"what is kept of choice {stream.request.choice} ends at {held}, before next_index "
            f"{index}; send the request again, with its seed and what has arrived in `emitted`"
        )
