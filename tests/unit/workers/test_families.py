"""What config.json means in each family, in the spellings that are found in the wild."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.errors import ModelError
from tests.determinism.tiny_models import write_config
from workers.checkpoint.modelconfig import ModelConfig, read_model_config
from workers.checkpoint.rope import RopeScaling
from workers.models.registry import FAMILIES

READERS = {name: family.read_config for name, family in FAMILIES.items()}
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def read(tmp_path):
    def read(name: str, **options: Any) -> ModelConfig:
        config = {**SIZES, "architectures": [f"{name}ForCausalLM"], **options}
        write_config(tmp_path, config)
        return read_model_config(tmp_path, READERS)

    return read


def test_llama(read):
    config = read("Llama", hidden_act="silu", rope_theta=500000.0)
    assert config.windows == (0,) * 6
    assert config.window_sizes == ()
    assert config.rope == config.local_rope == RopeScaling(500000.0)
    assert config.attention_scale == 16**-0.5
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("options", "window"),
    [({"sliding_window": 256}, 256), ({"sliding_window": None}, 0), ({}, 4096)],
    ids=["v0.1", "v0.3", "left out"],
)
def test_mistral_windows(read, options, window):
    assert read("Mistral", **options).windows == (window,) * 6


def test_qwen2_has_biases_that_no_key_announces(read):
    config = read("Qwen2", attention_bias=False, tie_word_embeddings=True)
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (True, False, False)
    assert config.head_dim == 16
    assert config.tie_word_embeddings


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 2}, (0,) * 6),
        ({"sliding_window": None, "max_window_layers": 2, "layer_types": [FULL] * 6}, (0,) * 6),
        (
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4},
            (0, 0, 0, 0, 128, 128),
        ),
        ({"use_sliding_window": True, "sliding_window": 128}, (0,) * 6),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 128,
                "layer_types": [SLIDING, FULL] * 3,
            },
            (128, 0) * 3,
        ),
    ],
    ids=["off", "off, new keys", "upper layers", "all below the default", "listed"],
)
def test_qwen_windows(read, name, options, windows):
    assert read(name, **options).windows == windows


def test_qwen3_norms_heads(read):
    config = read("Qwen3")
    assert config.norm_heads
    assert config.head_dim == 128
    assert not config.qkv_bias
    assert read("Qwen3", attention_bias=True).attention_out_bias


def test_gemma2_defaults(read):
    config = read("Gemma2", num_hidden_layers=3)
    assert config.windows == (4096, 0, 4096)
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert (config.norm_outputs, config.norm_heads, config.norm_offset) == (True, False, 1.0)
    assert config.tie_word_embeddings
    assert config.embedding_scale == 8.0
    assert config.attention_scale == 256**-0.5
    assert config.activation == "gelu_tanh"
    assert read("Gemma2", attn_logit_softcapping=None).attention_softcap == 0


GEMMA3_SPELLINGS: dict[str, dict[str, Any]] = {
    "hub": {
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "rope_scaling": LINEAR,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
    },
    "defaults left out": {
        "rope_scaling": LINEAR,
        "sliding_window": 512,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
    },
    "transformers 5": {
        "rope_parameters": {
            FULL: {**LINEAR, "rope_theta": 1_000_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "sliding_window": 512,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "_sliding_window_pattern": 6,
    },
}


@pytest.mark.parametrize("options", GEMMA3_SPELLINGS.values(), ids=list(GEMMA3_SPELLINGS))
def test_gemma3_in_all_spellings(read, options):
    config = read("Gemma3", query_pre_attn_scalar=144, **options)
    assert config.rope == RopeScaling(1_000_000.0, "linear", 8.0)
    assert config.local_rope == RopeScaling(10_000.0)
    assert config.windows == (512, 512, 0) * 2
    assert config.attention_scale == 144**-0.5
    assert config.head_dim == 256
    assert config.norm_heads
    assert config.norm_outputs
    assert config.tie_word_embeddings
    assert config.logits_softcap == 0


def test_gemma3_pattern_is_six_layers(read):
    assert read("Gemma3", sliding_window=9).windows == (9, 9, 9, 9, 9, 0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("Gemma3", {"hidden_activation": "relu"}, r"'gelu_pytorch_tanh', got 'relu'"),
    "exact gelu": ("Qwen2", {"hidden_act": "gelu"}, r"hidden_act must be 'silu', got 'gelu'"),
    "window of 0": ("Mistral", {"sliding_window": 0}, r"sliding_window .*>= 1, got 0"),
    "layer types of Mistral": ("Mistral", {"layer_types": [FULL] * 6}, r"layer_types is not"),
    "too few types": ("Gemma3", {"layer_types": [FULL]}, r"layer_types must be a list of 6"),
    "other type": (
        "Gemma2",
        {"layer_types": ["chunked_attention"] * 6},
        r"layer_types must name .* got 'chunked_attention'",
    ),
    "type that is no text": ("Qwen3", {"layer_types": [[]] * 6}, r"layer_types must name"),
    "sliding without a window": (
        "Qwen3",
        {"layer_types": [SLIDING] * 6},
        r"layer_types names 'sliding_attention', but use_sliding_window is false",
    ),
    "both ways": ("Gemma3", {"use_bidirectional_attention": True}, r"attention is causal"),
    "cap that transformers ignores": (
        "Gemma3",
        {"attn_logit_softcapping": 50.0},
        r"attn_logit_softcapping is not supported",
    ),
    "cap of 0": ("Gemma2", {"final_logit_softcapping": 0}, r"final_logit_softcapping .*> 0"),
    "negative scalar": ("Gemma3", {"query_pre_attn_scalar": -1}, r"query_pre_attn_scalar .*-1"),
    "flat rope": (
        "Gemma3",
        {"rope_parameters": {"rope_theta": 5.0}},
        r"rope_parameters: full_attention is missing",
    ),
    "half a rope": (
        "Gemma3",
        {"rope_parameters": {FULL: {"rope_theta": 5.0}}},
        r"rope_parameters: sliding_attention is missing",
    ),
    "yarn within": (
        "Gemma3",
        {"rope_parameters": {FULL: {"rope_type": "yarn"}, SLIDING: {}}},
        r"rope_parameters: full_attention: rope_type must be .*'yarn'",
    ),
    "yarn of Qwen": (
        "Qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        r"rope_scaling: rope_type must be .*'yarn'",
    ),
    "two ropes": ("Qwen3", {"rope_parameters": {FULL: {}}}, r"full_attention is not supported"),
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_would_change_the_numbers_is_refused(read, name, options, message):
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        read(name, **options)
