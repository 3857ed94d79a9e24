"""The content oracle: an executor whose KV cache records what was written where.

Counters alone miss two kinds of bug: a victim's work left in the plan, and a computed count kept
after preemption. Here every slot remembers its position and a hash of all tokens up to it,
every step reads the whole context back through the block table, and a token is a function of the
context that was read: a wrong read is reported, and even one that was not would change the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cluster.core.errors import InvariantViolation
from cluster.core.ids import BlockId, SequenceId, TokenId
from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import BlockCopy, NewSequence, Row, StepPlan, StepResult
from cluster.core.sampling import SamplingParams, counter_uniform

FNV_BASIS = 0xCBF29CE484222325


class Slot(NamedTuple):
    """position, and the hash of all tokens up to and including it: KV depends on nothing else."""

    position: int
    prefix: int


Slots: TypeAlias = dict[int, Slot | None]
"""What each position of the cache (block * block_size + offset), or of host memory, holds."""


@dataclass(slots=True)
class ShadowSequence:
    """prefixes[p]: hash of tokens[0..p]."""

    tokens: list[TokenId]
    prompt_len: int
    sampling: SamplingParams
    blocks: list[BlockId] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)

    def append(self, token: TokenId) -> None:
        before = self.prefixes[-1] if self.prefixes else FNV_BASIS
        self.tokens.append(token)
        self.prefixes.append(extend_prefix(before, token))


def extend_prefix(prefix: int, token: TokenId) -> int:
    """One step of 64-bit FNV-1a."""
    return ((prefix ^ (token + 1)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF


def reference_token(prefix: int, sampling: SamplingParams, index: int, vocab: int) -> int:
    """The toy model: the next token depends on every token of the context and, unless greedy, on
    (seed, index)."""
    state = prefix
    if not sampling.greedy:
        state ^= int(counter_uniform(sampling.seed, index) * (1 << 53))
    token = (state ^ (state >> 29)) % vocab
    if index < sampling.min_tokens:
        while token in sampling.stop_token_ids:
            token = (token + 1) % vocab
    return token


def reference_output(prompt: list[TokenId], sampling: SamplingParams, vocab: int) -> list[TokenId]:
    """What the toy model says to `prompt`, run alone and without any cache."""
    prefix = FNV_BASIS
    for token in prompt:
        prefix = extend_prefix(prefix, token)
    output: list[TokenId] = []
    while len(output) < sampling.max_tokens:
        token = reference_token(prefix, sampling, len(output), vocab)
        output.append(token)
        prefix = extend_prefix(prefix, token)
        if token in sampling.stop_token_ids and len(output) >= sampling.min_tokens:
            break
    return output


@dataclass(slots=True)
class FinishedStep:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class ShadowExecutor:
    """Implements the Executor protocol over the recording cache.

    Raises InvariantViolation at the first read that does not find what its sequence wrote.
    """

    pipeline_depth = 1

    def __init__(
        self, *, num_blocks: int, block_size: int, vocab: int = 97, max_len: int = 1 << 20
    ):
        self.slots: Slots = {}
        self.host: Slots = {}
        self.sequences: dict[SequenceId, ShadowSequence] = {}
        self.steps = 0
        self._block_size = block_size
        self._vocab = vocab
        self._info = ModelInfo(
            name="shadow",
            architecture="ShadowModel",
            fingerprint=f"shadow-{vocab}",
            dtype="int",
            device="cpu",
            vocab_size=vocab,
            max_model_len=max_len,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_bytes_per_token=0,
            weight_bytes=0,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def submit(self, plan: StepPlan) -> FinishedStep:
        self._move(plan.swap_out, self.slots, self.host)
        self._move(plan.copies, self.slots, self.slots)
        self._move(plan.swap_in, self.host, self.slots)
        for seq_id in plan.released:
            self.sequences.pop(seq_id, None)
        for new in plan.admitted:
            self._take_in(new)
        for row in plan.rows:
            self._write(row)
        tokens = [self._sample(row) for row in plan.rows if row.samples]
        self.steps += 1
        return FinishedStep(StepResult(step=plan.step, token_ids=tokens))

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        self.sequences.clear()

    def _move(self, moves: list[BlockCopy], source: Slots, target: Slots) -> None:
        size = self._block_size
        # All reads before all writes: moves of one kind happen at once.
        contents = [
            [source.get(move.source * size + offset) for offset in range(size)] for move in moves
        ]
        for move, slots in zip(moves, contents, strict=True):
            for offset, slot in enumerate(slots):
                target[move.target * size + offset] = slot

    def _take_in(self, new: NewSequence) -> None:
        if new.seq_id in self.sequences:
            raise InvariantViolation(f"sequence {new.seq_id} is admitted but was not released")
        sequence = ShadowSequence([], new.prompt_len, new.sampling)
        for token in new.token_ids:
            sequence.append(token)
        self.sequences[new.seq_id] = sequence

    def _write(self, row: Row) -> None:
        sequence = self.sequences[row.seq_id]
        sequence.blocks.extend(row.new_blocks)
        end = row.start + row.count
        if end > len(sequence.blocks) * self._block_size:
            raise InvariantViolation(f"sequence {row.seq_id}: its blocks do not reach {end}")
        if row.samples != (end == len(sequence.tokens)):
            raise InvariantViolation(f"sequence {row.seq_id}: samples at {end} is wrong")
        for position in range(row.start, end):
            self.slots[self._slot(sequence, position)] = Slot(position, sequence.prefixes[position])

    def _sample(self, row: Row) -> TokenId:
        sequence = self.sequences[row.seq_id]
        for position in range(len(sequence.tokens)):
            self._read(row.seq_id, sequence, position)
        index = len(sequence.tokens) - sequence.prompt_len
        token = reference_token(sequence.prefixes[-1], sequence.sampling, index, self._vocab)
        sequence.append(token)
        return token

    def _read(self, seq_id: SequenceId, sequence: ShadowSequence, position: int) -> None:
        found = self.slots.get(self._slot(sequence, position))
        expected = Slot(position, sequence.prefixes[position])
        if found != expected:
            raise InvariantViolation(f"sequence {seq_id}: KV has {found}, expected {expected}")

    def _slot(self, sequence: ShadowSequence, position: int) -> int:
        block = sequence.blocks[position // self._block_size]
        return block * self._block_size + position % self._block_size
