"""Reference attention on torch's own operators: gather the pages, then SDPA. Runs anywhere.

It never reads a slot that the sequence does not own: where a batch of unequal lengths needs
padding, the padded index points at the sequence's own first key, so that what is masked is
always a finite number (0 * NaN would be NaN).
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.attention.backend import AttentionBackend, AttentionSpec, Capabilities, LayerCache
from workers.attention.meta import StepMeta

_CALL_COST_KEYS = 512
"""A further batched call costs about as much as gathering this many keys that are only padding."""

_HOST_DTYPES = frozenset({torch.float32, torch.bfloat16})
_GPU_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class _DecodeGroup(NamedTuple):
    """Decodes that see similarly many keys, run as one batch of S rows padded to L keys."""

    rows: slice | torch.Tensor
    slots: torch.Tensor  # [S * L]
    mask: torch.Tensor | None  # [S, 1, 1, L], added to the scores; None when nothing is padded
    size: int
    length: int


class _Chunk(NamedTuple):
    """Several tokens of one sequence: queries [begin, end) over L keys, seen by one or more."""

    begin: int
    end: int
    slots: torch.Tensor  # [L]
    mask: torch.Tensor | None  # [1, 1, end - begin, L]; None when it is the plain causal one


class _Work(NamedTuple):
    """A step under one window."""

    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchAttention(AttentionBackend):
    """Batched gather and SDPA for decodes, one gather and SDPA per longer chunk."""

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[Capabilities] = Capabilities(
        # fp16 has no fast path on any CPU; it would only look supported.
        dtypes={"cpu": _HOST_DTYPES, "cuda": _GPU_DTYPES},
        windows=True,
        softcap=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._group_size = spec.num_heads // spec.num_kv_heads
        self._write_slots = torch.empty(0, dtype=torch.int64, device=spec.device)
        self._meta: StepMeta | None = None
        self._work: dict[int, _Work] = {}

    def plan(self, meta: StepMeta) -> None:
        # Padding goes to slot 0, in the null block. index_copy_ takes 64-bit indices only.
        self._write_slots = meta.slot_mapping.clamp(min=0).to(torch.int64)
        self._meta = meta
        self._work = {}

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> None:
        self._flat(cache.keys).index_copy_(0, self._write_slots, key.flatten(1))
        self._flat(cache.values).index_copy_(0, self._write_slots, value.flatten(1))

    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, window: int = 0
    ) -> None:
        keys, values = self._flat(cache.keys), self._flat(cache.values)
        if window not in self._work:
            self._work[window] = self._lay_out(window)
        for group in self._work[window].groups:
            self._run_group(group, query, (keys, values), out)
        for chunk in self._work[window].chunks:
            self._run_chunk(chunk, query, (keys, values), out)

    def _flat(self, pages: torch.Tensor) -> torch.Tensor:
        """[blocks, block_size, kv_heads, head_dim] -> [slots, kv_heads * head_dim], a view."""
        return pages.view(-1, self.spec.num_kv_heads * self.spec.head_dim)

    # -- once per step and window --------------------------------------------------------------

    def _lay_out(self, window: int) -> _Work:
        meta = self._meta
        if meta is None:
            raise RuntimeError("no step was planned")
        lengths = meta.seqused_k.tolist()
        starts = meta.cu_seqlens_q.tolist()
        decodes = meta.num_decodes
        visible = [min(length, window or length) for length in lengths[:decodes]]
        return _Work(
            [self._group(meta, rows, visible) for rows in _by_length(visible)],
            [
                self._chunk(meta, s, (starts[s], starts[s + 1]), lengths[s], window)
                for s in range(decodes, meta.num_seqs)
            ],
        )

    def _group(self, meta: StepMeta, rows: list[int], visible: list[int]) -> _DecodeGroup:
        own = [visible[r] for r in rows]
        longest = max(own)
        selection: slice | torch.Tensor = slice(0, len(rows))
        if len(rows) != meta.num_decodes:
            selection = torch.tensor(rows, device=self.spec.device)
        count = torch.tensor(own, dtype=torch.int32, device=self.spec.device)[:, None]
        offset = torch.arange(longest, dtype=torch.int32, device=self.spec.device)
        padded = offset >= count
        first = meta.seqused_k[selection][:, None] - count
        slots = self._slots(meta.block_table[selection], first + offset.masked_fill(padded, 0))
        mask = None
        if min(own) < longest:
            mask = self._additive(padded)[:, None, None, :]
        return _DecodeGroup(selection, slots.flatten(), mask, len(rows), longest)

    def _chunk(
        self, meta: StepMeta, seq: int, span: tuple[int, int], length: int, window: int
    ) -> _Chunk:
        begin, end = span
        context = length - (end - begin)
        first = max(0, context + 1 - window) if window else 0
        keys = torch.arange(first, length, dtype=torch.int32, device=self.spec.device)
        slots = self._slots(meta.block_table[seq : seq + 1], keys[None]).flatten()
        if context == 0 and not 0 < window < length and not self.spec.softcap:
            return _Chunk(begin, end, slots, None)
        queries = keys[context - first :, None]
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        return _Chunk(begin, end, slots, self._additive(hidden)[None, None])

    def _slots(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tables: [S, blocks]. The slots of each row's positions, [S, L] both."""
        block_size = self.spec.block_size
        pages = positions // block_size
        return tables.gather(1, pages.to(torch.int64)) * block_size + positions % block_size

    def _additive(self, forbidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(forbidden.shape, dtype=self.spec.dtype, device=self.spec.device)
        return mask.masked_fill_(forbidden, float("-inf"))

    # -- once per layer ------------------------------------------------------------------------

    def _run_group(
        self,
        group: _DecodeGroup,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        # The query heads that share a KV head stand where SDPA expects query positions: no copy
        # of K or V per head, and one pass over them.
        spec = self.spec
        shape = (group.size, group.length, spec.num_kv_heads, spec.head_dim)
        key, value = (p.index_select(0, group.slots).view(shape).transpose(1, 2) for p in pages)
        grouped = (group.size, spec.num_kv_heads, self._group_size, spec.head_dim)
        result = self._attend(query[group.rows].view(grouped), key, value, group.mask)
        out[group.rows] = result.reshape(group.size, spec.num_heads, spec.head_dim)

    def _run_chunk(
        self,
        chunk: _Chunk,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        # KV heads stand where SDPA expects the batch, so that sharing them is a stride of 0.
        spec = self.spec
        count, length = chunk.end - chunk.begin, len(chunk.slots)
        per_head = (spec.num_kv_heads, self._group_size, length, spec.head_dim)
        key, value = (
            p.index_select(0, chunk.slots)
            .view(length, spec.num_kv_heads, 1, spec.head_dim)
            .permute(1, 2, 0, 3)
            .expand(per_head)
            for p in pages
        )
        grouped = (count, spec.num_kv_heads, self._group_size, spec.head_dim)
        rows = query[chunk.begin : chunk.end].view(grouped).permute(1, 2, 0, 3)
        if chunk.mask is None:
            result = scaled_dot_product_attention(
                rows, key, value, is_causal=True, scale=spec.scale
            )
        else:
            result = self._attend(rows, key, value, chunk.mask)
        out[chunk.begin : chunk.end].view(grouped).copy_(result.permute(2, 0, 1, 3))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Every query sees every key, but for what the mask adds. [.., positions, head_dim]"""
        spec = self.spec
        if not spec.softcap:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scale)
        scores = query.float() @ key.float().transpose(-1, -2) * (spec.scale / spec.softcap)
        scores = scores.tanh_().mul_(spec.softcap)
        if mask is not None:
            scores += mask
        return (scores.softmax(-1) @ value.float()).to(value.dtype)


def _by_length(lengths: list[int]) -> list[list[int]]:
    """Split rows into groups whose padding costs less than another call would.

    A single group keeps the rows in order, so that no gather of queries is needed.
    """
    groups: list[list[int]] = []
    padding = longest = 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        padding += longest - lengths[row]
        if not groups or padding > _CALL_COST_KEYS:
            groups.append([])
            padding, longest = 0, lengths[row]
        groups[-1].append(row)
    if len(groups) == 1:
        groups[0].sort()
    return groups
