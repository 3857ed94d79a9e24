"""Regenerates the committed stubs in proto/headway/v1.

    python proto/generate.py            write them
    python proto/generate.py --check    exit 1 and show the difference when they are stale

Stubs refuse a protobuf or grpc runtime that is older than their compiler, so the compiler is the
oldest that the package supports. That one needs an older protobuf than the newest that the package
supports, so it is not a dependency: it is unpacked without dependencies (it has no use for them
at run time) into a folder that git ignores, and used from there.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GRPC_TOOLS_VERSION = "1.80.0"
"""Exact, because its version stands in the stubs. It emits protobuf 6.31.1 code."""

PROTO_ROOT = Path(__file__).resolve().parent
SOURCES = sorted(PROTO_ROOT.glob("headway/v1/*.proto"))
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
TOOLS_DIR = PROTO_ROOT.parent / "build" / f"grpcio-tools-{GRPC_TOOLS_VERSION}"


def compiler_path() -> Path:
    """Folder to put on PYTHONPATH for the pinned compiler; installed on first use.

    Raises subprocess.CalledProcessError when it is not there and cannot be downloaded.
    """
    if not (TOOLS_DIR / "grpc_tools").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        target = ["--target", str(TOOLS_DIR), f"grpcio-tools=={GRPC_TOOLS_VERSION}"]
        subprocess.run([*pip, *target], check=True)
    return TOOLS_DIR


def compile_stubs(out: Path) -> None:
    """Write the stubs of all sources under `out`, which mirrors proto/."""
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}"]
    outputs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    sources = [str(path.relative_to(PROTO_ROOT)) for path in SOURCES]
    environment = dict(os.environ, PYTHONPATH=str(compiler_path()))
    subprocess.run([*protoc, *outputs, *sources], check=True, env=environment, cwd=PROTO_ROOT)


def stubs(root: Path) -> dict[str, str]:
    """Path relative to `root` -> text, of every stub under it."""
    found = (path for pattern in STUB_PATTERNS for path in root.glob(f"headway/v1/{pattern}"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(found)}


def stale_stubs() -> str:
    """A unified diff from the committed stubs to fresh ones; empty when they are up to date."""
    with tempfile.TemporaryDirectory() as fresh_root:
        compile_stubs(Path(fresh_root))
        fresh = stubs(Path(fresh_root))
    committed = stubs(PROTO_ROOT)
    lines: list[str] = []
    for name in sorted(fresh.keys() | committed.keys()):
        old = committed.get(name, "").splitlines(keepends=True)
        new = fresh.get(name, "").splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, f"committed/{name}", f"fresh/{name}")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate the stubs of the wire contract.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if stale")
    if not parser.parse_args().check:
        compile_stubs(PROTO_ROOT)
        return 0
    difference = stale_stubs()
    sys.stdout.write(difference)
    return 1 if difference else 0


if __name__ == "__main__":
    raise SystemExit(main())
