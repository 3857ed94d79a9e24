"""The Dockerfile, without an engine to build it: a linter, and its commands run for real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
COMPILERS = ("g++", "gcc", "clang", "build-essential", "cmake", "make", "ninja")


def stages() -> dict[str, tuple[str, str]]:
    """name -> (base, its lines without comments and continuations), in order."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", " ", text)
    found: dict[str, tuple[str, str]] = {}
    for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        base, name = re.fullmatch(r"(\S+) AS (\S+)", head.strip()).groups()
        found[name] = (base, body)
    return found


def lineage(name: str) -> str:
    """All lines that end up in a stage's image."""
    base, body = stages()[name]
    return (lineage(base) if base in stages() else "") + body


def test_the_linter_has_nothing_to_say():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(linter), "--no-color", "--failure-threshold", "style", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_somebody_and_has_no_compiler(target):
    lines = lineage(target)
    assert "USER 1000:1000" in lines
    assert lines.rindex("USER 1000:1000") > lines.rindex("RUN ")
    assert "apt-get" not in lines
    assert not any(re.search(rf"\b{re.escape(tool)}(?!\w)", lines) for tool in COMPILERS)
    assert f"COPY --from=venv-{target} /opt/headway /opt/headway" in lines
    assert "EXPOSE 50051" in lines
    assert "STOPSIGNAL SIGTERM" in lines
    assert "HEALTHCHECK" in lines
    assert f"venv-{target}" in stages()


def test_the_last_stage_is_the_one_for_every_machine():
    assert list(stages())[-1] == "cpu"


def test_torch_is_the_version_that_make_serve_installs():
    (default,) = re.findall(r"TORCH_VERSION:-([\d.]+)", (ROOT / "deploy/install.sh").read_text())
    assert set(re.findall(r"TORCH_VERSION=([\d.]+)", DOCKERFILE.read_text())) == {default}


def test_the_context_has_what_is_copied():
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    _, body = stages()["wheel"]
    copied = {
        word
        for line in body.splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """What the stage `wheel` makes, out of a copy of what it gets."""
    source = tmp_path_factory.mktemp("src")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wanted = (
        "cluster/",
        "workers/",
        "proto/",
        "loadtests/",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    )
    for name in tracked.split("\0"):
        if name.startswith(wanted) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    out = source / "dist"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--wheel-dir",
        str(out),
    ]
    subprocess.run([*command, str(source)], check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_all_code_and_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    suffixes = (".py", ".pyi", ".cpp", ".h", ".gz", ".proto", ".typed")
    expected = set()
    for folder, prefix in (("cluster", ""), ("workers", ""), ("proto/headway", "proto/")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                expected.add(str(path.relative_to(ROOT)).removeprefix(prefix))
    assert expected - names == set()
    assert "loadtests/slo.toml" in names


@pytest.fixture(scope="module")
def image(wheel, tmp_path_factory) -> Path:
    """The wheel in an environment of its own, over this one's packages; python's path."""
    folder = tmp_path_factory.mktemp("image") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [p for p in sys.path if p.endswith("site-packages")]
    # Behind the wheel, and without the editable install of this checkout.
    (site / "outer.pth").write_text("".join(f"{package}\n" for package in packages))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True, timeout=300)
    return folder / "bin/python"


def inside(image: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """As in a container: nothing of the checkout, no compiler, an empty cache."""
    environment = {
        "PATH": str(image.parent),
        "HOME": str(image.parents[1]),
        "HEADWAY_CACHE": str(image.parents[1] / "cache"),
        **environ,
    }
    return subprocess.run(
        [str(image), *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=image.parents[1],
        env=environment,
    )


def test_the_installed_wheel_runs(image):
    done = inside(image, "-m", "cluster", "version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("headway 0.1.0")
    where = inside(image, "-c", "import cluster, workers, headway; print(cluster.__file__)")
    assert str(image.parents[1]) in where.stdout, where.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_kernels_built_in_one_stage_are_used_in_another_without_a_compiler(image, tmp_path):
    """Slow levels are left out here; `--all` itself is tested beside the kernels."""
    built = inside(
        image,
        "-m",
        "workers.native",
        HEADWAY_CACHE=str(tmp_path / "kernels"),
        PATH=os.environ["PATH"],
    )
    assert built.returncode == 0, built.stderr
    use = (
        "import torch; from workers.native.bindings import load_kernels; "
        "print(load_kernels(torch.float32).dtype)"
    )
    without = inside(image, "-c", use)
    assert "no C++ compiler found" in without.stderr
    shipped = str(tmp_path / "kernels/native")
    used = inside(image, "-c", use, HEADWAY_NATIVE_LIBRARIES=shipped)
    assert used.stdout.strip() == "torch.float32", used.stderr
    checked = inside(image, "-m", "cluster", "doctor", HEADWAY_NATIVE_LIBRARIES=shipped)
    assert f"compiled before: {shipped}" in checked.stdout, checked.stdout + checked.stderr
