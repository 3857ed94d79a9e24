"""Blocks that move between steps, shared prefixes and padding rows: the tokens stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError, ModelError
from cluster.core.plan import BlockCopy, NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from tests.determinism.tiny_models import TinyLlama, write_config, write_model
from workers import memory
from workers.executor import LocalExecutor
from workers.executors import check_config

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
PROMPT = [5, 9, 100, 3, 77, 12, 31, 8, 64, 2, 90]
HOST_BLOCKS = 6
STEPS = 9


def config(folder, **values) -> WorkerConfig:
    defaults = {"device": "cpu", "block_size": 4, "num_blocks": 30, "max_num_seqs": 4}
    return WorkerConfig(model=str(folder), **{**defaults, "max_num_batched_tokens": 32, **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"), TinyLlama(max_len=64))


@pytest.fixture
def executor(folder):
    executor = LocalExecutor(config(folder), host_blocks=HOST_BLOCKS)
    yield executor
    executor.close()


def new(seq_id: int, tokens=PROMPT, prompt_len=None) -> NewSequence:
    return NewSequence(seq_id, list(tokens), prompt_len or len(tokens), GREEDY)


def plan(rows, admitted=(), released=(), **moves) -> StepPlan:
    decodes = 0
    while decodes < len(rows) and rows[decodes].count == 1:
        decodes += 1
    total = sum(row.count for row in rows)
    return StepPlan(1, list(rows), list(admitted), list(released), decodes, total, **moves)


def submit(executor: LocalExecutor, step: StepPlan) -> list[int]:
    result = executor.submit(step).wait()
    assert not result.failed
    return result.token_ids


def decode(executor, seq_id: int, computed: int, blocks: list[int], steps: int) -> list[int]:
    """`steps` tokens of a sequence that has `computed` positions and holds `blocks` for more."""
    tokens = []
    for start in range(computed, computed + steps):
        tokens += submit(executor, plan([Row(seq_id, start, 1, True, blocks)]))
        blocks = []
    return tokens


@pytest.fixture(scope="module")
def plain(folder) -> list[int]:
    """The tokens of the prompt on its own: one from the prefill, STEPS from decodes."""
    executor = LocalExecutor(config(folder))
    first = submit(executor, plan([Row(1, 0, 11, True, [1, 2, 3])], [new(1)]))
    return first + decode(executor, 1, 11, [4, 5], STEPS)


def test_swapped_sequence_goes_on_where_it_was(executor, plain):
    tokens = submit(executor, plan([Row(1, 0, 11, True, [1, 2, 3])], [new(1)]))
    tokens += decode(executor, 1, 11, [], 1)
    out = [BlockCopy(1, 5), BlockCopy(2, 0), BlockCopy(3, 3)]
    # The blocks are another sequence's in the same step: what was in them is already saved.
    other = plan([Row(2, 0, 11, True, [3, 2, 1])], [new(2, PROMPT[::-1])], [1], swap_out=out)
    submit(executor, other)
    back = [BlockCopy(5, 9), BlockCopy(0, 8), BlockCopy(3, 1)]
    row = Row(3, 12, 1, True, [9, 8, 1, 20])
    again = new(3, PROMPT + tokens, prompt_len=11)
    tokens += submit(executor, plan([row], [again], [2], swap_in=back))
    tokens += decode(executor, 3, 13, [21], STEPS - 2)
    assert tokens == plain


def test_copied_partial_block_is_a_prefix(executor, plain):
    """10 of 11 positions come from another sequence: two blocks shared, half of one copied."""
    submit(executor, plan([Row(1, 0, 11, True, [1, 2, 3])], [new(1, [*PROMPT[:10], 55])]))
    row = Row(2, 10, 1, True, [1, 2, 6])
    tokens = submit(executor, plan([row], [new(2)], copies=[BlockCopy(3, 6)]))
    assert tokens + decode(executor, 2, 11, [7, 8], STEPS) == plain


def test_shared_blocks_serve_two_sequences_at_once(executor, plain):
    tokens = submit(executor, plan([Row(1, 0, 11, True, [1, 2, 3])], [new(1)]))
    rows = [Row(1, 11, 1, True, []), Row(2, 8, 3, True, [1, 2, 9])]
    second, first = submit(executor, plan(rows, [new(2)]))
    assert [*tokens, second] == plain[:2]
    assert first == plain[0]
    submit(executor, plan([], released=[1]))
    assert decode(executor, 2, 11, [10, 11], STEPS) == plain[1:]


def test_moves_of_one_kind_read_before_they_write(executor, plain):
    """Block 1 moves onto block 2 while block 2 moves on: written first, it would be lost."""
    first = submit(executor, plan([Row(1, 0, 11, True, [1, 2, 3])], [new(1)]))
    shift = [BlockCopy(1, 2), BlockCopy(2, 6)]
    row = Row(2, 11, 1, True, [2, 6, 3, 4])
    again = new(2, PROMPT + first, prompt_len=11)
    tokens = submit(executor, plan([row], [again], [1], copies=shift))
    assert tokens + decode(executor, 2, 12, [5], STEPS - 1) == plain[1:]


def test_swap_out_comes_before_copies_and_copies_before_swap_in(executor, plain):
    """Block 1 is saved, overwritten by block 2, and its old content comes back as block 7."""
    first = submit(executor, plan([Row(1, 0, 11, True, [1, 2, 3])], [new(1)]))
    moves = {
        "swap_out": [BlockCopy(1, 0)],
        "copies": [BlockCopy(2, 1), BlockCopy(3, 7)],
        "swap_in": [BlockCopy(0, 7)],
    }
    row = Row(2, 11, 1, True, [7, 1, 3, 4])
    again = new(2, PROMPT + first, prompt_len=11)
    assert submit(executor, plan([row], [again], [1], **moves)) == plain[1:2]


def test_padding_rows_change_nothing(executor, plain):
    """A member that is over repeats its last position beside the others, first, last or between."""
    admitted = [new(1), new(2, PROMPT[:6])]
    rows = [Row(1, 0, 11, True, [1, 2, 3]), Row(2, 0, 6, True, [10, 11])]
    tokens = submit(executor, plan(rows, admitted))[:1]
    pad, blocks = Row(2, 5, 1, False, []), [4, 5]
    for step in range(STEPS):
        own = Row(1, 11 + step, 1, True, blocks)
        tokens += submit(executor, plan([pad, own] if step % 2 else [own, pad]))
        blocks = []
    assert tokens == plain
    # The padded member itself is as it was, and can still be shared from.
    hit = plan([Row(3, 4, 2, True, [10, 12])], [new(3, PROMPT[:6])])
    fresh = plan([Row(4, 0, 6, True, [13, 14])], [new(4, PROMPT[:6])])
    assert submit(executor, hit) == submit(executor, fresh)


def test_failed_member_may_stay_as_padding(tmp_path):
    spec = TinyLlama(max_len=64)
    tensors = spec.tensors()
    tensors["model.embed_tokens.weight"][7] = float("nan")
    folder = write_model(tmp_path, spec)
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    executor = LocalExecutor(config(folder))
    rows = [Row(1, 0, 2, True, [1]), Row(2, 0, 2, True, [2])]
    result = executor.submit(plan(rows, [new(1, [1, 7]), new(2, [1, 2])])).wait()
    assert set(result.failed) == {1}
    pad = plan([Row(2, 2, 1, True, []), Row(1, 1, 1, False, [])])
    assert len(submit(executor, pad)) == 1
    with pytest.raises(RuntimeError, match="samples True"):
        executor.submit(plan([Row(1, 1, 1, True, [])]))


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({"swap_out": [BlockCopy(1, 6)]}, r"swap_out: host slots .*\[0, 5\], got 6 to 6"),
        ({"swap_out": [BlockCopy(0, 1)]}, r"swap_out: blocks must be in \[1, 30\], got 0 to 0"),
        ({"swap_in": [BlockCopy(-1, 4)]}, r"swap_in: host slots .*got -1 to -1"),
        ({"swap_in": [BlockCopy(1, 31)]}, r"swap_in: blocks .*got 31 to 31"),
        ({"copies": [BlockCopy(2, 3), BlockCopy(31, 4)]}, r"copies: blocks .*got 2 to 31"),
        ({"copies": [BlockCopy(2, 0)]}, r"copies: blocks .*got 0 to 0"),
        ({"copies": [BlockCopy(2, 3), BlockCopy(4, 3)]}, r"copies: one of 2 targets .*twice"),
    ],
    ids=str,
)
def test_moves_out_of_range_are_refused(executor, moves, message):
    with pytest.raises(RuntimeError, match=message):
        executor.submit(plan([], **moves))


def test_without_host_blocks_no_swap(folder):
    executor = LocalExecutor(config(folder))
    with pytest.raises(RuntimeError, match="host slots must be in"):
        executor.submit(plan([], swap_out=[BlockCopy(1, 0)]))


# -- the check before the start ----------------------------------------------------------------


def test_a_good_configuration_passes_the_check_without_reading_weights(folder, monkeypatch):
    def no_tensor(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("workers.checkpoint.folder.Checkpoint.tensor", no_tensor)
    check_config(config(folder), host_blocks=3)


@pytest.mark.parametrize(
    "values",
    [
        {"model": "/nowhere/at/all"},
        {"device": "tpu"},
        {"dtype": "int8"},
        {"dtype": "float16"},
        {"attention_backend": "flash9"},
        {"max_model_len": 65},
        {"num_blocks": 1 << 40},
    ],
    ids=str,
)
def test_check_refuses_in_the_words_of_the_executor(folder, values):
    bad = replace(config(folder), **values)
    with pytest.raises((ConfigError, ModelError)) as checked:
        check_config(bad)
    with pytest.raises((ConfigError, ModelError)) as loaded:
        LocalExecutor(bad)
    assert type(checked.value) is type(loaded.value)
    # Free memory differs between the two calls.
    if "num_blocks" not in values:
        assert str(checked.value) == str(loaded.value)


def test_check_refuses_an_architecture_and_a_missing_tensor(tmp_path):
    spec = TinyLlama(max_len=64)
    folder = write_model(tmp_path / "one", spec)
    write_config(folder, {**spec.config(), "architectures": ["MambaForCausalLM"]})
    with pytest.raises(ModelError, match="'MambaForCausalLM'"):
        check_config(config(folder))
    folder = write_model(tmp_path / "two", spec)
    write_config(folder, {**spec.config(), "num_hidden_layers": 3})
    with pytest.raises(ModelError, match="missing"):
        check_config(config(folder))


def test_check_counts_weights_and_cache_together(folder, monkeypatch):
    """Each would fit on its own."""
    weights = sum(t.nbytes for t in TinyLlama(max_len=64).tensors().values())
    monkeypatch.setattr(memory, "free_memory", lambda device: weights + 1000)
    with pytest.raises(ConfigError, match=r"num_blocks 30 needs \d+ bytes .*only 1000 are free"):
        check_config(config(folder))
    monkeypatch.setattr(memory, "free_memory", lambda device: weights - 1)
    with pytest.raises(ConfigError, match="as float32, but only"):
        check_config(config(folder))


@pytest.mark.parametrize(("host_blocks", "message"), [(-1, "at least 0"), (1 << 40, "needs")])
def test_host_blocks_that_cannot_be_are_refused(folder, host_blocks, message):
    for refuse in (check_config, lambda c, host_blocks: LocalExecutor(c, host_blocks=host_blocks)):
        with pytest.raises(ConfigError, match=rf"host_blocks .*{message}"):
            refuse(config(folder), host_blocks=host_blocks)
