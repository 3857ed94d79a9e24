"""Hands every option on to the object that it configures. One place per object."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from cluster.core.policies import PolicyChoice
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.fleet.relief import ReliefSettings
from cluster.fleet.scaling import ScalingSettings
from cluster.gateway.config import GatewayConfig, Limits, TlsFiles
from cluster.observing import ObserveSettings
from cluster.settings import ServeSettings

if TYPE_CHECKING:
    from cluster.config.load import Configured

DYNAMIC_DELAY_MS = 50.0
STATIC_WAIT_MS = 1000.0
"""A server's arrivals may dry up: then a static batch starts as it is."""
MIN_SECRET_CHARS = 16
DEFAULT_CPU_SHARE = 0.1
"""Of a machine's free memory, for KV caches."""


def serve_settings(values: Configured, model_folder: Path, gpus: int) -> ServeSettings:
    """gpus: per rank, 0 on a CPU. Raises ConfigError."""
    step_log: Path | None = values["engine.step_log"]
    return ServeSettings(
        worker=worker_config(values, model_folder, gpus),
        gateway=gateway_config(values),
        secret=hop_secret(values),
        engines=values["fleet.engines"],
        routers=values["fleet.routers"],
        gpus_per_rank=gpus,
        hop_host=values["fleet.hop_host"],
        hop_port=values["fleet.hop_port"],
        policies=policy_choice(values),
        step_log_folder=None if step_log is None else str(step_log),
        watermark=values["engine.watermark"],
        placement=values["router.placement"],
        fleet=fleet_settings(values),
        scaling=scaling_settings(values),
        engine_drain_s=values["rollout.engine_drain"],
        router_drain_s=values["rollout.router_drain"],
        routers_per_node=values["fleet.routers_per_node"],
        observe=ObserveSettings(
            router_port=values["observability.metrics_port"],
            engine_port=values["observability.engine_metrics_port"],
            log_format=values["observability.log_format"],
            log_level=values["observability.log_level"],
        ),
    )


def worker_config(values: Configured, model_folder: Path, gpus: int) -> WorkerConfig:
    def either(name: str, on_cpu: int, on_gpu: int) -> int:
        given: int | None = values[name]
        default = on_gpu if gpus else on_cpu
        return default if given is None else given

    return WorkerConfig(
        model=str(model_folder),
        dtype=values["model.dtype"],
        device="cuda" if gpus else "cpu",
        attention_backend=values["engine.attention_backend"],
        block_size=values["engine.block_size"],
        num_blocks=values["engine.num_blocks"],
        kv_memory_share=kv_memory_share(values, gpus),
        max_num_batched_tokens=either("engine.max_num_batched_tokens", 256, 2048),
        max_num_seqs=either("engine.max_num_seqs", 32, 256),
        max_model_len=values["model.max_model_len"],
        threads=values["engine.threads"],
        cores=values["engine.cores"] or "",
        tensor_parallel_size=values["engine.tensor_parallel_size"],
        collectives=values["engine.collectives"],
        decode_graphs=values["engine.decode_graphs"],
    )


def kv_memory_share(values: Configured, gpus: int) -> float:
    """Per engine: engines on CPU share the machine's memory, engines on GPUs have one each."""
    given: float | None = values["engine.kv_memory_share"]
    if gpus:
        return 0.85 if given is None else given
    engines: int = values["fleet.engines"]
    return (DEFAULT_CPU_SHARE if given is None else given) / engines


def gateway_config(values: Configured) -> GatewayConfig:
    certificate, key = values["front_door.tls_certificate"], values["front_door.tls_key"]
    if (certificate is None) != (key is None):
        raise ConfigError("tls_certificate and tls_key go together; one is missing")
    return GatewayConfig(
        address=values["front_door.address"],
        # Routers of one node share the port; the kernel deals the connections out.
        reuse_port=values["fleet.routers"] > 1,
        tls=TlsFiles(certificate, key) if key is not None else None,
        api_keys_file=values["front_door.api_keys_file"],
        limits=Limits(
            max_message_bytes=values["front_door.max_message_bytes"],
            max_in_flight=values["front_door.max_in_flight"],
            tokenizer_threads=values["front_door.tokenizer_threads"],
        ),
    )


def policy_choice(values: Configured) -> PolicyChoice:
    """Raises nothing: PolicyChoice.build() refuses what does not go together."""
    delay_ms: float | None = values["scheduling.max_queue_delay"]
    return PolicyChoice(
        batching=values["scheduling.policy"],
        queue=values["scheduling.queue"],
        reservation=values["scheduling.reservation"],
        victims=values["scheduling.victims"],
        preemption=values["scheduling.preemption"],
        prefix_cache=values["scheduling.prefix_cache"],
        budget=values["scheduling.budget"],
        max_queue_delay_s=(DYNAMIC_DELAY_MS if delay_ms is None else delay_ms) / 1e3,
        max_batch_wait_s=(STATIC_WAIT_MS if delay_ms is None else delay_ms) / 1e3,
        aging_s=values["scheduling.aging"],
        fair_quantum=values["scheduling.fair_quantum"],
        host_blocks=values["scheduling.host_blocks"],
        itl_objective_s=values["scheduling.itl_objective"] / 1e3,
    )


def fleet_settings(values: Configured) -> FleetSettings:
    gate = GateSettings(
        max_queued=values["router.max_queued"],
        max_queued_tokens=values["router.max_queued_tokens"],
        queue_timeout_s=values["router.queue_timeout"],
        ttft_objective_s=values["router.ttft_objective"],
    )
    return FleetSettings(gate, ReliefSettings(max_moves=values["router.max_moves"]))


def scaling_settings(values: Configured) -> ScalingSettings | None:
    """None without autoscaling."""
    most: int | None = values["autoscaling.max_engines"]
    if most is None:
        return None
    return ScalingSettings(
        min_engines=values["autoscaling.min_engines"],
        max_engines=most,
        target_load=values["autoscaling.target_load"],
        ttft_objective_s=values["autoscaling.scale_ttft"],
        up_delay_s=values["autoscaling.up_delay"],
        down_delay_s=values["autoscaling.down_delay"],
        zero_delay_s=values["autoscaling.zero_delay"],
    )


def hop_secret(values: Configured) -> str:
    """What routers and engines know each other by. Raises ConfigError without repeating it."""
    secret: str | None = values["fleet.hop_secret"]
    path: Path | None = values["fleet.hop_secret_file"]
    if secret is None and path is None:
        return secrets.token_hex(32)
    if secret is not None and path is not None:
        raise ConfigError("hop_secret and hop_secret_file exclude each other; give one")
    if secret is None and path is not None:
        try:
            secret = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hop_secret_file {path}: {error}") from error
    if secret is None or len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"hop_secret must have at least {MIN_SECRET_CHARS} characters, "
            f"got {len(secret or '')}; `openssl rand -hex 32` makes one"
        )
    return secret


def gpus_per_rank(values: Configured) -> int:
    """1 where engines of this machine are to run on GPUs. Imports torch to find out."""
    device = values["engine.device"]
    if device == "cpu":
        return 0
    import torch

    if torch.cuda.is_available():
        return 1
    if device == "cuda":
        message = "device cuda: torch sees no GPU; check the driver or use --device cpu"
        raise ConfigError(values.with_sources(message))
    return 0
