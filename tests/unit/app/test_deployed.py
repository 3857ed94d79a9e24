"""What a configuration means on a cluster, and what makes a replica an old one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from cluster.fleet.scaling import ScalingSettings
from cluster.gateway.config import GatewayConfig
from cluster.modelfolder import local_folder
from cluster.settings import ServeSettings
from cluster.versions import engine_version, router_version

SETTINGS = ServeSettings(
    worker=WorkerConfig("/models/one"), gateway=GatewayConfig(), secret="s" * 32, engines=2
)


def changed(**changes: object) -> tuple[bool, bool]:
    """Whether engines, and whether routers, are replaced by such a change."""
    other = dataclasses.replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return (
        engine_version(other) != engine_version(SETTINGS),
        router_version(other) != router_version(SETTINGS),
    )


@pytest.mark.parametrize(
    ("changes", "replaced"),
    [
        ({}, (False, False)),
        ({"engines": 5}, (False, False)),
        ({"routers": 3}, (False, False)),
        ({"scaling": ScalingSettings(min_engines=1, max_engines=4)}, (False, False)),
        ({"scaling": ScalingSettings(min_engines=0, max_engines=4)}, (False, True)),
        ({"engine_drain_s": 5.0}, (False, False)),
        ({"watermark": 0.05}, (True, False)),
        ({"worker": WorkerConfig("/models/one", dtype="float32")}, (True, False)),
        ({"placement": "round-robin"}, (False, True)),
        ({"gateway": GatewayConfig(api_keys_file=Path("/etc/keys"))}, (False, True)),
        ({"worker": WorkerConfig("/models/two")}, (True, True)),
        ({"secret": "t" * 32}, (True, True)),
        ({"generation": "1"}, (True, True)),
    ],
)
def test_only_what_a_change_concerns_is_replaced(changes, replaced):
    assert changed(**changes) == replaced


def test_versions_are_the_same_in_every_process():
    twin = ServeSettings(
        worker=WorkerConfig("/models/one"), gateway=GatewayConfig(), secret="s" * 32, engines=2
    )
    assert engine_version(twin) == engine_version(SETTINGS)
    assert router_version(twin) == router_version(SETTINGS)


def test_a_path_is_taken_as_it_is(tmp_path: Path):
    assert (
        local_folder(str(tmp_path / "nowhere"), lambda stage, share: None) == tmp_path / "nowhere"
    )


def test_a_model_with_terms_is_not_fetched_behind_anybodys_back(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="gemma-3-270m has terms"):
        local_folder("gemma-3-270m", lambda stage, share: None)
    assert list(tmp_path.iterdir()) == []
