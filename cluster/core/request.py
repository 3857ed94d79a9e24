"""A request as an engine sees it: a token log to be continued."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.errors import FieldViolation, InvalidRequest
from cluster.core.ids import TokenId
from cluster.core.sampling import SamplingParams

MAX_PRIORITY = 1000
MIN_OBJECTIVE_S = 0.001
MAX_OBJECTIVE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Prompt, sampling parameters, and what was emitted before (elsewhere or earlier).

    emitted_ids is empty for a fresh request. In a replay it holds every token that the log's
    owner has accepted; the engine goes on at output index ``len(emitted_ids)``.
    priority: the larger goes first, where the queue's policy looks at it. tenant: whose request it
    is; tenants share no KV blocks. ttft_objective_s: when its first token is wanted.
    """

    prompt_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    emitted_ids: tuple[TokenId, ...] = ()
    priority: int = 0
    tenant: str = ""
    ttft_objective_s: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequest.single("prompt", "must have at least one token")
        if len(self.emitted_ids) >= self.sampling.max_tokens:
            raise InvalidRequest.single(
                "emitted",
                f"{len(self.emitted_ids)} tokens are emitted already, "
                f"max_tokens is {self.sampling.max_tokens}",
            )

        wishes = wish_violations(self.priority, self.ttft_objective_s)
        if wishes:
            raise InvalidRequest(wishes)

    @property
    def max_total(self) -> int:
        """Prompt + output tokens of the finished sequence at most."""
        return len(self.prompt_ids) + self.sampling.max_tokens


def wish_violations(priority: int, ttft_objective_s: float | None) -> list[FieldViolation]:
    """What is wrong with how a request wants to be treated; fields as on the wire."""
    wrong: list[FieldViolation] = []
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        limits = f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}"
        wrong.append(FieldViolation("priority", limits))
    if ttft_objective_s is not None and (problem := objective_problem(ttft_objective_s)):
        wrong.append(FieldViolation("ttft_objective_s", problem))
    return wrong


def objective_problem(ttft_objective_s: float) -> str | None:
    """Why it is no time to the first token that could be wanted, or None."""
    if MIN_OBJECTIVE_S <= ttft_objective_s <= MAX_OBJECTIVE_S:
        return None
    return f"must be between {MIN_OBJECTIVE_S:g} and {MAX_OBJECTIVE_S:g}, got {ttft_objective_s!r}"


def check_fits(request: EngineRequest, limit: int) -> None:
    """Refuse at the door what could never finish.

    limit: prompt + output tokens at most (the model's length or the KV pool, whichever is less).
    """
    if request.max_total <= limit:
        return
    prompt, output = len(request.prompt_ids), request.sampling.max_tokens
    if prompt >= limit:
        raise InvalidRequest.single(
            "prompt", f"{prompt} tokens leave no room for output: prompt + output may be {limit}"
        )
    raise InvalidRequest.single(
        "sampling.max_tokens",
        f"prompt ({prompt}) + max_tokens ({output}) = {request.max_total} tokens, limit {limit}; "
        f"max_tokens may be {limit - prompt} here",
    )
