"""The executor for a configuration."""

from __future__ import annotations

from cluster.core.config import WorkerConfig
from workers.cores import check_cores
from workers.executor import LocalExecutor, settle
from workers.parallel.carriers import choose_carrier
from workers.parallel.collectives import Shard
from workers.parallel.crew import RankLauncher
from workers.parallel.executor import GroupExecutor, ThreadedExecutor
from workers.parallel.launch import launch_process
from workers.resolved import resolve
from workers.shard import Progress


def make_executor(
    config: WorkerConfig,
    progress: Progress | None = None,
    host_blocks: int = 0,
    launch: RankLauncher = launch_process,
) -> LocalExecutor | GroupExecutor | ThreadedExecutor:
    """Loads the model. launch: starts the ranks of a group.

    Raises ModelError for a folder that cannot be served, ConfigError for a configuration
    that does not fit the model or the machine.
    """
    if config.tensor_parallel_size == 1:
        return LocalExecutor(config, progress, host_blocks)
    if config.collectives == "local":
        return ThreadedExecutor(config, progress, host_blocks)
    return GroupExecutor(config, launch, progress, host_blocks)


def check_config(config: WorkerConfig, host_blocks: int = 0) -> WorkerConfig:
    """Raise what `make_executor` would raise, without loading any weight.

    Returns the configuration with the number of blocks settled, so that an engine that is started
    again later has as many as before, however much memory is free then.
    """
    check_cores(config.cores, config.threads)
    chosen = resolve(config, host_blocks, Shard(0, config.tensor_parallel_size))
    chosen.checkpoint.close()
    choose_carrier(config.collectives, chosen.device)
    return settle(config, chosen)
