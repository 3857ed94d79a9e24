"""What goes into a call and comes out of it: plain dataclasses instead of wire messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role: usually "system", "user" or "assistant"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""A raw text, token ids, or a conversation for the model's chat template."""

MAX_TIMEOUT_S = 366 * 24 * 3600.0
"""Longest deadline of a call, a year; gRPC cannot carry any number. None is no deadline."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn and when to stop; None leaves a field to the server.

    temperature 0 is greedy. stop is a tuple also for one string: a str alone is refused. n: outputs
    of one request, its choices. See inference.proto for ranges and defaults.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the probability that the model gave an id. top: (id, log-probability) of
    the likeliest, as many as were asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request is to be treated, whatever it asks for; see inference.proto.

    resume_window_s: after the loss of a call the client goes on with the stream for so long, from
    whichever router answers, without losing or repeating anything; 0 ends it with the error.
    """

    tenant: str = ""
    priority: int = 0
    session: str = ""
    ttft_objective_s: float | None = None
    resume_window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of a stream. seed: repeats this output when sent with the same request.
    resume_token: names the stream if it is kept, else ""."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    max_tokens: int
    resume_token: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """Some more output of a choice. first_index: of token_ids within it, from 0. text: what has
    become certain. emit_time_s: when the engine emitted the newest id, Unix seconds."""

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    emit_time_s: float
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a choice; the stream ends with that of the last.

    reason: "stop" or "length". matched_stop: the stop string or the stop token's id, if one was.
    prompt_tokens: told once, with choice 0, and 0 with every other. completion_tokens: ids that
    were sent. Times are seconds from the request's arrival at the router, None when unknown;
    preemptions and replays count what the choice went through. engine_ids: the engines that worked
    on it, in order. recomputed_tokens: computed more than once.
    """

    reason: str
    matched_stop: str | int | None
    prompt_tokens: int
    completion_tokens: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float | None
    preemptions: int
    replays: int
    engine_ids: tuple[str, ...] = ()
    recomputed_tokens: int = 0
    choice: int = 0


Event: TypeAlias = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole output; finished says which."""

    token_ids: tuple[int, ...]
    text: str
    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request with all of its outputs. What a request with one output asks for stands
    here as well: token_ids, text, finished and logprobs are those of the first."""

    accepted: Accepted
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finished(self) -> Finished:
        return self.choices[0].finished

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Model:
    """The served model. max_model_len: prompt plus output tokens of one request at most."""

    name: str
    architecture: str
    fingerprint: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine as its router sees it; see admin.proto."""

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
    draining: bool = False
    step_s: float = 0.0
    recomputed_tokens: int = 0
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Tail:
    """Seconds, of the last minute at one router; None without observations. name: "ttft", "itl",
    "tpot" or "gap", see admin.proto."""

    name: str
    observations: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Router:
    """One router; see admin.proto."""

    router_id: str
    version: str
    uptime_s: float
    active_streams: int
    ready: bool
    queued: int
    queued_tokens: int
    relief_moves: int
    metrics: str
    tails: tuple[Tail, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """The fleet as one router sees it. model: None until a first engine has connected. queued,
    queued_tokens: what waits at the router for an engine with room. relief_moves: streams moved
    between engines because blocks ran out. routers: all there are, the one that answers first."""

    version: str
    uptime_s: float
    active_streams: int
    ready: bool
    model: Model | None
    engines: tuple[Engine, ...]
    queued: int = 0
    queued_tokens: int = 0
    relief_moves: int = 0
    routers: tuple[Router, ...] = ()
