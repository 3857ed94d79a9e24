"""The compiled kernels beside torch's operators, and what happens where they cannot be built."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionSpec
from workers.attention.registry import make_attention
from workers.layers.fused import FusedOps, TorchOps
from workers.native import __main__ as native_command
from workers.native import bindings, build, levels
from workers.native.bindings import load_kernels, unavailable
from workers.native.levels import LEVEL_VARIABLE, LEVELS, usable_levels
from workers.native.ops import NativeOps

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no compiler here")

SPEC = AttentionSpec(4, 2, 64, 16, 0.125, torch.float32, torch.device("cpu"))
PREPARES = 'extern "C" __attribute__((visibility("default"))) int headway_prepare() { return 0; }\n'
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=[level.name for level in LEVELS])
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(LEVEL_VARIABLE, request.param)
    if not usable_levels() or usable_levels()[0].name != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def ops(level, dtype) -> FusedOps:
    return NativeOps(load_kernels(dtype))


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), atol=bound, rtol=bound)


@pytest.mark.parametrize("width", [1, 7, 16, 60, 576])
def test_rms_norm(ops, dtype, width):
    x, weight = random(5, width, dtype=dtype), random(width, dtype=dtype)
    expected = TorchOps().rms_norm(x.double(), weight.double(), 1e-5)
    assert_near(ops.rms_norm(x, weight, 1e-5), expected)
    residual = random(width, 5, dtype=dtype).T.contiguous()
    total = (residual + x).double()
    normed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual.double(), total)
    assert_near(normed, TorchOps().rms_norm(total, weight.double(), 1e-5))


def test_rms_norm_with_more_digits_in_the_weight(ops, dtype):
    """1 + w of a bf16 w: both keep digits that bf16 would drop."""
    x, weight = random(5, 60, dtype=dtype), 1 + random(60, dtype=dtype).float() / 64
    expected = TorchOps().rms_norm(x.double(), weight.double(), 1e-5)
    assert_near(ops.rms_norm(x, weight, 1e-5), expected)
    assert_near(TorchOps().rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("head_dim", [6, 16, 128])
@pytest.mark.parametrize("weight_dtype", ["own", "float32"])
def test_norm_heads(ops, dtype, head_dim, weight_dtype):
    """Query and key heads change, values do not."""
    heads = random(5, 7, head_dim, dtype=dtype)
    weight = random(4, head_dim, dtype=dtype)
    if weight_dtype == "float32":
        weight = weight.float()
    expected = heads.double()
    for head in range(4):
        rows = expected[:, head].clone()
        expected[:, head] = TorchOps().rms_norm(rows, weight[head].double(), 1e-5)
    for implementation in (ops, TorchOps()):
        found = heads.clone()
        implementation.norm_heads(found, weight, 1e-5)
        assert_near(found, expected)
        assert torch.equal(found[:, 4:], heads[:, 4:])


@pytest.mark.parametrize("width", [1, 7, 16, 70, 1536])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gates(ops, dtype, width, name):
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    expected = getattr(TorchOps(), name)(gate_up.double())
    bound = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(
        getattr(ops, name)(gate_up).double(), expected, atol=bound, rtol=bound
    )


def test_gelu_of_extremes(ops, dtype):
    values = [-1e30, -200.0, -9.0, -0.0, 9.0, 200.0, 1e30, float("nan"), float("inf")] + [1.0] * 7
    gate_up = torch.tensor([values + [1.0] * 16]).to(dtype)
    found = ops.gelu_mul(gate_up)[0, :9].double()
    expected = torch.nn.functional.gelu(gate_up[0, :9].double(), approximate="tanh")
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=8e-3, equal_nan=True)


def test_silu_of_extremes(ops, dtype):
    values = [-1e30, -200.0, -89.0, -0.0, 89.0, 200.0, 1e30, float("nan"), float("inf")] + [1.0] * 7
    gate_up = torch.tensor([values + [1.0] * 16]).to(dtype)
    found = ops.silu_mul(gate_up)[0, :9].double()
    expected = torch.nn.functional.silu(gate_up[0, :9].double())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=8e-3, equal_nan=True)


def test_not_finite_rows_stay_alone(ops, dtype):
    x, weight = random(3, 64, dtype=dtype), random(64, dtype=dtype)
    clean = ops.rms_norm(x, weight, 1e-5)
    x[1, 5] = torch.nan
    found = ops.rms_norm(x, weight, 1e-5)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_the_library_is_that_of_the_level(level):
    library = bindings._library(tuple(usable_levels()))
    assert Path(library._name).name.startswith(f"kernels-{level}-")


def test_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv(LEVEL_VARIABLE, "mmx")
    with pytest.raises(ConfigError, match=r"HEADWAY_NATIVE_LEVEL must be one of .*'amx'.*'mmx'"):
        make_attention("native", SPEC)


def test_other_machines_have_the_plain_level_only(monkeypatch):
    monkeypatch.setattr(levels.platform, "machine", lambda: "riscv64")
    levels._cpu_flags.cache_clear()
    try:
        assert [level.name for level in usable_levels()] == ["scalar"]
    finally:
        levels._cpu_flags.cache_clear()


# -- building ----------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache folder and a process that has built nothing yet."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    caches = (bindings._outcome, build._stem, build._version)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "cache" / "native"
    for cached in caches:
        cached.cache_clear()


def small_source(folder: Path, text: str, monkeypatch) -> None:
    (folder / "kernels.cpp").write_text(text)
    monkeypatch.setattr(build, "_SOURCES", folder)


def test_without_compiler_torch_serves_and_one_warning_tells(empty_cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with caplog.at_level(logging.WARNING, logger="workers.native"):
        assert make_attention("auto", SPEC).name == "torch"
        assert make_attention("auto", replace(SPEC, head_dim=128)).name == "torch"
        with pytest.raises(ConfigError, match=r"'native'.*no C\+\+ compiler found"):
            make_attention("native", SPEC)
    (record,) = caplog.records
    assert "no C++ compiler found" in record.message


def test_compiler_that_fails_leaves_torch(empty_cache, monkeypatch, caplog, tmp_path):
    small_source(tmp_path, "this is not C++", monkeypatch)
    with caplog.at_level(logging.WARNING, logger="workers.native"):
        assert make_attention("auto", SPEC).name == "torch"
        assert make_attention("auto", SPEC).name == "torch"
        with pytest.raises(ConfigError, match=r"'native'.*failed: .*kernels\.cpp"):
            make_attention("native", SPEC)
    assert len(caplog.records) == 1
    assert not list(empty_cache.iterdir())


def test_library_is_built_once_and_found_again_without_a_compiler(
    empty_cache, monkeypatch, tmp_path
):
    small_source(tmp_path, PREPARES, monkeypatch)
    path = build.build(LEVELS[-1])
    stamp = path.stat().st_mtime_ns
    assert build.build(LEVELS[-1]) == path
    assert path.stat().st_mtime_ns == stamp
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert build.build(LEVELS[-1]) == path
    assert list(empty_cache.iterdir()) == [path]


def test_libraries_that_an_image_ships_come_first_and_need_no_compiler(
    empty_cache, monkeypatch, tmp_path
):
    small_source(tmp_path, PREPARES, monkeypatch)
    shipped = tmp_path / "shipped"
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "image"))
    built = build.build(LEVELS[-1])
    shipped.mkdir()
    moved = built.rename(shipped / built.name)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(build.SHIPPED_VARIABLE, str(shipped))
    for compiler in ("/nowhere/g++", "g++"):
        monkeypatch.setenv("CXX", compiler)
        assert build.build(LEVELS[-1]) == build.existing(LEVELS[-1]) == moved
    assert not empty_cache.exists()


def test_an_image_gets_every_level_whatever_this_cpu_has(monkeypatch, capsys):
    monkeypatch.setattr(native_command, "build", lambda level: f"/kernels-{level.name}.so")
    assert native_command.main(["--all"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [f"/kernels-{level.name}.so" for level in LEVELS]


def test_a_changed_source_is_another_library(empty_cache, monkeypatch, tmp_path):
    small_source(tmp_path, PREPARES, monkeypatch)
    first = build.build(LEVELS[-1])
    build._stem.cache_clear()
    small_source(tmp_path, PREPARES.replace("return 0", "return 1"), monkeypatch)
    second = build.build(LEVELS[-1])
    assert first != second
    assert ctypes.CDLL(str(second)).headway_prepare() == 1


def test_level_that_the_system_refuses_gives_way_to_the_next(empty_cache, monkeypatch, tmp_path):
    text = "\n#if defined(__AVX2__)\nreturn 1;\n#endif\nreturn 0;"
    small_source(tmp_path, PREPARES.replace("return 0;", text), monkeypatch)
    if "avx2" not in [level.name for level in usable_levels()]:
        pytest.skip("this CPU has one level only")
    library = bindings._library(
        tuple(level for level in LEVELS if level.name in ("avx2", "scalar"))
    )
    assert Path(library._name).name.startswith("kernels-scalar-")


def test_several_processes_build_at_once(empty_cache, tmp_path):
    """All of them get a library that works; nothing else stays in the folder."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "kernels.cpp").write_text(PREPARES)
    code = (
        "import ctypes, pathlib, sys\n"
        "from workers.native import build, levels\n"
        f"build._SOURCES = pathlib.Path({str(source)!r})\n"
        "path = build.build(levels.LEVELS[-1])\n"
        "assert ctypes.CDLL(str(path)).headway_prepare() == 0\n"
        "print(path)\n"
    )
    root = Path(__file__).parents[3]
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    paths = {process.communicate(timeout=120)[0].strip() for process in started}
    assert all(process.returncode == 0 for process in started)
    assert paths == {str(path) for path in empty_cache.iterdir()}


def test_an_unwritable_cache_is_named(empty_cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    assert unavailable() is None
    with pytest.raises(ConfigError, match="is not writable"):
        make_attention("native", SPEC)


def test_command_builds_ahead_of_time(empty_cache, monkeypatch, tmp_path, capsys):
    small_source(tmp_path, PREPARES, monkeypatch)
    assert native_command.main() == 0
    assert [str(path) for path in empty_cache.iterdir()] == capsys.readouterr().out.split()
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert native_command.main() == 1
    assert "no C++ compiler found" in capsys.readouterr().err
