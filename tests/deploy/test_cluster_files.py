"""The files for `ray up`, held against Ray's own checks, and the scripts around them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = ("local.yaml", "aws.yaml", "gcp.yaml")
SCRIPTS = ("up", "down", "node_setup.sh", "ray_node.sh")


def cluster(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text("utf-8"))
    return loaded


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_the_file(name: str) -> None:
    """Ray's JSON schema and what it checks beyond, as `ray up` does before it calls anybody."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    whole = prepare_config(cluster(name))
    validate_config(whole)
    assert whole["cluster_name"] == "headway"
    assert whole["head_start_ray_commands"] == ["bash ~/headway/deploy/ray_node.sh head"]


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_in_the_file_is_found(name: str) -> None:
    """So that the test above can fail."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    wrong = cluster(name) | {"max_wrkers": 3}
    with pytest.raises(Exception, match="max_wrkers"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", FILES)
def test_every_field_is_explained(name: str) -> None:
    """A comment above it, or above the block of fields that it belongs to, or it is what a comment
    further up says of its neighbours."""
    lines = (DEPLOY / name).read_text("utf-8").splitlines()
    bare = []
    for number, line in enumerate(lines):
        field = re.match(r"([a-z_]+):", line)
        if field is None or field[1] in NEED_NO_WORD:
            continue
        before = lines[number - 1] if number else ""
        inside = lines[number + 1] if number + 1 < len(lines) else ""
        if not before.startswith("#") and not inside.lstrip().startswith("#"):
            bare.append(field[1])
    assert bare == []


NEED_NO_WORD = {
    # The same in every file of Ray; docs/operations.md says what the scripts in them do.
    *("docker", "initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    # What they are about stands above their neighbour or inside.
    *("max_workers", "idle_timeout_minutes", "provider", "auth", "head_node_type", "file_mounts"),
}


def test_the_wheel_the_scripts_and_the_token_go_to_every_node() -> None:
    for name in FILES:
        mounts = cluster(name)["file_mounts"]
        assert mounts["~/headway/wheel"] == "dist"
        assert mounts["~/headway/deploy"] == "deploy"
        assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"
        setup = "bash ~/headway/deploy/node_setup.sh ~/headway/wheel"
        assert setup in cluster(name)["setup_commands"]


def test_all_ports_of_ray_are_pinned_apart_from_each_other_and_from_ours() -> None:
    from cluster.gateway.config import DEFAULT_ADDRESS

    script = (DEPLOY / "ray_node.sh").read_text()
    ports = [int(port) for port in re.findall(r"-port (\d+)", script)]
    low = int(re.search(r"--min-worker-port (\d+)", script)[1])  # type: ignore[index]
    high = int(re.search(r"--max-worker-port (\d+)", script)[1])  # type: ignore[index]
    single = [port for port in ports if port not in (low, high)]
    assert len(set(single)) == len(single) >= 9
    assert not [port for port in single if low <= port <= high]
    assert int(DEFAULT_ADDRESS.rpartition(":")[2]) not in (*single, *range(low, high + 1))
    assert "--dashboard-host 127.0.0.1" in script
    assert "RAY_AUTH_MODE:-token" in script


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_programs(name: str) -> None:
    assert os.access(DEPLOY / name, os.X_OK)
    subprocess.run(["bash", "-n", str(DEPLOY / name)], check=True)


@pytest.mark.parametrize(("name", "nodes"), [("local.yaml", 3), ("aws.yaml", 2), ("gcp.yaml", 2)])
def test_the_deployment_waits_for_as_many_nodes_as_the_file_starts(name: str, nodes: int) -> None:
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "count_nodes.py"), str(DEPLOY / name)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == nodes


def test_going_down_reaches_the_workers_that_are_not_given_back() -> None:
    def workers(name: str) -> str:
        command = [sys.executable, str(DEPLOY / "count_nodes.py"), str(DEPLOY / name), "--workers"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert workers("local.yaml") == "headway@10.0.0.11 headway@10.0.0.12"
    assert workers("aws.yaml") == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "usage: deploy/up CLUSTER.yaml HEADWAY.toml"),
        (("nowhere.yaml", "deploy/headway.toml"), "nowhere.yaml: no such file; start from"),
        (("deploy/local.yaml", "nowhere.toml"), "nowhere.toml: no such file; start from"),
        (("deploy/local.yaml", "BAD"), "[engine] has no key 'num_blcks'; did you mean num_blocks?"),
    ],
)
def test_up_says_what_is_wrong_before_it_calls_any_machine(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[engine]\nnum_blcks = 3\n")
    done = subprocess.run(
        [str(DEPLOY / "up"), *(str(bad) if a == "BAD" else a for a in arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"HEADWAY_BIN": str(Path(sys.executable).parent)},
        check=False,
    )
    assert done.returncode != 0
    assert says in done.stderr
