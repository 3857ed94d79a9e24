"""A request in the scheduler's hands: `computed` tokens catch up with `total` tokens."""

from __future__ import annotations

from cluster.core.ids import BlockId, SequenceId, TokenId
from cluster.core.lifecycle import Event, State, advance
from cluster.core.plan import PromptLogprobs, TokenLogprob
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams

UNKNOWN_TOKEN: TokenId = -1
"""Stands in `Sequence.tokens` for a token that a step in flight will sample."""


class Sequence:
    """Mutable state of one request on one engine. Owned by the scheduler alone.

    tokens: prompt + emitted ids. computed: positions whose KV is in `blocks` (`host_blocks` while
    swapped out); always less than len(tokens), since the newest token's KV is computed by the step
    that samples the next one. Both run ahead of what is known: a step in flight counts as done, and
    the tokens that it samples stand in `tokens` as UNKNOWN_TOKEN. settled: `computed` without the
    steps in flight; all ids below it are known. capacity: positions that `blocks` hold. rank:
    arrival order; the smaller goes first. admission: number of its newest admission, over all
    sequences. turn: number of its newest share, over all sequences and steps; the smallest waits
    longest.
    chain, published: hashes of its whole blocks, and how many of them others may share.
    recomputed: positions whose KV was thrown away and had to be computed again. charged: tokens
    that its tenant has paid for.
    prompt_logprobs: of the prompt's tokens from the second on, as far as they were scored.
    stalled_s: seconds between its preemptions and its coming in again, summed.
    """

    __slots__ = (
        "admission",
        "admitted_s",
        "arrival_s",
        "blocks",
        "capacity",
        "chain",
        "charged",
        "computed",
        "host_blocks",
        "max_total",
        "preemptions",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "rank",
        "recomputed",
        "sampling",
        "seq_id",
        "settled",
        "stalled_s",
        "stalled_since_s",
        "state",
        "stop_ids",
        "tenant",
        "tokens",
        "ttft_objective_s",
        "turn",
    )

    def __init__(self, seq_id: SequenceId, request: EngineRequest, arrival_s: float) -> None:
        self.seq_id = seq_id
        self.rank = seq_id
        self.sampling: SamplingParams = request.sampling
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        self.tokens: list[TokenId] = [*request.prompt_ids, *request.emitted_ids]
        self.prompt_len = len(request.prompt_ids)
        self.max_total = request.max_total
        self.state = State.WAITING
        self.computed = 0
        self.settled = 0
        self.blocks: list[BlockId] = []
        self.capacity = 0
        self.host_blocks: list[int] = []
        self.chain: list[bytes] = []
        self.published = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.admission = 0
        self.charged = len(self.tokens)
        self.preemptions = 0
        self.recomputed = 0
        self.turn = 0
        self.stalled_s = 0.0
        self.stalled_since_s: float | None = None
        self.priority = request.priority
        self.tenant = request.tenant
        self.ttft_objective_s = request.ttft_objective_s
        self.arrival_s = arrival_s
        self.admitted_s: float | None = None

    @property
    def total(self) -> int:
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens to compute until the next one can be sampled; 1 is a decode."""
        return len(self.tokens) - self.computed

    @property
    def emitted(self) -> int:
        """Output tokens so far, those of earlier runs included."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt_scored(self) -> bool:
        """Prompt log-probabilities are asked for and not complete: no position may be skipped."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.prompt_len - 1

    def take_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        """Keep what is new; positions that were computed again after a preemption are known."""
        held = len(self.prompt_logprobs) + 1
        self.prompt_logprobs += scored.entries[max(0, held - scored.first) :]

    @property
    def unsettled(self) -> int:
        """`remaining` as if no step were in flight."""
        known = len(self.tokens)
        while self.tokens[known - 1] == UNKNOWN_TOKEN:
            known -= 1
        return known - self.settled

    def hold(self, positions: int) -> None:
        """Positions [0, positions) are in its blocks, and no step of it is in flight."""
        self.computed = self.settled = positions

    def rewind(self) -> None:
        """Take back what steps in flight do for it; their results will be passed over."""
        self.computed = self.settled
        while self.tokens[-1] == UNKNOWN_TOKEN:
            self.tokens.pop()

    def apply(self, event: Event) -> None:
        self.state = advance(self.state, event)

    def grant(self, blocks: list[BlockId], block_size: int) -> None:
        self.blocks.extend(blocks)
        self.capacity = len(self.blocks) * block_size

    def surrender(self) -> list[BlockId]:
        """Give up every block. Whoever calls says what becomes of what was computed in them."""
        blocks, self.blocks = self.blocks, []
        self.capacity = 0
        self.published = 0
        return blocks
