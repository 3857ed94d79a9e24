"""The probe over this very machine, and over stand-ins for what this machine lacks."""

from __future__ import annotations

import json
import platform
import socket
import stat
import time

import pytest

from cluster.cli import main
from cluster.doctor import probe


def test_the_probe_knows_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "not" / "there"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        node = probe.probe({"front door": address, "free": "127.0.0.1:0"})
    assert node.python == platform.python_version()
    assert node.ports[f"front door {address}"] == "Address already in use"
    assert node.ports["free 127.0.0.1:0"] == ""
    assert node.room.memory_total >= node.room.memory_free > 0
    assert node.room.model_bytes > 0, "no model in an empty cache"
    assert node.room.cache_problem == ""
    assert not (tmp_path / "not").exists(), "looking changes nothing"
    assert node.kernels.library == ""
    assert node.cores >= 1
    names = {package.name: package for package in node.packages}
    assert names["msgspec"].installed is not None
    assert not {"pytest", "locust"} & names.keys(), "extras are no requirement"


def test_what_is_not_installed_has_no_version():
    (missing,) = probe.packages(["surely-not-installed>=1"])
    assert (missing.installed, missing.tested) == (None, ">=1")
    assert list(probe.packages(["x>=1; extra == 'test'", "y; python_version < '3'"])) == []


def test_the_own_name_is_timed_whether_it_is_found_or_not():
    asked = []

    def slow(name):
        asked.append(name)
        time.sleep(0.05)
        raise socket.gaierror("no such name")

    assert 0.05 <= probe.own_name_s(slow) < 5
    assert asked == [socket.gethostname()]


def test_cards_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    """A stand-in for the program, as it prints with the options that it is called with."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.86.15'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = probe.gpu_facts()
    assert facts.seen == ("NVIDIA H200, 143771 MiB, 570.86.15",)
    assert facts.driver == "570.86.15"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert probe.gpu_facts().seen == ()


@pytest.mark.parametrize("file", ["", "[front_door]\naddress = '127.0.0.1:50997'\n"])
def test_the_command_reports_this_node(capsys, tmp_path, file):
    path = tmp_path / "headway.toml"
    path.write_text(file)
    code = main(["doctor", "--json", "--config", str(path)])
    report = json.loads(capsys.readouterr().out)
    ((host, said),) = report["nodes"].items()
    assert host == socket.gethostname()
    assert code == (0 if report["healthy"] else 1)
    assert {"python", "packages", "GPU", "memory", "port"} <= {f["subject"] for f in said}
    doors = [f["message"] for f in said if f["message"].startswith("front door")]
    assert ("50997" in doors[0]) == bool(file)
    main(["doctor"])
    assert "problem" in capsys.readouterr().out.splitlines()[-1]
