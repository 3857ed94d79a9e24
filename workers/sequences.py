"""What the worker keeps of each sequence between steps: its tokens and its block table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cluster.core.config import blocks_for
from cluster.core.ids import NULL_BLOCK, BlockId, SequenceId, TokenId
from cluster.core.plan import NewSequence
from cluster.core.sampling import SamplingParams
from workers.history import TokenHistory
from workers.named import NamedIds

UNREAD_TOKEN = -1
"""Stands for an id that was sampled but has not been read from the device yet."""


class Expected(NamedTuple):
    """Where an id goes once it has been read. position: -1 where it is not kept. stay: which of
    the lane's sequences it belongs to."""

    lane: int
    position: int
    stay: int


class SequenceTable:
    """Live sequences as rows ("lanes") of arrays, so that a step's inputs are gathered by numpy
    instead of by a loop over tokens.

    token_ids: [lanes, max_model_len]. blocks: [lanes, blocks of max_model_len]; 0 where not set.
    lengths, num_blocks: how much of a lane's row is in use.
    A sampled token counts from the step that samples it; its id may come later.
    ended: the last draw gave no token, so that nothing more is to be sampled.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab: int) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._vocab = vocab
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.blocks = np.zeros((max_num_seqs, blocks_for(max_model_len, block_size)), np.int32)
        self.lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.ended = np.zeros(max_num_seqs, dtype=bool)
        # The same memory, for one element at a time: an int comes out of a view as one, and after a
        # step numpy's way to its scalars is no longer in the processor's caches.
        self._token_ids, self._lengths = self.token_ids.data, self.lengths.data
        self._prompt_len = [0] * max_num_seqs
        self._sampling: list[SamplingParams | None] = [None] * max_num_seqs
        self._histories: dict[int, TokenHistory] = {}
        self._named: dict[int, NamedIds] = {}
        self._scored: set[int] = set()
        self._lane_of: dict[SequenceId, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._stays = [0] * max_num_seqs

    def __len__(self) -> int:
        return len(self._lane_of)

    def admit(self, new: NewSequence) -> None:
        """Take in a sequence. Raises RuntimeError when it cannot be held."""
        length = len(new.token_ids)
        if new.seq_id in self._lane_of:
            raise RuntimeError(f"sequence {new.seq_id} is admitted but was not released")
        if not self._free:
            raise RuntimeError(
                f"sequence {new.seq_id} is admitted beyond max_num_seqs {len(self._sampling)}"
            )
        if not 1 <= new.prompt_len <= length <= self.max_model_len:
            raise RuntimeError(
                f"sequence {new.seq_id}: prompt_len {new.prompt_len} and {length} tokens do not "
                f"satisfy 1 <= prompt_len <= tokens <= {self.max_model_len}"
            )
        tokens = np.asarray(new.token_ids)
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise RuntimeError(
                f"sequence {new.seq_id}: token ids must be in [0, {self._vocab}), "
                f"got {tokens.min()} to {tokens.max()}"
            )
        lane = self._free.pop()
        self._lane_of[new.seq_id] = lane
        self.token_ids[lane, :length] = tokens
        self.lengths[lane] = length
        self.num_blocks[lane] = 0
        self.ended[lane] = False
        self._prompt_len[lane] = new.prompt_len
        self._sampling[lane] = new.sampling
        if new.sampling.prompt_logprobs is not None:
            self._scored.add(lane)
        if new.sampling.names_ids:
            self._named[lane] = NamedIds(new.sampling, self._vocab)
        if new.sampling.penalises:
            self._histories[lane] = TokenHistory(tokens[: new.prompt_len], tokens[new.prompt_len :])

    def release(self, seq_id: SequenceId) -> None:
        """Forget a sequence; one that is not held is forgotten already."""
        lane = self._lane_of.pop(seq_id, None)
        if lane is None:
            return
        # Rows of the block table are copied whole: stale ids must not stay behind the next user.
        self.blocks[lane] = NULL_BLOCK
        self._sampling[lane] = None
        self._stays[lane] += 1
        self._histories.pop(lane, None)
        self._named.pop(lane, None)
        self._scored.discard(lane)
        self._free.append(lane)

    def grant(self, seq_id: SequenceId, new_blocks: list[BlockId]) -> int:
        """Append blocks to a sequence's table and return its lane.

        Raises RuntimeError for a sequence that is not held, or beyond the longest one.
        """
        lane = self._lane_of.get(seq_id)
        if lane is None:
            raise RuntimeError(f"sequence {seq_id} is in a row but was never admitted")
        if new_blocks:
            held, most = int(self.num_blocks[lane]), self.blocks.shape[1]
            total = held + len(new_blocks)
            if total > most:
                raise RuntimeError(f"sequence {seq_id} holds at most {most} blocks, not {total}")
            self.blocks[lane, held:total] = new_blocks
            self.num_blocks[lane] = total
        return lane

    def expect(self, lane: int) -> Expected:
        """Count a token that is being sampled; `settle` brings its id. Beyond max_model_len it is
        not kept: such a sequence is done."""
        length = self._lengths[lane]
        if length >= self.max_model_len:
            return Expected(lane, -1, self._stays[lane])
        self._token_ids[lane, length] = UNREAD_TOKEN
        self._lengths[lane] = length + 1
        return Expected(lane, length, self._stays[lane])

    def settle(self, expected: Expected, token_id: TokenId | None) -> None:
        """A token that was expected has been read; None: the draw failed, nothing more is to be
        sampled. Passed over if the sequence has been released meanwhile."""
        lane, position, stay = expected
        if stay != self._stays[lane]:
            return
        if token_id is None:
            self.ended[lane] = True
            return
        if position >= 0:
            self._token_ids[lane, position] = token_id
            if lane in self._histories:
                self._histories[lane].append(token_id)

    def reads_history(self, lane: int) -> bool:
        """Whether drawing for it looks at the ids before."""
        return lane in self._histories

    def prompt_len(self, lane: int) -> int:
        return self._prompt_len[lane]

    @property
    def scores_prompts(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for by any sequence."""
        return bool(self._scored)

    def prompt_top(self, lane: int) -> int | None:
        """How many log-probabilities per prompt token are asked for; None if none are."""
        params = self._sampling[lane]
        return None if params is None else params.prompt_logprobs

    def sampling(
        self, lane: int
    ) -> tuple[SamplingParams, int, TokenHistory | None, NamedIds | None]:
        """Parameters, index of the next output token, and where needed the tokens before it and the
        ids that the parameters name."""
        params = self._sampling[lane]
        if params is None:
            raise RuntimeError(f"lane {lane} holds no sequence")
        index = self._lengths[lane] - self._prompt_len[lane]
        return params, index, self._histories.get(lane), self._named.get(lane)
