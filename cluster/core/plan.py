"""What the scheduler asks of an executor in one step, and what comes back.

Workers keep, per sequence, its token ids and its block table; the plan therefore carries
differences only: whole sequences when they come in (first admission and replay look the
same), and for every row just the blocks it gains. All types are flat tuples and lists of
integers, so that they travel as msgpack unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.ids import BlockId, SequenceId, TokenId
from cluster.core.sampling import SamplingParams


class NewSequence(NamedTuple):
    """A sequence whose tokens the workers do not hold yet (or hold no longer).

    token_ids: prompt followed by the tokens emitted so far. The next output index is
    ``len(token_ids) - prompt_len``; it is 0 for a fresh request and more in a replay.
    """

    seq_id: SequenceId
    token_ids: list[TokenId]
    prompt_len: int
    sampling: SamplingParams


class BlockCopy(NamedTuple):
    """Copy one block's K and V, all layers. Source and target are block ids of the pool, except
    that the host side of a swap is a slot of host memory, counted from 0."""

    source: int
    target: int


class Row(NamedTuple):
    """One sequence's share of a step: compute KV for positions [start, start + count).

    new_blocks are appended to the sequence's block table before the step runs; the table
    then covers start + count positions. `samples` is true when the row reaches the last
    known token, so that its logits give the next one. A decode is a row with count 1 that samples.
    """

    seq_id: SequenceId
    start: int
    count: int  # type: ignore[assignment]  # a field here; nobody needs tuple.count
    samples: bool
    new_blocks: list[BlockId]


@dataclass(slots=True)
class StepPlan:
    """One forward pass over a flattened mixed batch.

    Order of effects at the executor: `swap_out`, `copies`, `swap_in`, forget `released`, take in
    `admitted`, then run `rows` as one batch. A sequence may begin with start > 0: the positions
    before are in blocks that it shares, or was given a copy of.

    Rows that decode come first. `num_tokens` is the sum of the counts, `budget` what it could have
    been. A row of count 1 that samples nothing and repeats its sequence's last computed position is
    padding: a member of a request-level batch that is over.
    A sequence may be in `released` and `admitted` of one plan (preempted, then replayed).
    """

    step: int
    rows: list[Row]
    admitted: list[NewSequence] = field(default_factory=list)
    released: list[SequenceId] = field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    budget: int = 0
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class TokenLogprob(NamedTuple):
    """Natural logarithms, of the model's own distribution: before temperature and filters.

    top: (token id, log-probability) of the likeliest, as many as were asked for.
    """

    token_id: TokenId
    logprob: float
    top: list[tuple[TokenId, float]]


class PromptLogprobs(NamedTuple):
    """entries[i] is of the prompt's token at position first + i."""

    first: int
    entries: list[TokenLogprob]


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    token_ids: one id per row with `samples`, in row order. The executor has already appended
    each to its own copy of the sequence.
    failed: seq_id -> reason, for rows whose logits gave no token (not finite); their entry in
    token_ids is -1. elapsed_s: seconds the step took on the executor. logprobs, prompt_logprobs: of
    the sequences that asked for them; the latter for the prompt positions that the step scored.
    """

    step: int
    token_ids: list[TokenId]
    elapsed_s: float = 0.0
    failed: dict[SequenceId, str] = field(default_factory=dict)
    logprobs: dict[SequenceId, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceId, PromptLogprobs] = field(default_factory=dict)
