"""The executor's contract: effects in order, malformed plans refused with the facts."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import save_file

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from tests.determinism.tiny_models import TinyLlama, write_model
from workers import memory
from workers.executor import LocalExecutor

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
PROMPT = [5, 9, 100, 3, 77]


def config(folder, **values) -> WorkerConfig:
    defaults = {"device": "cpu", "block_size": 4, "num_blocks": 30, "max_num_seqs": 3}
    return WorkerConfig(model=str(folder), **{**defaults, "max_num_batched_tokens": 32, **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"), TinyLlama(max_len=64))


@pytest.fixture
def executor(folder):
    executor = LocalExecutor(config(folder))
    yield executor
    executor.close()


def new(seq_id: int, tokens=PROMPT, prompt_len=None, sampling=GREEDY) -> NewSequence:
    return NewSequence(seq_id, list(tokens), prompt_len or len(tokens), sampling)


def plan(rows, admitted=(), released=(), decodes=0, step=1) -> StepPlan:
    total = sum(row.count for row in rows)
    return StepPlan(step, list(rows), list(admitted), list(released), decodes, total)


def prefill(seq_id=1, blocks=(1, 2)) -> StepPlan:
    return plan([Row(seq_id, 0, 5, True, list(blocks))], [new(seq_id)])


def test_info(executor, folder):
    info = executor.info
    assert info.name == folder.name
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (info.vocab_size, info.max_model_len) == (128, 64)
    assert (info.num_blocks, info.block_size) == (30, 4)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.weight_bytes == sum(t.nbytes for t in TinyLlama().tensors().values())


def test_progress_and_memory_are_reported_once(folder, caplog):
    seen: list[tuple[str, float]] = []
    with caplog.at_level(logging.INFO, logger="workers.executor"):
        LocalExecutor(config(folder), lambda stage, share: seen.append((stage, share))).close()
    assert ("weights", 1.0) in seen
    assert seen[-1] == ("cache", 1.0)
    (record,) = caplog.records
    assert "weights" in record.message
    assert "KV cache" in record.message
    assert "resident" in record.message


def test_chunks_give_the_token_of_the_whole_prompt(executor):
    whole = executor.submit(prefill(1)).wait()
    parts = [
        plan([Row(2, 0, 2, False, [7])], [new(2)]),
        plan([Row(2, 2, 2, False, [])]),
        plan([Row(2, 4, 1, True, [11])], decodes=1),
    ]
    results = [executor.submit(part).wait() for part in parts]
    assert [r.token_ids for r in results] == [[], [], whole.token_ids]
    assert results[0].elapsed_s > 0


def test_sampled_token_is_appended(executor):
    first = executor.submit(prefill(1)).wait().token_ids
    second = executor.submit(plan([Row(1, 5, 1, True, [])], decodes=1, step=2)).wait()
    assert second.step == 2
    replayed = executor.submit(
        plan([Row(2, 0, 6, True, [5, 6])], [new(2, PROMPT + first, prompt_len=5)])
    ).wait()
    assert replayed.token_ids == second.token_ids


def test_released_and_admitted_in_one_plan(executor):
    first = executor.submit(prefill(1)).wait()
    again = plan([Row(1, 0, 5, True, [9, 3])], [new(1)], released=[1])
    assert executor.submit(again).wait().token_ids == first.token_ids


def test_prefix_hit_starts_further_along(executor):
    first = executor.submit(prefill(1, [4, 8])).wait()
    hit = plan([Row(2, 4, 1, True, [4, 12])], [new(2)], decodes=1)
    assert executor.submit(hit).wait().token_ids == first.token_ids


def test_released_sequence_is_forgotten(executor):
    executor.submit(prefill(1))
    executor.submit(plan([], released=[1, 99]))
    with pytest.raises(RuntimeError, match="sequence 1 is in a row but was never admitted"):
        executor.submit(plan([Row(1, 5, 1, True, [])], decodes=1))


def test_replay_counts_output_tokens_from_the_prompt(executor):
    """min_tokens looks at the output index, which a replay must not reset."""
    stop = executor.submit(prefill(1)).wait().token_ids[0]
    sampling = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=1, stop_token_ids=(stop,))
    fresh = plan([Row(2, 0, 5, True, [3, 4])], [new(2, sampling=sampling)])
    assert executor.submit(fresh).wait().token_ids != [stop]
    replay = plan([Row(3, 0, 5, True, [5, 6])], [new(3, prompt_len=4, sampling=sampling)])
    assert executor.submit(replay).wait().token_ids == [stop]


def test_result_does_not_depend_on_what_the_blocks_held(executor):
    first = executor.submit(prefill(1)).wait()
    with torch.inference_mode():
        for cache in executor._shard._runner._passes._loaded.caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
    assert executor.submit(prefill(2, [20, 21])).wait().token_ids == first.token_ids


def test_row_with_bad_logits_fails_alone(tmp_path):
    spec = TinyLlama(max_len=64)
    folder = write_model(tmp_path, spec)
    tensors = spec.tensors()
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    executor = LocalExecutor(config(folder))
    rows = [Row(1, 0, 2, True, [1]), Row(2, 0, 2, True, [2]), Row(3, 0, 2, True, [3])]
    admitted = [new(1, [1, 2]), new(2, [1, 7]), new(3, [3, 4])]
    result = executor.submit(plan(rows, admitted)).wait()
    assert result.token_ids[1] == -1
    assert min(result.token_ids[0], result.token_ids[2]) >= 0
    assert set(result.failed) == {2}
    assert "not finite" in result.failed[2]


MALFORMED = {
    "unknown sequence": (plan([Row(9, 0, 1, False, [3])]), r"sequence 9 .*never admitted"),
    "table too short": (
        plan([Row(2, 0, 5, True, [3])], [new(2)]),
        r"sequence 2: start 0, count 5.*5 tokens and blocks for 4",
    ),
    "beyond the last token": (plan([Row(2, 0, 6, True, [3, 4])], [new(2)]), r"do not fit 5 tokens"),
    "must sample": (plan([Row(2, 0, 5, False, [3, 4])], [new(2)]), r"samples False"),
    "must not sample": (plan([Row(2, 0, 4, True, [3, 4])], [new(2)]), r"samples True"),
    "empty row": (plan([Row(2, 0, 0, False, [3])], [new(2)]), r"count 0"),
    "negative start": (plan([Row(2, -1, 1, False, [3])], [new(2)]), r"start -1"),
    "two rows": (
        plan([Row(2, 0, 1, False, [3]), Row(2, 1, 1, False, [])], [new(2)]),
        r"a sequence is in two rows",
    ),
    "null block": (plan([Row(2, 0, 1, False, [0])], [new(2)]), r"blocks must be in \[1, 30\]"),
    "block beyond": (plan([Row(2, 0, 1, False, [31])], [new(2)]), r"blocks must be in \[1, 30\]"),
    "too many blocks": (
        plan([Row(2, 0, 1, False, list(range(1, 18)))], [new(2)]),
        r"sequence 2 holds at most 16 blocks, not 17",
    ),
    "admitted twice": (plan([], [new(1)]), r"sequence 1 is admitted but was not released"),
    "too many sequences": (plan([], [new(2), new(3), new(4)]), r"beyond max_num_seqs 3"),
    "empty sequence": (plan([], [NewSequence(2, [], 0, GREEDY)]), r"prompt_len 0 and 0 tokens"),
    "prompt too long": (plan([], [new(2, [1] * 65)]), r"65 tokens .*<= 64"),
    "token id": (plan([], [new(2, [1, 128])]), r"token ids must be in \[0, 128\), got 1 to 128"),
    "negative token id": (plan([], [new(2, [1, -1])]), r"got -1 to 1"),
    "decodes": (
        plan([Row(2, 0, 5, True, [3, 4])], [new(2)], decodes=1),
        r"num_decodes 1, but 0 leading rows of 1 have one token",
    ),
    "sum of tokens": (
        StepPlan(1, [Row(2, 0, 5, True, [3, 4])], [new(2)], [], 0, 6),
        r"5 tokens, not 6",
    ),
    "budget": (plan([Row(2, 0, 33, False, [3])], [new(2)]), r"at most 32 tokens per step, got 33"),
}


@pytest.mark.parametrize(("bad", "message"), MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_plan_is_refused(executor, bad, message):
    executor.submit(prefill(1))
    with pytest.raises(RuntimeError, match=message):
        executor.submit(bad)


def test_closed_executor_refuses(executor):
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(prefill())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "tpu"}, r"device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        ({"dtype": "int8"}, r"dtype must be one of .*got 'int8'"),
        ({"dtype": "float16"}, r"dtype on cpu must be one of .*got float16"),
        ({"attention_backend": "flash9"}, r"attention_backend must be one of .*'flash9'"),
        ({"max_model_len": 65}, r"max_model_len must be at most 64, .*got 65"),
        ({"num_blocks": 1 << 40}, r"num_blocks \d+ needs"),
    ],
    ids=str,
)
def test_configuration_that_does_not_fit_is_refused(folder, values, message):
    with pytest.raises(ConfigError, match=message):
        LocalExecutor(config(folder, **values))


def test_weights_beyond_the_free_memory_are_refused_before_loading(folder, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"needs \d+ bytes as float32, but only 1000 are free"):
        LocalExecutor(config(folder))


@pytest.mark.parametrize(
    ("saved", "wanted", "expected"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float32, "bfloat16", "bfloat16"),
    ],
    ids=str,
)
def test_dtype_follows_the_weights_unless_told_otherwise(tmp_path, saved, wanted, expected):
    folder = write_model(tmp_path, TinyLlama(max_len=64, dtype=saved))
    executor = LocalExecutor(config(folder, dtype=wanted))
    assert executor.info.dtype == expected
    assert executor.submit(prefill()).wait().failed == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_named_and_auto_does_without(folder):
    with pytest.raises(ConfigError, match="no usable GPU"):
        LocalExecutor(config(folder, device="cuda"))
    assert LocalExecutor(config(folder, device="auto")).info.device == "cpu"
