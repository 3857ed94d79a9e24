"""From a checkpoint to the tensors of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.checkpoint.folder import Checkpoint
from workers.layers.linear import Linear, NativeLinear, PackedLinear, make_linear
from workers.layers.parallel import Lookup, lookup
from workers.models.tensors import Axis, Spans, TensorSpec, decoder_tensors, spans_of
from workers.parallel.collectives import Shard


class WeightReader:
    """Reads a rank's part of tensors into their final dtype and place, nothing else of them, and
    counts the bytes that stay."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._shard = shard
        found = checkpoint.tensor_names
        self._specs: Mapping[str, TensorSpec] = {
            spec.name: spec for spec in decoder_tensors(checkpoint.config, found)
        }
        self.spans: Spans = spans_of(checkpoint.config, shard)
        self.bytes = 0

    def read(self, name: str) -> torch.Tensor:
        return self._place([name])

    def norm(self, name: str, offset: float) -> torch.Tensor:
        """The weight of a norm, `offset` added. The sum is fp32: it has more digits than the
        model's dtype."""
        if not offset:
            return self.read(name)
        weight = self.saved(name).to(self._device, torch.float32).add(offset)
        self.bytes += weight.nbytes
        return weight

    def linear(self, *names: str) -> Linear:
        """One product out of the weights `names`, stacked along the output dimension, with their
        biases if the checkpoint has them.

        Where the output is not split, the ranks' products are summed, and the first rank's
        alone adds the bias.
        """
        weight = self._place(list(names))
        biases = [name.removesuffix("weight") + "bias" for name in names]
        summed = self._specs[names[0]].axes[0] is Axis.HIDDEN
        if biases[0] not in self._specs or (summed and self._shard.rank):
            return make_linear(weight)
        return make_linear(weight, self._place(biases))

    def share(self, embedding: torch.Tensor) -> tuple[Linear, Lookup]:
        """The embedding as the head, and as what it is. Packed by oneDNN, which has no way back to
        its rows, it is in memory twice."""
        head = make_linear(embedding)
        if isinstance(head, NativeLinear):
            return head, head.rows
        if isinstance(head, PackedLinear):
            self.bytes += embedding.nbytes
        return head, lookup(embedding)

    def saved(self, name: str) -> torch.Tensor:
        """The rank's part as saved, without filling."""
        spans = [self.spans[axis] for axis in self._specs[name].axes]
        return self._checkpoint.part(name, [(span.begin, span.end) for span in spans])

    def _place(self, names: list[str]) -> torch.Tensor:
        """The parts of `names` below each other, filled up with zeros."""
        parts = [[self.spans[axis] for axis in self._specs[name].axes] for name in names]
        shape = [sum(spans[0].size for spans in parts), *(span.size for span in parts[0][1:])]
        placed = torch.zeros(shape, dtype=self._dtype, device=self._device)
        begin = 0
        for name, spans in zip(names, parts, strict=True):
            here = placed[begin : begin + spans[0].real]
            if len(spans) == 2:
                here = here[:, : spans[1].real]
            here.copy_(self.saved(name))
            begin += spans[0].size
        self.bytes += placed.nbytes
        return placed
