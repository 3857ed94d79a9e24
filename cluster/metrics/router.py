"""The metrics of a router: what each stream saw, and what became of the calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, Protocol

from cluster.core.outcome import ENGINE_LOSSES, FinishReason, LossCause, Refusal, ResumedFrom
from cluster.metrics import process
from cluster.metrics.facts import RouterFacts
from cluster.metrics.family import Family, Kind, Label, Lines
from cluster.metrics.histogram import SECONDS, Histogram
from cluster.metrics.window import Tail, TailWindow

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METHODS = ("Generate", "Resume", "Complete")
CODES = (
    "OK",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
    "OTHER",
)

INFO = Family(
    "headway_router_info",
    _G,
    "",
    "Always 1; names the router and the version of Headway.",
    (Label("router_id"), Label("version")),
)
TTFT = Family(
    "headway_router_ttft_seconds",
    _H,
    "seconds",
    "From the arrival of a call to its first token's handing over to gRPC, tokenising included.",
)
ITL = Family(
    "headway_router_itl_seconds",
    _H,
    "seconds",
    "Gap between two tokens of a stream; 0 for those that go out in one message.",
)
TPOT = Family(
    "headway_router_tpot_seconds",
    _H,
    "seconds",
    "Per stream of two tokens or more: time from its first to its last token, per token.",
)
LONGEST_GAP = Family(
    "headway_router_longest_gap_seconds",
    _H,
    "seconds",
    "Per stream of two tokens or more: the longest gap between two of them.",
)
QUEUE = Family(
    "headway_router_queue_seconds",
    _H,
    "seconds",
    "Per finished stream: from its arrival to the first step that worked on it, here and at the "
    "engine.",
)
CALL = Family(
    "headway_router_call_seconds", _H, "seconds", "Per stream that was begun: the whole call."
)
HISTOGRAMS = (TTFT, ITL, TPOT, LONGEST_GAP, QUEUE, CALL)

CALLS = Family(
    "headway_router_calls_total",
    _C,
    "",
    "Calls that ended, by method and gRPC status.",
    (Label("method", METHODS), Label("code", CODES)),
)
REFUSALS = Family(
    "headway_router_refusals_total",
    _C,
    "",
    "Calls turned away though nothing was wrong with them.",
    (Label("reason", tuple(reason.value for reason in Refusal)),),
)
FINISHED = Family(
    "headway_router_finished_total",
    _C,
    "",
    "Streams that ended well.",
    (Label("reason", tuple(reason.value for reason in FinishReason)),),
)
PROMPT = Family(
    "headway_router_prompt_tokens_total",
    _C,
    "tokens",
    "Prompt tokens of calls that were begun; several outputs of one share them.",
)
OUTPUT = Family(
    "headway_router_output_tokens_total", _C, "tokens", "Output tokens handed over to gRPC."
)
IN_FLIGHT = Family("headway_router_calls_in_flight", _G, "", "Calls in progress.")
_LOSSES = (Label("cause", tuple(cause.value for cause in ENGINE_LOSSES)),)
_CAUSES = (Label("cause", tuple(cause.value for cause in LossCause)),)


class _Read(NamedTuple):
    """A family whose values are read at a scrape, in the order of its label values."""

    family: Family
    of: Callable[[RouterFacts], tuple[float, ...]]


_READ = (
    _Read(
        Family("headway_router_streams", _G, "", "Streams in flight, those kept for resuming too."),
        lambda f: (f.streams,),
    ),
    _Read(
        Family("headway_router_queued", _G, "", "Streams that wait here for an engine with room."),
        lambda f: (f.queued,),
    ),
    _Read(
        Family("headway_router_queued_tokens", _G, "tokens", "Their prompt and emitted tokens."),
        lambda f: (f.queued_tokens,),
    ),
    _Read(
        Family(
            "headway_router_engines",
            _G,
            "",
            "Engines connected, by whether they take new streams.",
            (Label("state", ("taking", "draining")),),
        ),
        lambda f: (f.engines - f.draining, f.draining),
    ),
    _Read(
        Family(
            "headway_router_relief_moves_total",
            _C,
            "",
            "Streams moved to another engine because theirs was out of blocks.",
        ),
        lambda f: (f.relief_moves,),
    ),
    _Read(
        Family(
            "headway_router_engines_lost_total", _C, "", "Engines lost, by how it showed.", _LOSSES
        ),
        lambda f: tuple(f.counters.losses.values()),
    ),
    _Read(
        Family(
            "headway_router_replays_total",
            _C,
            "",
            "Streams that lost their engine and went on elsewhere, by how it was lost.",
            _CAUSES,
        ),
        lambda f: tuple(f.counters.replays.values()),
    ),
    _Read(
        Family(
            "headway_router_replayed_tokens_total",
            _C,
            "tokens",
            "Tokens computed again by streams that changed engines, by loss or relief.",
        ),
        lambda f: (f.counters.replayed_tokens,),
    ),
    _Read(
        Family(
            "headway_router_resumes_total",
            _C,
            "",
            "Streams that a client came back to: kept here, or handed over by their engine.",
            (Label("origin", tuple(origin.value for origin in ResumedFrom)),),
        ),
        lambda f: tuple(f.counters.resumes.values()),
    ),
)

FAMILIES: tuple[Family, ...] = (
    INFO,
    *HISTOGRAMS,
    CALLS,
    REFUSALS,
    FINISHED,
    PROMPT,
    OUTPUT,
    IN_FLIGHT,
    *(read.family for read in _READ),
    *process.FAMILIES,
)


class StreamMeter(Protocol):
    """Of one call's stream. Times are monotonic seconds."""

    def tokens(self, count: int, now: float) -> None:
        """`count` (at least 1) tokens go out in one message."""

    def finished(self, reason: FinishReason, queue_s: float | None) -> None: ...

    def over(self, now: float) -> None:
        """The call ends, however. To be called once."""


class RouterMeter(Protocol):
    """What the gateway tells. arrived_s: when the call came."""

    def stream(self, arrived_s: float, prompt_tokens: int) -> StreamMeter: ...

    def resumed(self, arrived_s: float) -> StreamMeter:
        """One that goes on; its first token here says nothing of a time to a first token."""

    def refused(self, reason: Refusal) -> None: ...

    def began(self) -> None:
        """A call is in progress."""

    def ended(self, method: str, code: str) -> None:
        """It has ended, with a gRPC status."""


class NoStreamMeter:
    def tokens(self, count: int, now: float) -> None: ...

    def finished(self, reason: FinishReason, queue_s: float | None) -> None: ...

    def over(self, now: float) -> None: ...


class NoMeter:
    """Nobody measures."""

    def __init__(self) -> None:
        self._stream = NoStreamMeter()

    def stream(self, arrived_s: float, prompt_tokens: int) -> StreamMeter:
        return self._stream

    def resumed(self, arrived_s: float) -> StreamMeter:
        return self._stream

    def refused(self, reason: Refusal) -> None: ...

    def began(self) -> None: ...

    def ended(self, method: str, code: str) -> None: ...


class _Stream:
    """Implements StreamMeter. `tokens` runs for every message: nothing is looked up in it."""

    __slots__ = (
        "_arrived_s",
        "_counts",
        "_first_s",
        "_itl",
        "_last_s",
        "_longest_s",
        "_metrics",
        "_seen",
    )

    def __init__(self, metrics: RouterMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._itl = metrics.itl
        self._counts = metrics.itl.counts
        self._arrived_s = arrived_s
        self._first_s = self._last_s = self._longest_s = 0.0
        self._seen = 0

    def tokens(self, count: int, now: float) -> None:
        if self._seen:
            gap = now - self._last_s
            self._counts[bisect_left(SECONDS, gap)] += 1
            self._itl.total += gap
            if gap > self._longest_s:
                self._longest_s = gap
        else:
            self._first_s = now
            self._begin(now)
        if count > 1:
            self._counts[0] += count - 1
        self._seen += count
        self._last_s = now

    def _begin(self, now: float) -> None:
        self._metrics.ttft.observe(now - self._arrived_s)

    def finished(self, reason: FinishReason, queue_s: float | None) -> None:
        self._metrics.finished[reason] += 1
        if queue_s is not None:
            self._metrics.queue.observe(queue_s)

    def over(self, now: float) -> None:
        metrics = self._metrics
        metrics.call.observe(now - self._arrived_s)
        if self._seen > 1:
            spread = self._last_s - self._first_s
            metrics.tpot.observe(spread / (self._seen - 1))
            metrics.longest_gap.observe(self._longest_s)


class _ResumedStream(_Stream):
    __slots__ = ()

    def _begin(self, now: float) -> None:
        self._metrics.resumed_firsts += 1


class RouterMetrics:
    """Implements RouterMeter, in one thread; text() may be called from any.

    facts: reads the router. known: router_id, version.
    """

    def __init__(self, facts: Callable[[], RouterFacts], known: dict[str, str]) -> None:
        self._facts = facts
        self.calls = 0
        """In progress."""
        self.ttft, self.itl, self.tpot, self.longest_gap, self.queue, self.call = histograms = [
            Histogram() for _ in HISTOGRAMS
        ]
        self.finished = dict.fromkeys(FinishReason, 0)
        self.resumed_firsts = 0
        self.window = TailWindow(
            {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "gap": self.longest_gap}
        )
        self._prompt_tokens = 0
        self._refusals = dict.fromkeys(Refusal, 0)
        self._calls = {(method, code): 0 for method in METHODS for code in CODES}
        self._info = Lines(INFO, known)
        self._histograms = list(zip(map(Lines, HISTOGRAMS), histograms, strict=True))
        counted = (CALLS, REFUSALS, FINISHED, PROMPT, OUTPUT, IN_FLIGHT)
        self._counted = [Lines(family) for family in counted]
        self._read = [(Lines(read.family), read.of) for read in _READ]
        self._process = process.ProcessLines()

    def stream(self, arrived_s: float, prompt_tokens: int) -> StreamMeter:
        self._prompt_tokens += prompt_tokens
        return _Stream(self, arrived_s)

    def resumed(self, arrived_s: float) -> StreamMeter:
        return _ResumedStream(self, arrived_s)

    def refused(self, reason: Refusal) -> None:
        self._refusals[reason] += 1

    def began(self) -> None:
        self.calls += 1

    def ended(self, method: str, code: str) -> None:
        self.calls -= 1
        key = (method, code if code in CODES else CODES[-1])
        self._calls[key] += 1

    @property
    def output_tokens(self) -> int:
        """Every token is a stream's first one or has a gap before it."""
        return self.ttft.count + self.itl.count + self.resumed_firsts

    def tails(self, now: float) -> list[Tail]:
        """Of the last minute, about."""
        return self.window.tails(now)

    def text(self) -> str:
        """A scrape."""
        facts = self._facts()
        counted: list[list[float]] = [
            list(self._calls.values()),
            list(self._refusals.values()),
            list(self.finished.values()),
            [self._prompt_tokens],
            [self.output_tokens],
            [self.calls],
        ]
        parts = [self._info.numbers([1])]
        parts += [lines.histogram(found) for lines, found in self._histograms]
        parts += [lines.numbers(n) for lines, n in zip(self._counted, counted, strict=True)]
        parts += [lines.numbers(of(facts)) for lines, of in self._read]
        parts.append(self._process.text())
        return "".join(parts)
