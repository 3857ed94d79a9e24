"""`headway doctor`: is this node, or every node of a cluster, fit to serve?"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.load import load_settings
from cluster.findings import Finding, has_problem, lines, problem

RAY_PORTS = {"Ray's head": "0.0.0.0:6379", "Ray's dashboard": "127.0.0.1:8265"}
EXIT_PROBLEMS = 1


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check a node, or all nodes of a cluster, and say what to do",
        description="Check versions, GPU, kernels, memory, shared memory, disk, ports and clock. "
        "Exit code 1 when there are problems; warnings are none.",
    )
    parser.add_argument(
        "--ray-address",
        "--address",
        metavar="auto|HOST:PORT",
        help="of a Ray cluster: check every node of it, and what differs between them",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="whose front door's port is looked at"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Section:
    """What was found at one place."""

    where: str
    findings: list[Finding]


def run(args: argparse.Namespace) -> int:
    """0 without problems, else 1. Raises ConfigError, NoCluster."""
    configured = load_settings(args.config, {}, os.environ)
    ports = {"front door": str(configured["front_door.address"]), **RAY_PORTS}
    sections = _here(ports) if args.ray_address is None else _everywhere(args.ray_address, ports)
    failed = any(has_problem(section.findings) for section in sections)
    if args.json:
        nodes = {s.where: [finding.as_dict() for finding in s.findings] for s in sections}
        print(json.dumps({"healthy": not failed, "nodes": nodes}))
    else:
        for section in sections:
            print("\n".join([f"{section.where}:", *lines(section.findings), ""]))
        print("problems found" if failed else "no problems")
    return EXIT_PROBLEMS if failed else 0


def _here(ports: dict[str, str]) -> list[Section]:
    from cluster.doctor.judge import findings
    from cluster.doctor.probe import probe

    node = probe(ports)
    return [Section(node.host, list(findings(node)))]


def _everywhere(address: str, ports: dict[str, str]) -> list[Section]:
    from cluster.doctor.compare import differences
    from cluster.doctor.judge import findings
    from cluster.doctor.nodes import probe_all

    answers = probe_all(address, ports)
    sections = []
    for answer in answers:
        if answer.facts is None:
            advice = "install the same Headway there, and look at that node's Ray logs"
            said = [problem("node", f"does not answer: {answer.problem}", advice)]
        else:
            said = list(findings(answer.facts))
        sections.append(Section(answer.node, said))
    known = {answer.node: answer.facts for answer in answers if answer.facts is not None}
    gaps = {answer.node: answer.clock_gap_s for answer in answers}
    return [*sections, Section("between the nodes", differences(known, gaps))]
