"""The pages of the documentation, taken apart: commands, programs, outputs, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "loadtests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(^|\s+)#\s.*$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. start: where its text begins in the page."""

    page: Path
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Behind the closing fence."""
        return self.start + len(self.text) + len("```\n")


@dataclass(frozen=True)
class Command:
    """A line of a ```sh block without its comment. output: of the ```text block that follows a
    block of one command; None where there is none."""

    page: Path
    text: str
    output: Block | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [Block(page, m[1], m[2], m.start(2)) for m in _FENCE.finditer(text)]


def commands() -> Iterator[Command]:
    for page in PAGES:
        text, found = page.read_text("utf-8"), blocks(page)
        for block, after in zip(found, [*found[1:], None], strict=False):
            if block.kind != "sh":
                continue
            lines = [_COMMENT.sub("", line).strip() for line in block.text.splitlines()]
            lines = [line for line in lines if line]
            output = None
            if after is not None and after.kind == "text" and len(lines) == 1:
                between = text[block.end : after.start - len("```text\n")]
                output = None if between.strip() else after
            yield from (Command(page, line, output) for line in lines)


def programs(kind: str = "python") -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.kind == kind]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """Targets of links and images, those in fenced blocks aside."""
    return _LINK.findall(re.sub(r"`[^`]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
