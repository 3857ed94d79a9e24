"""Gemma 3 out of GGUF: names, the norms' offset, and a vocabulary with scores instead of merges."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from cluster.core.errors import ModelError
from workers.gguf_convert import gemma3
from workers.gguf_convert.convert import convert
from workers.gguf_convert.metadata import TENSOR_NAMES
from workers.gguf_convert.sentencepiece import merges

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 7, 32, 48, 4, 1, 16
CONTROL, UNKNOWN, USER, BYTE, NORMAL = 3, 2, 4, 6, 1
PIECES: list[tuple[str, float, int]] = [
    ("<pad>", -1000.0, CONTROL),
    ("<eos>", -1000.0, CONTROL),
    ("<bos>", -1000.0, CONTROL),
    ("<unk>", -1000.0, UNKNOWN),
    ("▁▁", -1000.0, USER),
    *((f"<0x{value:02X}>", -1000.0, BYTE) for value in range(256)),
    # "he" is better than "el": "hello" becomes he + l + l + o, then hell, then hello.
    ("he", -1.0, NORMAL),
    ("el", -2.0, NORMAL),
    ("ll", -3.0, NORMAL),
    ("hell", -4.0, NORMAL),
    ("hello", -5.0, NORMAL),
    ("▁", -6.0, NORMAL),
    *((letter, -10.0 - at, NORMAL) for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz")),
]
TOKENS = [piece for piece, _, _ in PIECES]


def layer_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "attn_q_norm.weight": (HEAD_DIM,),
        "attn_k_norm.weight": (HEAD_DIM,),
        "post_attention_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "post_ffw_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes().items()}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    write_gguf(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder, lambda share: None)
    return folder


def write_gguf(path: Path, architecture: str = "gemma3") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([score for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    for name, array in tensors().items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_keep_their_values_and_norms_lose_their_one(converted):
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == len(tensors())
        for name, array in tensors().items():
            number, _, kind = name.removeprefix("blk.").partition(".")
            found = TENSOR_NAMES.get(name) or (
                f"model.layers.{number}.{gemma3._LAYER_TENSOR_NAMES[kind]}"
            )
            expected = torch.from_numpy(array - 1 if "norm" in name else array)
            assert torch.equal(file.get_tensor(found), expected.to(torch.bfloat16)), name


def test_config_says_which_layers_have_a_window(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention"] * 5 + [
        "full_attention",
        "sliding_attention",
    ]
    assert (config["sliding_window"], config["head_dim"], config["rms_norm_eps"]) == (8, 16, 1e-6)
    assert config["rope_theta"] == 1e6
    assert config["tie_word_embeddings"]


def test_pieces_are_merged_in_the_order_of_their_scores(converted):
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<bos>", "hello"]
    assert tokenizer.encode("elh").tokens == ["<bos>", "el", "h"]
    assert tokenizer.encode("a  b").tokens == ["<bos>", "a", "▁▁", "b"]
    assert tokenizer.encode("é").tokens == ["<bos>", "<0xC3>", "<0xA9>"]
    for text in ("hello  world", "naïve", "🎉", " a b "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_way_to_make_a_piece_is_a_merge_the_best_piece_first():
    found = merges(["h", "e", "l", "he", "el", "hel"], [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0])
    assert found == [("h", "e"), ("e", "l"), ("he", "l"), ("h", "el")]


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "mamba")
    with pytest.raises(ModelError, match=r"must be one of \['gemma3', 'llama'\], got 'mamba'"):
        convert(tmp_path / "tiny.gguf", tmp_path, lambda share: None)
