"""`headway doctor` over a Ray cluster of two nodes."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.app import headway
from tests.e2e.ray_nodes import RayNodes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_every_node_is_checked_and_the_nodes_are_compared():
    with RayNodes(2) as nodes:
        done = nodes.try_headway("doctor", "--json")
        report = json.loads(done.stdout)
        assert done.returncode == (0 if report["healthy"] else 1), done.stderr
        *checked, between = report["nodes"]
        assert len(checked) == 2
        assert between == "between the nodes"
        for node in checked:
            subjects = {finding["subject"] for finding in report["nodes"][node]}
            assert {"python", "packages", "GPU", "memory", "shared memory"} <= subjects
        (same,) = report["nodes"][between]
        assert same["message"] == "2 with the same versions"


def test_no_cluster_is_one_clear_line():
    done = subprocess.run(
        headway("doctor", "--ray-address", "127.0.0.1:1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
