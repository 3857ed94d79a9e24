"""Rules of the house that import-linter cannot see."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = [*(ROOT / "cluster/core").rglob("*.py"), *(ROOT / "cluster/fleet").rglob("*.py")]
PURE_IMPORTS = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "math",
    "typing",
}
"""Standard library that neither reads a clock nor does I/O nor keeps hidden state."""
MAX_LINES = 600


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def _product_files() -> list[Path]:
    folders = ("cluster", "workers", "proto", "loadtests", "deploy")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return [p for p in files if "_pb2" not in p.name]


@pytest.mark.parametrize("path", PURE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_and_fleet_import_pure_modules_only(path):
    foreign = {
        n
        for n in _imports(path) - PURE_IMPORTS
        if not n.startswith(("cluster.core", "cluster.fleet"))
    }
    assert not foreign


@pytest.mark.parametrize("path", PURE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_has_no_assert_print_or_global_state(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert | ast.Global), f"{path}:{node.lineno}"


def test_proto_is_no_package():
    """ray[serve] brings proto-plus, which owns the import name `proto`."""
    assert not (ROOT / "proto/__init__.py").exists()
    code = "import proto; assert hasattr(proto, 'Message'), proto"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_unsafe_deserialisation():
    """No pickle, marshal, eval or torch.load on any path of ours."""
    for path in _product_files():
        assert not _imports(path) & {"pickle", "cPickle", "marshal", "shelve", "dill"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"eval", "exec", "torch.load"}, f"{path}:{node.lineno}"


def test_files_stay_readable():
    long = {
        str(p.relative_to(ROOT)): n
        for p in _product_files()
        if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_client_commands_start_without_torch_and_ray():
    code = (
        "import sys, cluster.cli, headway.client; cluster.cli.build_parser(); "
        "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_lifecycle_diagram_in_the_docs_is_generated():
    from cluster.core.lifecycle import mermaid

    assert mermaid() in (ROOT / "ARCHITECTURE.md").read_text()


def _readme_commands() -> list[list[str]]:
    lines = (ROOT / "README.md").read_text().splitlines()
    called = [line for line in lines if line.startswith(".venv/bin/headway ")]
    return [shlex.split(line, comments=True)[1:] for line in called]


@pytest.mark.parametrize("arguments", _readme_commands(), ids=" ".join)
def test_commands_in_the_readme_parse(arguments):
    from cluster.cli import build_parser

    assert callable(build_parser().parse_args(arguments).run)
