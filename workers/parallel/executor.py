"""Executors of a tensor-parallel group: one process per rank, or one thread per rank."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cluster.core.config import WorkerConfig
from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan, StepResult
from workers.executor import log_memory, model_info, no_progress, settle
from workers.parallel.carriers import Group, choose_carrier, prepare_meeting
from workers.parallel.collectives import GroupBroken, Shard
from workers.parallel.crew import Crew, RankLauncher
from workers.parallel.frames import Setup
from workers.parallel.threads import ThreadGroup, thread_groups
from workers.resolved import resolve
from workers.shard import ModelShard, Progress, load_shard

_Result = TypeVar("_Result")


class FinishedStep:
    """A step that ran when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class GroupExecutor:
    """Rank 0 in the calling thread, the others in processes of their own. Not thread-safe, but
    for `problem`."""

    def __init__(
        self,
        config: WorkerConfig,
        launch: RankLauncher,
        progress: Progress | None = None,
        host_blocks: int = 0,
    ) -> None:
        """Start the ranks and load their shards, all at the same time.

        Raises ModelError for a folder that cannot be served, ConfigError for a configuration
        that does not fit the model or the machine, GroupBroken when a rank dies meanwhile.
        """
        place = Shard(0, config.tensor_parallel_size)
        chosen = resolve(config, host_blocks, place)
        config = settle(config, chosen)
        carrier = choose_carrier(config.collectives, chosen.device)
        meeting = prepare_meeting(carrier, place.size)
        self._group: Group | None = None
        self._shard: ModelShard | None = None
        setup = Setup(config, host_blocks, place.size, carrier, meeting.port)
        self._crew = Crew(setup, meeting.memory, launch, self._give_up)
        try:
            self._group = meeting.join()
            shard = load_shard(config, chosen, self._group, progress or no_progress, host_blocks)
            weight_bytes = shard.weight_bytes + self._crew.await_ready()
        except BaseException:
            self.close()
            # What a rank says is closer to the cause than what its silence led to here.
            self._crew.check()
            raise
        finally:
            meeting.close()
        self._shard = shard
        self._info = model_info(chosen, shard.num_blocks, weight_bytes)
        log_memory(self._info)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pipeline_depth(self) -> int:
        return 1

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Run the step on all ranks. Raises GroupBroken when one of them is lost, RuntimeError
        for a malformed plan and after `close`."""
        if self._shard is None:
            raise RuntimeError(f"plan {plan.step}: the executor is closed")
        self._crew.run(plan)
        try:
            return FinishedStep(self._shard.run(plan))
        except GroupBroken:
            self._crew.check()
            raise

    def problem(self) -> str | None:
        """Why no further step can run; None when all ranks are well."""
        return self._crew.problem()

    def close(self) -> None:
        """End the ranks, free the model and the cache. Idempotent."""
        self._crew.close()
        self._shard = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def _give_up(self) -> None:
        if self._group is not None:
            self._group.give_up()


class ThreadedExecutor:
    """All ranks as threads of this process: the sharding and the sums of a group at the price of
    nothing but memory. For tests. Not thread-safe."""

    def __init__(
        self, config: WorkerConfig, progress: Progress | None = None, host_blocks: int = 0
    ) -> None:
        """Raises what GroupExecutor raises."""
        size = config.tensor_parallel_size
        chosen = resolve(config, host_blocks, Shard(0, size))
        config = settle(config, chosen)
        groups = thread_groups(size)
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="rank")
        report = progress or no_progress

        def load(group: ThreadGroup) -> ModelShard:
            mine = chosen if group.shard.rank == 0 else resolve(config, host_blocks, group.shard)
            told = report if group.shard.rank == 0 else no_progress
            try:
                return load_shard(config, mine, group, told, host_blocks)
            except BaseException:
                group.give_up()
                raise

        self._groups = groups
        self._shards = _results([self._pool.submit(load, group) for group in groups])
        weight_bytes = sum(shard.weight_bytes for shard in self._shards)
        self._info = model_info(chosen, self._shards[0].num_blocks, weight_bytes)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pipeline_depth(self) -> int:
        return 1

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Run the step on all ranks. Raises what `LocalExecutor.submit` raises."""
        if not self._shards:
            raise RuntimeError(f"plan {plan.step}: the executor is closed")

        def run(group: ThreadGroup, shard: ModelShard) -> StepResult:
            try:
                return shard.run(plan)
            except BaseException:
                group.give_up()
                raise

        pairs = zip(self._groups, self._shards, strict=True)
        return FinishedStep(_results([self._pool.submit(run, *pair) for pair in pairs])[0])

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        self._shards = []
        self._pool.shutdown()


def _results(futures: list[Future[_Result]]) -> list[_Result]:
    """All results; of several errors, one that is a cause and not a consequence."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, GroupBroken)), errors[0])
    return [future.result() for future in futures]
