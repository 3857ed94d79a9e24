"""The Triton kernels where there is no GPU: their logic in the interpreter, and that they compile
for the cards we name."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.contract.attention_cases import Case, Shape, make_spec
from workers.attention.triton_backend import TritonAttention
from workers.attention.triton_writer import INTERPRET_VARIABLE

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install '.[kernels]')",
)


def broken_interpreter() -> str | None:
    """Triton before 3.7 stores nothing beside numpy 2.4."""
    versions = {n: importlib.metadata.version(n) for n in ("triton", "numpy")}
    triton, numpy = (tuple(map(int, v.split(".")[:2])) for v in versions.values())
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of Triton {versions['triton']} fails on numpy {versions['numpy']}"
    return None


def in_own_process(*command: str, **environment: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=HERE.parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]


@needs_triton
@pytest.mark.timeout(620)
def test_the_kernels_in_the_interpreter():
    reason = broken_interpreter()
    if reason is not None:
        pytest.skip(reason)
    tests = str(HERE / "interpreted_triton.py")
    in_own_process("pytest", "-q", "-x", "--timeout=300", tests, **{INTERPRET_VARIABLE: "1"})


@needs_triton
@pytest.mark.timeout(620)
def test_the_kernels_compile_for_cards_that_are_not_here(tmp_path):
    if not hasattr(importlib.import_module("triton"), "knobs"):
        pytest.skip("this Triton names the parts of its compiler otherwise")
    in_own_process("tests.contract.compile_triton", TRITON_CACHE_DIR=str(tmp_path))


def test_the_cpu_is_refused_unless_interpreted(monkeypatch):
    monkeypatch.delenv(INTERPRET_VARIABLE, raising=False)
    spec = make_spec(Case("triton", "cpu", torch.float32, 0.0), Shape())
    assert TritonAttention.objection(spec) == (
        "device must be cuda, got cpu (or TRITON_INTERPRET=1, for tests)"
    )


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setenv(INTERPRET_VARIABLE, "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = make_spec(Case("triton", "cpu", torch.float32, 0.0), Shape())
    assert "Triton is not installed" in TritonAttention.objection(spec)
