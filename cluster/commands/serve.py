"""`headway serve`: a model served on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import preflight
from cluster.config.flags import add_config_flags, flags_of
from cluster.config.load import Configured, load_settings
from cluster.config.mapping import gateway_config
from cluster.gateway.config import DEFAULT_ADDRESS
from cluster.progress import StageLines, Timeline

if TYPE_CHECKING:
    from cluster.local_cluster import LocalCluster
    from cluster.settings import ServeSettings

LOOPBACK = "127.0.0.1"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Start Ray, one or more engines and a router; serve until Ctrl-C.",
    )
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    say = Timeline(lambda line: print(line, flush=True))
    preflight.check_python()
    configured = load_settings(args.config, flags_of(args), os.environ)
    with configured.naming_sources():
        address = gateway_config(configured).address
        host, _, port = address.rpartition(":")
        preflight.check_port(host, int(port))
    preflight.check_shared_memory()
    model = model_folder(configured, say)
    preflight.check_memory(sum(f.stat().st_size for f in model.glob("*.safetensors")))
    settings = checked(configured, local_settings(configured, model))
    # Late: Ray takes seconds to import, and what is wrong is said without it.
    from cluster.local_cluster import LocalCluster

    stop = StopSignal()
    stop.listen()
    with LocalCluster(settings, say) as cluster:
        # Once more: ray.init() has put its own handler of SIGTERM in place, which aborts.
        stop.listen()
        cluster.deploy()
        _say_ready(say, cluster)
        with contextlib.suppress(KeyboardInterrupt):
            cluster.wait(stop.event)
    return 0


def model_folder(configured: Configured, say: Any) -> Path:
    """The folder to serve; a model that `headway pull` knows is fetched, with what happens said.

    Raises ConfigError for one whose terms nobody has accepted, PullError.
    """
    from cluster.modelfolder import local_folder
    from workers.sources import DEFAULT

    given: Path | str = configured["model.path"] or DEFAULT.name
    return local_folder(str(given), StageLines(say, "model: ")).resolve()


def local_settings(configured: Configured, model: Path) -> ServeSettings:
    """Raises ConfigError for what does not go together."""
    settings = configured.settings(model)
    # All on this machine: nobody else needs to reach the engines.
    return dataclasses.replace(settings, hop_host=settings.hop_host or LOOPBACK)


def checked(configured: Configured, settings: ServeSettings) -> ServeSettings:
    """What a worker or a router would refuse, or this machine has no room for, is refused before
    anything is started.

    On CPU the number of blocks is settled here; on a GPU each engine finds it out on its own.
    """
    from cluster.config.check import checked_footprint, refuse_impossible

    footprint = checked_footprint(configured, settings)
    with configured.naming_sources():
        refuse_impossible(settings, footprint)
    if settings.gpus_per_rank:
        return settings
    worker = dataclasses.replace(settings.worker, num_blocks=footprint.num_blocks)
    return dataclasses.replace(settings, worker=worker)


def _say_ready(say: Any, cluster: LocalCluster) -> None:
    address = cluster.address
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    command = _command_name()
    say(f"ready: {cluster.model_name} on {address} (gRPC); logs in {cluster.log_folder}")
    print(
        "\nIn another terminal:\n"
        f'    {command} generate{where} "Why is the sky blue?"\n'
        f"    {command} status{where}\n"
        "Ctrl-C stops everything.\n",
        flush=True,
    )


def _command_name() -> str:
    """How this program can be called from the same folder: `headway`, or its path."""
    program = Path(sys.argv[0])
    if program.name != "headway" or shutil.which("headway") is not None:
        return "headway"
    try:
        return str(program.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(program)


class StopSignal:
    """SIGINT and SIGTERM end the application in order; a second one ends the process at once."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def listen(self) -> None:
        """Take over both signals, from whoever has them."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.event.is_set():
            os._exit(128 + number)
        self.event.set()
        raise KeyboardInterrupt
