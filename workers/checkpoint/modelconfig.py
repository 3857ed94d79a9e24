"""config.json of a decoder-only transformer, as typed and checked facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.checkpoint.fields import Fields, read_json
from workers.checkpoint.rope import RopeScaling

CONFIG_FILE = "config.json"
MAX_LAYERS = 10_000
"""Far above any model: some facts are listed per layer."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint, sizes in elements.

    activation: "silu" or "gelu_tanh", of the gate. windows: per layer, the sliding window in
    tokens, the query's own included; 0 for none. rope: of layers without a window; local_rope:
    of those with one. attention_scale: applied to q . k. attention_softcap, logits_softcap: x
    becomes cap * tanh(x / cap); 0 for none. embedding_scale: of the embedded tokens.
    norm_offset: added to saved norm weights. norm_heads: query and key heads are normalised
    before they are rotated. norm_outputs: what attention and the MLP return is normalised too.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeScaling
    local_rope: RopeScaling
    windows: tuple[int, ...]
    tie_word_embeddings: bool
    attention_scale: float
    activation: str = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    norm_heads: bool = False
    norm_outputs: bool = False

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """The different windows, ascending."""
        return tuple(sorted({window for window in self.windows if window}))


ConfigReader = Callable[[str, Fields], ModelConfig]
"""Reads the configuration of one architecture, whose name is given."""


def read_model_config(folder: Path, readers: Mapping[str, ConfigReader]) -> ModelConfig:
    """Read and check `folder`/config.json. `readers`: of the architectures that may be named.

    Raises ModelError for a missing or nonsensical value, and for every feature that would
    change the numbers but is not implemented (quantised weights, other activations, other
    rope scalings).
    """
    path = folder / CONFIG_FILE
    fields = Fields(read_json(path), str(path))
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.refuse("architectures", f"must be a list of one name, got {names!r}")
    if names[0] not in readers:
        raise fields.refuse("architectures", f"must be one of {sorted(readers)}, got {names[0]!r}")
    if fields.has("quantization_config"):
        raise fields.refuse("quantization_config", "is not supported: use unquantised weights")
    return readers[names[0]](names[0], fields)
