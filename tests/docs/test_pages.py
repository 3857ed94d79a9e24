"""Links go somewhere, nothing that a user can call is left out, and pages stay short."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cluster import cli
from cluster.bench.svg import metadata_of
from tests.docs.pages import PAGES, ROOT, anchors, links, name, programs, prose

README_LINES = 100
OF_OTHERS = {"--all", "--shm-size", "--build-arg", "--rm"}
"""Options of docker, and of modules of ours."""
PAGE_LINES = 200


def everything() -> str:
    return "\n".join(page.read_text("utf-8") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_go_somewhere(page: Path) -> None:
    lost = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target in PAGES and target not in found:
                found.add(target)
                todo.append(target)
    assert found == set(PAGES)


def subcommands() -> list[str]:
    """Of `headway`, and of those that have their own."""

    def below(parser: argparse.ArgumentParser, path: str) -> list[str]:
        names = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, child in action.choices.items():
                    names += [f"{path} {word}", *below(child, f"{path} {word}")]
        return names

    return below(cli.build_parser(), "headway")


@pytest.mark.parametrize("command", subcommands())
def test_every_subcommand_is_mentioned(command: str) -> None:
    # "bench fleet" may stand for "headway bench fleet" in a list of them.
    text = everything()
    assert command in text or f"`{command.removeprefix('headway ')}`" in text


def options() -> set[str]:
    """Of every subcommand of `headway`."""

    def below(parser: argparse.ArgumentParser) -> set[str]:
        found = {option for action in parser._actions for option in action.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    found |= below(child)
        return found

    return below(cli.build_parser())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_in_the_text_exist(page: Path) -> None:
    """Also those outside of commands: `--watermark` in a sentence or a table."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose(page)))
    assert named <= options() | OF_OTHERS


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_the_text_exist(page: Path) -> None:
    known = {*subcommands(), "headway"}
    for said in re.findall(r"`(headway [^`]+)`", prose(page)):
        path = [word for word in said.split() if re.fullmatch(r"[a-z]+", word)]
        assert " ".join(path[:3]) in known or " ".join(path[:2]) in known, said


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_metrics_in_the_text_exist(page: Path) -> None:
    known = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    for metric in re.findall(r"headway_(?:engine|router)_\w+", prose(page)):
        assert f"`{metric}`" in known


def test_every_make_target_is_mentioned() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None
    text = everything()
    missing = [t for t in targets[1].split() if not re.search(rf"make {re.escape(t)}\b", text)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_stay_short(page: Path) -> None:
    most = README_LINES if page == ROOT / "README.md" else PAGE_LINES
    lines = page.read_text("utf-8").count("\n")
    assert lines <= most, f"{lines} lines, at most {most}"


def test_numbers_in_the_text_are_those_of_the_plots() -> None:
    data = {
        path.stem: metadata_of(path.read_text("utf-8"))["data"]
        for path in (ROOT / "docs" / "plots").glob("*.svg")
    }
    policies, budget = data["policies"], data["budget"]
    rates, goodput = data["overload"]["rates"], data["overload"]["goodput/s"]["chunked 512"]
    most = max(goodput)
    after = goodput.index(most) + 1
    text = " ".join((ROOT / "docs" / "concepts.md").read_text("utf-8").split())
    for said in (
        f"longest is {policies['continuous']['longest gap ms']:.0f} ms with `continuous`",
        f"and {policies['chunked']['longest gap ms']:.3g} ms with `chunked`",
        f"at {policies['continuous']['tokens/s']:.0f} and {policies['chunked']['tokens/s']:.0f} ",
        f"takes {budget['64']['TTFT P50']:.0f} ms at the median",
        f"with 256 it takes {budget['256']['TTFT P50']:.0f} ms",
        f"it holds P99 at {budget['itl']['ITL P99']:.1f} ms",
        f"at {rates[after]} requests per second from {most:.1f} to {goodput[after]:.1f}",
    ):
        assert said in text


def test_pictures_are_well_formed() -> None:
    pictures = sorted((ROOT / "docs" / "plots").glob("*.svg"))
    shown = everything()
    for picture in pictures:
        ElementTree.parse(picture)
        assert f"plots/{picture.name}" in shown, "a plot that no page shows"
    for diagram in programs("mermaid"):
        assert re.match(r"(flowchart|stateDiagram-v2)", diagram.text)
