"""Which backend "auto" takes, per device, and what is said where none fits."""

from __future__ import annotations

import argparse
import re

import pytest
import torch

from cluster.commands import serve
from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionSpec
from workers.attention.registry import BACKENDS, candidates, make_attention


def spec(device: str, dtype: torch.dtype = torch.bfloat16) -> AttentionSpec:
    return AttentionSpec(4, 2, 64, 16, 0.125, dtype, torch.device(device))


@pytest.fixture
def objections(monkeypatch) -> dict[str, str | None]:
    """What each backend has against any spec; nothing at first."""
    answers: dict[str, str | None] = dict.fromkeys(BACKENDS)
    for name, backend in BACKENDS.items():
        monkeypatch.setattr(backend, "objection", lambda spec, name=name: answers[name])
    return answers


def test_order_per_device(objections):
    names = {d: [b.name for b in candidates("auto", spec(d))] for d in ("cuda", "cpu")}
    assert names == {"cuda": ["flash", "triton", "torch"], "cpu": ["native", "torch"]}


def test_what_declines_is_left_out(objections):
    objections["flash"] = "no package"
    assert [b.name for b in candidates("auto", spec("cuda"))] == ["triton", "torch"]


def test_where_none_fits_each_says_why(objections):
    objections.update(dict.fromkeys(objections, "will not"), flash="no package")
    with pytest.raises(ConfigError, match="flash: no package; triton: will not; torch: will not"):
        candidates("auto", spec("cuda"))


def test_a_named_backend_is_not_replaced(objections):
    objections["flash"] = "no package"
    with pytest.raises(ConfigError, match=r"'flash': none fits .*no package"):
        candidates("flash", spec("cuda"))


def test_what_fails_to_start_is_passed_over(objections, monkeypatch):
    def fail(self, spec):
        raise ConfigError("no compiler")

    monkeypatch.setattr(BACKENDS["native"], "__init__", fail)
    assert make_attention("auto", spec("cpu")).name == "torch"
    with pytest.raises(ConfigError, match="no compiler"):
        make_attention("native", spec("cpu"))


def test_help_of_the_command_names_every_backend():
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    parser = commands.choices["serve"]
    (option,) = (a for a in parser._actions if "--attention-backend" in a.option_strings)
    assert set(BACKENDS) <= set(re.findall(r"\w+", option.help or ""))
