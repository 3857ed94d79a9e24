"""What differs between the nodes of a cluster. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from cluster.doctor.facts import NodeFacts
from cluster.findings import Finding, ok, problem, warning

MAX_CLOCK_GAP_S = 2.0

EVERYWHERE_THE_SAME: Mapping[str, Callable[[NodeFacts], str]] = {
    "python": lambda node: ".".join(node.python.split(".")[:2]),
    "headway": lambda node: node.headway,
    "headway's code": lambda node: node.code,
    "ray": lambda node: package(node, "ray"),
    "msgspec": lambda node: package(node, "msgspec"),
    "tokenizers": lambda node: package(node, "tokenizers"),
}
"""Where these differ, nodes do not understand each other, or give other tokens."""

BETTER_THE_SAME: Mapping[str, Callable[[NodeFacts], str]] = {
    "torch": lambda node: package(node, "torch"),
    "grpcio": lambda node: package(node, "grpcio"),
    "NVIDIA driver": lambda node: node.gpu.driver,
    "CUDA of torch": lambda node: node.gpu.cuda,
    "NCCL": lambda node: node.gpu.nccl,
}
"""Where these differ, the last bits of logits may, and what is fixed on one node is not on another.
"""


def package(node: NodeFacts, name: str) -> str:
    found = (p.installed for p in node.packages if p.name.partition("[")[0] == name)
    return next(found, None) or "none"


def differences(nodes: Mapping[str, NodeFacts], clock_gaps_s: Mapping[str, float]) -> list[Finding]:
    """nodes: by a name for people. clock_gaps_s: how far a node's clock is from ours, as far as the
    call's own duration leaves in doubt."""
    found = [*_same(nodes, EVERYWHERE_THE_SAME, problem), *_same(nodes, BETTER_THE_SAME, warning)]
    for name, gap in clock_gaps_s.items():
        if abs(gap) > MAX_CLOCK_GAP_S:
            advice = "synchronise clocks: logs of nodes do not line up"
            found.append(warning("clock", f"{name} is {gap:+.1f} s from here", advice))
    return found or [ok("nodes", f"{len(nodes)} with the same versions")]


def _same(
    nodes: Mapping[str, NodeFacts],
    aspects: Mapping[str, Callable[[NodeFacts], str]],
    kind: Callable[[str, str, str], Finding],
) -> Iterator[Finding]:
    for what, read in aspects.items():
        holders: dict[str, list[str]] = defaultdict(list)
        for name, node in nodes.items():
            holders[read(node) or "none"].append(name)
        if len(holders) > 1:
            shown = "; ".join(f"{value} on {', '.join(on)}" for value, on in holders.items())
            yield kind(what, shown, "install the same on every node")
