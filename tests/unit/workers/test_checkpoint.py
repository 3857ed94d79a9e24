"""Every way in which a model folder can be damaged is refused by name before a weight is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.core.errors import ModelError
from tests.determinism.tiny_models import TinyLlama, write_config, write_model
from workers.models.registry import load_model, open_checkpoint

CPU = torch.device("cpu")


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    load_model(checkpoint, torch.float32, CPU, lambda share: None)


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_model(tmp_path / "model", TinyLlama())


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write_model(tmp_path / "model", TinyLlama(), shards=3)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_opens_single_and_sharded(tmp_path, shards):
    spec = TinyLlama()
    checkpoint = open_checkpoint(str(write_model(tmp_path, spec, shards)))
    for name, tensor in spec.tensors().items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_progress_rises_to_one(folder):
    shares: list[float] = []
    load_model(open_checkpoint(str(folder)), torch.float32, CPU, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# -- config.json -------------------------------------------------------------------------------

BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r"config.json: architectures .*LlamaForCausalLM.*GPT2",
    ),
    "no architecture": ({"architectures": None}, r"architectures must be a list"),
    "zero layers": ({"num_hidden_layers": 0}, r"num_hidden_layers .*>= 1, got 0"),
    "missing hidden size": ({"hidden_size": None}, r"hidden_size is missing"),
    "text for a number": ({"vocab_size": "128"}, r"vocab_size .*'128'"),
    "boolean for a number": ({"vocab_size": True}, r"vocab_size .*True"),
    "heads": ({"num_key_value_heads": 3}, r"multiple of num_key_value_heads, got 4 and 3"),
    "odd head size": ({"head_dim": 15}, r"head_dim must be even .*15"),
    "no head size": (
        {"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 2},
        r"hidden_size must be a multiple .*64 and 6",
    ),
    "NaN eps": ({"rms_norm_eps": float("nan")}, r"rms_norm_eps must be finite .*nan"),
    "negative theta": ({"rope_theta": -1}, r"rope_theta must be finite and > 0, got -1"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act must be 'silu', got 'gelu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, r"quantization_config is not supported"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor"),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        r"rope_scaling: rope_type must be .*'yarn'",
    ),
    "yarn, new key": ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters: rope_type"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, r"factor is missing"),
    "llama3 band": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        r"high_freq_factor must be above low_freq_factor, got 4 and 4",
    ),
    "rope is no object": ({"rope_scaling": "linear"}, r"rope_scaling must be an object"),
    "tied is no boolean": ({"tie_word_embeddings": "no"}, r"tie_word_embeddings .*'no'"),
    "layers that are not there": ({"num_hidden_layers": 10**4}, r"layers\.2\..* is missing"),
    "too many layers": ({"num_hidden_layers": 10**9}, r"at most 10000, got 1000000000"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS.values(), ids=list(BAD_CONFIGS))
def test_bad_config_is_refused(folder, change, message):
    write_config(folder, {**TinyLlama().config(), **change})
    with pytest.raises(ModelError, match=message):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\udcff", "[" * 100_000])
def test_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(folder))


def test_missing_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: file does not exist"):
        open_checkpoint(str(folder))


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="no such model folder"):
        open_checkpoint(str(tmp_path / "nowhere"))


def test_path_of_a_file(folder):
    with pytest.raises(ModelError, match="no such model folder"):
        open_checkpoint(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt"])
def test_pickles_are_never_opened(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=rf"only {name} found.*convert the model to safetensors"):
        open_checkpoint(str(folder))


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(folder))


# -- tensors -----------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = TinyLlama().tensors()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensor(folder):
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        open_checkpoint(str(folder))


def test_missing_head_of_an_untied_model(folder):
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing"):
        open_checkpoint(str(folder))


def test_extra_tensor(folder):
    rewrite(folder, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor 'model\.layers\.2.*not part"):
        open_checkpoint(str(folder))


def test_bias_that_the_config_does_not_announce(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, lambda t: t.update({name: torch.zeros(64)}))
    with pytest.raises(ModelError, match=r"q_proj\.bias' is not part of LlamaForCausalLM"):
        open_checkpoint(str(folder))


def test_wrong_shape(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' must have shape \[64\].*\[63\]"):
        open_checkpoint(str(folder))


def test_derived_frequencies_of_old_checkpoints_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: torch.zeros(8)}))
    load(folder)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_embeddings(tmp_path, head):
    spec = TinyLlama(tied=True)
    folder = write_model(tmp_path, spec)
    tensors = spec.tensors()
    if head != "absent":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if head == "different":
        tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    if head == "different":
        with pytest.raises(ModelError, match=r"tie_word_embeddings is true.*differs"):
            load(folder)
    else:
        load(folder)


# -- the file format ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: (truncated|header)"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_insane_header_length(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(ModelError, match=rf"header length must be in .*got {length}"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("text", [b"{nonsense", b"[1, 2]", b"\xff\xfe{}", b'{"a": 1, "a": 2}'])
def test_header_that_is_no_object(folder, text):
    write_raw(folder / "model.safetensors", text, b"")
    with pytest.raises(ModelError, match=r"model\.safetensors: header"):
        open_checkpoint(str(folder))


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 16)}, r"'b' overlaps 'a'"),
    "same place": ({"a": entry(0, 16), "b": entry(0, 16)}, r"overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(8, 16)}, r"hole of 4 bytes before tensor 'b'"),
    "hole at the start": ({"a": entry(4, 16)}, r"hole of 4 bytes before tensor 'a'"),
    "beyond the end": ({"a": entry(0, 20)}, r"truncated: tensor 'a' ends at byte"),
    "unused end": ({"a": entry(0, 8)}, r"8 bytes after the last tensor"),
    "backwards": ({"a": entry(8, 0, shape=[0])}, r"data_offsets must be \[begin, end\]"),
    "size": ({"a": entry(0, 16, shape=[5])}, r"span 16 bytes, shape \[5\] of F32 needs 20"),
    "dtype": ({"a": entry(0, 16, dtype="I8", shape=[16])}, r"'a': dtype must be one of .*'I8'"),
    "dtype is a list": ({"a": entry(0, 16, shape=[4]) | {"dtype": [1]}}, r"'a': dtype"),
    "shape": ({"a": entry(0, 16, shape=[-4])}, r"shape must be a list of integers"),
    "shape is text": ({"a": entry(0, 16, shape="4")}, r"shape must be a list of integers"),
    "offsets": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}, r"data_offsets"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4]}}, r"data_offsets must be .*None"),
    "entry": ({"a": 5}, r"'a': header entry must be an object"),
}


@pytest.mark.parametrize(("header", "message"), BAD_LAYOUTS.values(), ids=list(BAD_LAYOUTS))
def test_bad_layout_is_refused(folder, header, message):
    write_raw(folder / "model.safetensors", header, bytes(16))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(str(folder))


# -- shards ------------------------------------------------------------------------------------


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: file does not"):
        open_checkpoint(str(sharded))


def test_index_puts_a_tensor_into_the_wrong_shard(sharded):
    def swap(index: dict[str, Any]) -> None:
        name = "model.norm.weight"
        others = set(index["weight_map"].values()) - {index["weight_map"][name]}
        index["weight_map"][name] = min(others)

    edit_index(sharded, swap)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is missing, .*puts it here"):
        open_checkpoint(str(sharded))


def test_shard_holds_more_than_the_index_lists(sharded):
    edit_index(sharded, lambda index: index["weight_map"].pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is not listed"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "a/b", "", ".", 5])
def test_index_must_not_lead_out_of_the_folder(sharded, file_name):
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": file_name}))
    with pytest.raises(ModelError, match=r"index\.json|not readable|not exist"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_map(sharded, weight_map):
    edit_index(sharded, lambda index: index.update({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map"):
        open_checkpoint(str(sharded))


# -- fingerprint -------------------------------------------------------------------------------


def test_fingerprint_is_the_same_for_the_same_folder_and_tells_fine_tunes_apart(tmp_path):
    def of(name: str, spec: TinyLlama) -> str:
        return open_checkpoint(str(write_model(tmp_path / name, spec))).fingerprint()

    assert of("a", TinyLlama()) == of("b", TinyLlama())
    assert of("a", TinyLlama()) != of("c", TinyLlama(seed=1))
    assert of("a", TinyLlama()) != of("d", TinyLlama(max_len=256))
