"""`headway config check`: every value explained, and what is impossible refused before a start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import preflight
from cluster.config.capacity import Machine, capacity_findings
from cluster.config.load import DEFAULT, Configured, Setting
from cluster.config.mapping import gateway_config
from cluster.core.errors import ConfigError, HeadwayError
from cluster.findings import Finding, Level, has_problem, ok, problem, warning

if TYPE_CHECKING:
    from cluster.settings import ServeSettings
    from workers.footprint import Footprint

HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Report:
    """settings, footprint: None where a problem came before them."""

    configured: Configured
    findings: list[Finding]
    settings: ServeSettings | None = None
    footprint: Footprint | None = None

    @property
    def possible(self) -> bool:
        return not has_problem(self.findings)

    def as_dict(self) -> dict[str, Any]:
        file = self.configured.file
        return {
            "possible": self.possible,
            "file": None if file is None else str(file),
            "values": {name: _told(item) for name, item in self.configured.values.items()},
            "findings": [finding.as_dict() for finding in self.findings],
            "footprint": _footprint(self.footprint),
        }


def check(configured: Configured, machine: Machine | None = None) -> Report:
    """Look at everything that can be looked at without starting anything; nothing is fetched.

    machine: by default this one.
    """
    findings = list(_address(configured))
    folder, said = _folder(configured)
    findings += said
    try:
        settings = configured.settings(folder or Path("."))
    except HeadwayError as error:
        return Report(configured, [*findings, problem("options", str(error))])
    if folder is None:
        return Report(configured, findings, settings)
    try:
        footprint = checked_footprint(configured, settings)
    except HeadwayError as error:
        return Report(configured, [*findings, problem("model", str(error))], settings)
    facts = this_machine() if machine is None else machine
    settings = replace(settings, worker=replace(settings.worker, num_blocks=footprint.num_blocks))
    findings += capacity_findings(settings, footprint, facts)
    return Report(configured, findings, settings, footprint)


def checked_footprint(configured: Configured, settings: ServeSettings) -> Footprint:
    """What an engine takes. Raises what a worker or a router would raise for these settings."""
    from cluster.gateway.server import check_gateway
    from cluster.text.tokenizer import Tokenizer
    from workers.footprint import footprint

    with configured.naming_sources():
        found = footprint(settings.worker, settings.policies.host_blocks)
        check_gateway(settings.gateway, Tokenizer.from_folder(settings.worker.model))
    return found


def refuse_impossible(settings: ServeSettings, footprint: Footprint) -> None:
    """Raise ConfigError for what this machine has no room for."""
    findings = capacity_findings(settings, footprint, this_machine())
    problems = [f"{f.message}; {f.advice}" for f in findings if f.level is Level.PROBLEM]
    if problems:
        raise ConfigError("\n  ".join(problems))


def this_machine() -> Machine:
    import torch

    from workers.memory import free_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(free_memory(torch.device("cpu")), preflight.free_shared_memory(), cores or 1)


def _address(configured: Configured) -> Iterator[Finding]:
    try:
        with configured.naming_sources():
            address = gateway_config(configured).address
            host, _, port = address.rpartition(":")
            preflight.check_port(host, int(port))
    except ConfigError as error:
        yield problem("front door", str(error))
        return
    yield ok("front door", f"{address} is free")
    open_to_all = configured["front_door.api_keys_file"] is None
    if open_to_all and not preflight.is_loopback(host):
        yield warning(
            "front door", f"{address} admits everybody who reaches it", "set api_keys_file"
        )


def _folder(configured: Configured) -> tuple[Path | None, list[Finding]]:
    """Nothing is fetched for a check."""
    from workers import manifest
    from workers.cachedir import default_cache_dir
    from workers.sources import DEFAULT as EMBEDDED

    given: Path | str = configured["model.path"] or EMBEDDED.name
    if isinstance(given, Path):
        return given.resolve(), []
    folder = default_cache_dir() / "models" / given
    if manifest.objection(folder) is None:
        return folder, []
    message = f"{given} is not here yet, and therefore not judged"
    return None, [warning("model", message, f"run `headway pull {given}`")]


def _told(setting: Setting) -> dict[str, Any]:
    option, value = setting.option, setting.value
    if option.secret and value is not None:
        value = HIDDEN
    return {
        "value": str(value) if isinstance(value, Path) else value,
        "source": setting.source,
        "what": option.help,
        "unset": option.unset if value is None and setting.source == DEFAULT else "",
    }


def _footprint(footprint: Footprint | None) -> dict[str, Any] | None:
    if footprint is None:
        return None
    names = (
        *("device", "dtype", "ranks", "weight_bytes", "block_bytes", "block_size", "num_blocks"),
        *("kv_bytes", "kv_tokens", "rank_bytes", "max_model_len", "longest_sequence", "free_bytes"),
    )
    return {name: getattr(footprint, name) for name in names}
