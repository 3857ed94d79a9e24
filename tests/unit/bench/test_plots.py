"""The plots of the documentation: drawn from fresh simulations, and still what is committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cluster import cli
from cluster.bench import plots
from cluster.bench.svg import Axis, Bars, Lines, figure, metadata_of, shown
from cluster.commands.plots import NAMES

COMMITTED = Path(__file__).parents[3] / "docs" / "plots"
SVG = "{http://www.w3.org/2000/svg}"


def numbers(data: Any) -> list[float]:
    """All of them, in order, with the names they stand under checked elsewhere."""
    if isinstance(data, dict):
        return [number for name in sorted(data) for number in numbers(data[name])]
    if isinstance(data, list):
        return [number for item in data for number in numbers(item)]
    return [float(data)]


@pytest.mark.parametrize("name", ["policies", "budget"])
def test_the_committed_plot_is_what_the_simulator_gives_today(name):
    text = (COMMITTED / f"{name}.svg").read_text()
    plot, committed = plots.PLOTS[name], metadata_of(text)
    fresh = plot.measure(1.0)
    assert fresh.keys() == committed["data"].keys()
    assert numbers(committed["data"]) == pytest.approx(numbers(fresh), rel=1e-4)
    assert plot.svg(committed["data"]) == text


@pytest.mark.parametrize("name", NAMES)
def test_every_committed_plot_says_what_it_shows_and_how_to_draw_it(name):
    text = (COMMITTED / f"{name}.svg").read_text()
    about = metadata_of(text)
    assert about["command"] == f"headway plots --only {name} FOLDER"
    assert plots.PLOTS[name].svg(about["data"]) == text
    written = "".join(ElementTree.fromstring(text).itertext())
    for note in (*plots.PLOTS[name].notes, about["command"]):
        assert note in written


def test_the_claims_that_the_pages_make_of_the_plots():
    data = {name: metadata_of((COMMITTED / f"{name}.svg").read_text())["data"] for name in NAMES}
    policies = data["policies"]
    assert policies["continuous"]["tokens/s"] > policies["static"]["tokens/s"]
    assert policies["continuous"]["longest gap ms"] > 10 * policies["chunked"]["longest gap ms"]
    home, moved = data["relief"]["at home"], data["relief"]["cluster-wide"]
    assert moved["stall P50 ms"] < home["stall P50 ms"] / 100
    gated = data["overload"]["goodput/s"]["chunked 512, refusing late ones"]
    plain = data["overload"]["goodput/s"]["chunked 512"]
    assert gated[-1] == max(gated)
    assert plain[-1] < max(plain) / 10


def test_the_command_draws_a_small_one(tmp_path, capsys):
    folder = tmp_path / "new"
    assert cli.main(["plots", "--only", "policies", "--share", "0.1", str(folder)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(folder / "policies.svg")
    drawn = ElementTree.fromstring((folder / "policies.svg").read_text())
    # The ground, and a bar per policy and panel.
    assert len(drawn.findall(f"{SVG}rect")) == 1 + 3 * 5
    assert "prefers-color-scheme:dark" in drawn.findtext(f"{SVG}style", "")


def test_the_names_on_the_command_line_are_the_plots():
    assert tuple(plots.PLOTS) == NAMES


def test_a_share_that_is_none(tmp_path, capsys):
    assert cli.main(["plots", "--share", "0", str(tmp_path)]) == 2
    assert "at most 1" in capsys.readouterr().err


def test_a_folder_that_cannot_be(tmp_path, capsys):
    taken = tmp_path / "file"
    taken.write_text("")
    assert cli.main(["plots", "--only", "policies", "--share", "0.05", str(taken)]) == 2
    assert str(taken) in capsys.readouterr().err


def test_places_on_axes():
    """A line's points go from the first x to the last, and a larger y is higher."""
    lines = Lines(Axis("x, s"), Axis("y, ms", log=True), (1, 2, 3), {"<a>": (1, 10, 100)})
    drawn = ElementTree.fromstring(figure("t & u", ["n"], [lines], {"a": "<&>"}))
    points = drawn.find(f"{SVG}polyline").get("points").split()
    xs, ys = zip(*((float(v) for v in point.split(",")) for point in points), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[0] > ys[1]
    assert metadata_of(figure("t", [], [lines], {"a": "<&>"})) == {"a": "<&>"}


def test_bars_are_as_long_as_their_values():
    bars = Bars(Axis("v"), {"one": 1.0, "three": 3.0, "none": 0.0})
    drawn = ElementTree.fromstring(figure("t", [], [bars], {}))
    one, three, none = (float(r.get("width")) for r in drawn.findall(f"{SVG}rect")[1:])
    assert three == pytest.approx(3 * one, rel=0.02)
    assert none == 1.0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234.5, "1,234"), (16.503, "16.5"), (7.15, "7.15"), (512, "512")]
)
def test_how_numbers_are_written(value, text):
    assert shown(value) == text
