"""The table on the terminal and the JSON beside it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from workers.bench_gpu.measures import Measurement

_PACKAGES = ("torch", "triton", "vllm-flash-attn", "flash-attn", "vllm")


def environment(device: torch.device) -> dict[str, object]:
    """What a later reader must know to compare: card, versions, date."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device_name(device),
        "versions": versions,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": sys.argv[1:],
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"cpu ({platform.machine()})"


def table(results: Sequence[Measurement]) -> str:
    """One line per measurement, under a line per group."""
    lines: list[str] = []
    group = ""
    for result in results:
        if result.group != group:
            group = result.group
            lines.append(group)
        line = f"  {result.case:<40} {result.value:>12.4g} {result.unit:<8}"
        if result.reference:
            line += f" {result.share:>6.2f} of {result.reference:.4g}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def write_json(path: Path, device: torch.device, results: Sequence[Measurement]) -> None:
    content = {**environment(device), "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(content, indent=1) + "\n")
