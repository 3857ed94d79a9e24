"""What the front door sees of the system: open a request, read its tokens, close it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.core.ids import TokenId
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import DrainOrder, FinishReason
from cluster.core.plan import TokenLogprob
from cluster.core.sampling import SamplingParams
from cluster.metrics.facts import RouterFacts


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request for one output: everything that decides which tokens come out. A call
    with several choices is as many of these.

    prompt_ids: at least one, each inside the vocabulary. sampling: fully resolved, seed included.
    tenant: whose request it is; queues are per tenant, and tenants share no KV blocks. priority:
    the larger goes first, in -1000 to 1000. session: requests of one session go to one engine where
    the placement looks at it. ttft_objective_s: when its first token is wanted.
    stop: strings that end the output, for whoever goes on with it; not looked at by the router.
    resume_window_s: how long the stream is kept for somebody to resume it; 0 for not at all.
    emitted_ids: output that was delivered before, by an earlier call. choice: which of its call's
    outputs it is; the seed in `sampling` is its own.
    """

    request_id: str
    prompt_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    session: str = ""
    ttft_objective_s: float | None = None
    stop: tuple[str, ...] = ()
    resume_window_s: float = 0.0
    emitted_ids: tuple[TokenId, ...] = ()
    choice: int = 0


class TokenBatch(NamedTuple):
    """Tokens [first_index, first_index + len(token_ids)) of the output, in order.

    A slow reader gets several steps' tokens in one batch; nothing is dropped. `finish` is set
    on the last batch of a stream and only there (that batch may be empty). emit_time_s: wall clock
    (Unix seconds) at which the engine emitted the newest of them. logprobs: one per id where they
    were asked for. prompt_logprobs: with index 0, if asked for.
    """

    first_index: int
    token_ids: list[TokenId]
    emit_time_s: float
    finish: FinishReason | None
    logprobs: Sequence[TokenLogprob | None] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()


@dataclass(slots=True)
class StreamTiming:
    """Where a request's time went, in seconds; None until it is known."""

    queue_s: float | None = None
    """From open() to the first step that worked on it."""
    first_token_s: float | None = None
    """From open() to the first token's arrival at the router."""
    total_s: float | None = None
    preemptions: int = 0
    """How often its KV blocks were taken away and recomputed on its engine."""
    replays: int = 0
    """How often it was moved to another engine (or a restarted one)."""
    recomputed_tokens: int = 0
    """Computed more than once, because of preemptions and moves."""
    engine_ids: list[str] = field(default_factory=list)
    """The engines that worked on it, in order."""


class TokenStream(Protocol):
    """A reader of one request in flight; another one may take its place."""

    @property
    def timing(self) -> StreamTiming: ...

    @property
    def resume_token(self) -> str:
        """For TokenSource.resume_all, the same for all choices of a call; "" for a stream that is
        not kept."""

    async def next(self) -> TokenBatch:
        """The tokens that have come since the last call, or the first of them if they are very
        many; waits for one.

        After a batch with `finish` the stream is over and next() must not be called again.
        Raises the HeadwayError that ended the stream: Unavailable, SequenceFailed, SlowReader, ...
        """

    def leave(self) -> None:
        """Read no further. A stream that can be resumed is kept for its window, any other one is
        given up and what it holds is freed. Idempotent, never blocks, never raises; call it in a
        `finally`."""

    def end(self) -> None:
        """The output ends here, by a stop string: nothing more need be produced. Idempotent."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as the router sees it in its newest frame."""

    engine_id: str
    address: str
    epoch: int
    connected: bool
    blocks_total: int
    blocks_free: int
    running: int
    waiting: int
    step: int
    tokens_per_s: float
    preemptions: int
    frame_age_s: float
    """Seconds since its newest frame."""
    draining: bool = False
    step_s: float = 0.0
    """Seconds per step, lately."""
    recomputed_tokens: int = 0
    metrics: str = ""
    """Where it is scraped, host:port; "" for nowhere."""


class Resumed(NamedTuple):
    """A stream that goes on. request: as it was asked for, with the ids that the reader has."""

    request: GenerationRequest
    stream: TokenStream


class TokenSource(Protocol):
    """What the gateway needs from the router's middle (router.dispatcher.Dispatcher)."""

    @property
    def model(self) -> ModelInfo | None:
        """The model that the fleet serves; None until a first engine is connected."""

    def ready(self) -> bool:
        """True while at least one engine is connected and alive."""

    async def open_all(self, requests: Sequence[GenerationRequest]) -> Sequence[TokenStream]:
        """Place the choices of one call, at least one: all or none of them. They differ in choice,
        seed and emitted ids. Raises InvalidRequest (can never fit), Overloaded, Unavailable."""

    async def resume_all(self, token: str, positions: Mapping[int, int]) -> list[Resumed]:
        """Read kept choices of a call on. positions: choice -> output token to go on from; none at
        all wants every choice from its first token. Raises UnknownResumeToken, InvalidRequest for
        a choice or an index beyond what there is, Unavailable."""

    def forget(self, token: str) -> None:
        """Give up all choices of a kept call. Idempotent."""

    def engines(self) -> list[EngineStatus]: ...

    def facts(self) -> RouterFacts: ...

    def drain(self, engine_id: str, order: DrainOrder) -> int | None:
        """An operator's word to an engine: the sequences it still has; None if it is not known."""
