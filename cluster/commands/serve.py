"""`headway serve`: a model served on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import preflight
from cluster.commands.policy_options import add_policy_options, policy_choice
from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from cluster.gateway.config import DEFAULT_ADDRESS, GatewayConfig, TlsFiles
from cluster.progress import StageLines, Timeline

if TYPE_CHECKING:
    from cluster.fleet.dispatch import FleetSettings
    from cluster.local_cluster import LocalCluster
    from cluster.settings import ServeSettings


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Start Ray, one or more engines and a router; serve until Ctrl-C.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="Hugging Face folder (config.json, *.safetensors, tokenizer.json); "
        "without it the embedded SmolLM2-135M-Instruct, fetched once",
    )
    parser.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="front door"
    )
    parser.add_argument("--engines", type=int, default=1, help="engines behind the router")
    parser.set_defaults(run=run)
    parser.add_argument("--routers", type=int, default=1, help="routers; they share the address")
    _add_engine_options(parser)
    add_policy_options(parser)
    _add_fleet_options(parser)
    _add_gateway_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"]
    )
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    group.add_argument(
        "--attention-backend",
        default="auto",
        help="flash, triton, native or torch; auto takes the first that fits: flash, triton, torch "
        "on a GPU, native, torch on a CPU",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=None,
        help="token budget of a step (default: 256 on CPU, 2048 on GPU)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=None,
        help="sequences running at once (default: 32 on CPU, 256 on GPU)",
    )
    group.add_argument("--block-size", type=int, default=16, help="KV positions per block")
    group.add_argument(
        "--num-blocks", type=int, default=None, help="KV blocks; overrides the share"
    )
    group.add_argument(
        "--kv-memory-share",
        type=float,
        default=None,
        help="share of free memory for all KV caches (default: 0.1 on CPU, 0.85 on GPU)",
    )
    group.add_argument("--watermark", type=float, default=0.02, help="share of blocks kept free")
    group.add_argument("--max-model-len", type=int, default=None, help="default: the model's")
    group.add_argument(
        "--step-log",
        metavar="FOLDER",
        help="write every scheduling decision for `headway replay` (contains prompts as token ids)",
    )
    group.add_argument("--threads", type=int, default=1, help="CPU threads per rank")
    group.add_argument(
        "--cores",
        default="",
        metavar="auto|LIST",
        help="cores of a CPU engine: auto claims a free one per thread and leaves one for routers; "
        "a list like 2-5,7 is for one engine of one rank (default: any)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the model, each a process on the engine's node, with a GPU each",
    )
    group.add_argument(
        "--collectives",
        default="auto",
        choices=["auto", "shm", "gloo", "nccl", "local"],
        help="how ranks exchange; local: threads of one process",
    )
    group.add_argument(
        "--decode-graphs",
        default="auto",
        choices=["auto", "off"],
        help="run decode steps as CUDA graphs where the attention backend allows it",
    )


def _add_fleet_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("router")
    group.add_argument(
        "--placement",
        default="least-outstanding",
        metavar="NAME",
        help="least-outstanding, least-loaded, round-robin, power-of-two, prefix-affinity or "
        "session-affinity",
    )
    group.add_argument(
        "--max-moves",
        type=int,
        default=3,
        help="how often a request may move to another engine because blocks run out",
    )
    group.add_argument(
        "--max-queued", type=int, default=1024, help="waiting requests of a tenant per router"
    )
    group.add_argument(
        "--max-queued-tokens", type=int, default=1 << 20, help="their prompt tokens at most"
    )
    group.add_argument(
        "--queue-timeout", type=float, default=60.0, metavar="SECONDS", help="longest wait"
    )
    group.add_argument(
        "--ttft-objective",
        type=float,
        default=None,
        metavar="SECONDS",
        help="refuse at once what cannot begin within this time; requests may name their own",
    )


def _fleet_settings(args: argparse.Namespace) -> FleetSettings:
    from cluster.fleet.dispatch import FleetSettings
    from cluster.fleet.gate import GateSettings
    from cluster.fleet.relief import ReliefSettings

    gate = GateSettings(
        max_queued=args.max_queued,
        max_queued_tokens=args.max_queued_tokens,
        queue_timeout_s=args.queue_timeout,
        ttft_objective_s=args.ttft_objective,
    )
    return FleetSettings(gate, ReliefSettings(max_moves=args.max_moves))


def _add_gateway_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("front door")
    group.add_argument("--api-keys-file", type=Path, help="one key per line; default: open to all")
    group.add_argument("--tls-certificate", type=Path, help="PEM; with --tls-key")
    group.add_argument("--tls-key", type=Path, help="PEM")


def run(args: argparse.Namespace) -> int:
    # Late: Ray takes seconds to import, and `headway generate` must not pay for it.
    from cluster.local_cluster import LocalCluster

    say = Timeline(lambda line: print(line, flush=True))
    preflight.check_python()
    host, _, port = args.address.rpartition(":")
    gateway = _gateway(args)
    preflight.check_port(host, int(port))
    preflight.check_shared_memory()
    model = _model_folder(args.model, say)
    preflight.check_memory(sum(f.stat().st_size for f in model.glob("*.safetensors")))
    settings = _settings(args, model, gateway)
    settings = _checked(settings)
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


def _gateway(args: argparse.Namespace) -> GatewayConfig:
    if (args.tls_certificate is None) != (args.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key go together; one is missing")
    tls = TlsFiles(args.tls_certificate, args.tls_key) if args.tls_key is not None else None
    return GatewayConfig(
        address=args.address,
        # Routers of one node share the port; the kernel deals the connections out.
        reuse_port=args.routers > 1,
        tls=tls,
        api_keys_file=args.api_keys_file,
    )


def _model_folder(given: str | None, say: Any) -> Path:
    """The folder to serve."""
    if given is not None:
        folder = Path(given).expanduser().resolve()
    else:
        from workers.pull import default_cache_dir, pull_default

        folder = pull_default(default_cache_dir(), StageLines(say, "model: "))
    return folder


def _checked(settings: ServeSettings) -> ServeSettings:
    """What a worker or a router would refuse is refused before anything is started.

    On CPU the number of blocks is settled here; on a GPU each engine finds it out on its own.
    """
    from cluster.gateway.server import check_gateway
    from cluster.text.tokenizer import Tokenizer
    from workers.executors import check_config

    worker = check_config(settings.worker, settings.policies.host_blocks)
    check_gateway(settings.gateway, Tokenizer.from_folder(settings.worker.model))
    if settings.gpus_per_rank:
        return settings
    return dataclasses.replace(settings, worker=worker)


def _settings(args: argparse.Namespace, model: Path, gateway: GatewayConfig) -> ServeSettings:
    from cluster.settings import ServeSettings

    gpus = _gpus_per_rank(args.device)
    worker = WorkerConfig(
        model=str(model),
        dtype=args.dtype,
        device="cuda" if gpus else "cpu",
        attention_backend=args.attention_backend,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_memory_share=_kv_memory_share(args.kv_memory_share, gpus, args.engines),
        max_num_batched_tokens=_either(args.max_num_batched_tokens, 2048 if gpus else 256),
        max_num_seqs=_either(args.max_num_seqs, 256 if gpus else 32),
        max_model_len=args.max_model_len,
        threads=args.threads,
        cores=args.cores,
        tensor_parallel_size=args.tensor_parallel_size,
        collectives=args.collectives,
        decode_graphs=args.decode_graphs,
    )
    return ServeSettings(
        worker=worker,
        gateway=gateway,
        secret=secrets.token_hex(32),
        engines=args.engines,
        gpus_per_rank=gpus,
        hop_host="127.0.0.1",
        policies=policy_choice(args),
        step_log_folder=args.step_log,
        watermark=args.watermark,
        routers=args.routers,
        placement=args.placement,
        fleet=_fleet_settings(args),
    )


def _gpus_per_rank(device: str) -> int:
    """1 where the engine is to run on a GPU."""
    if device == "cpu":
        return 0
    import torch

    if torch.cuda.is_available():
        return 1
    if device == "cuda":
        raise ConfigError("--device cuda: torch sees no GPU; check the driver or use --device cpu")
    return 0


def _kv_memory_share(given: float | None, gpus: int, engines: int) -> float:
    """Per engine: engines on CPU share the machine's memory, engines on GPUs have one each."""
    if gpus:
        return 0.85 if given is None else given
    return (0.1 if given is None else given) / max(engines, 1)


def _either(given: int | None, default: int) -> int:
    return default if given is None else given


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
