"""A group on torch.distributed: NCCL between GPUs, gloo where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import distributed

from workers.parallel.collectives import GroupBroken, Shard, sum_in_rank_order

_TCPStore = distributed.TCPStore  # type: ignore[attr-defined]  # its hints do not name it
Store: TypeAlias = Any
LOOPBACK = "127.0.0.1"
_TIMEOUT_S = {"gloo": 4.0, "nccl": 60.0}
"""NCCL's covers the kernels queued before the collective. A rank that dies is noticed sooner, by
its connection to the leader."""


def create_store(size: int) -> Store:
    """Where ranks find each other; its `port` is what the others need. Rank 0 keeps it."""
    return _TCPStore(LOOPBACK, 0, size, is_master=True, wait_for_workers=False)


class TorchGroup:
    """One rank's view of the process's default group."""

    def __init__(self, shard: Shard, backend: str, store: Store) -> None:
        """backend: "nccl" or "gloo". Returns when all ranks have come."""
        self.shard = shard
        self._backend = backend
        self._in_use: list[torch.Tensor] = []
        distributed.init_process_group(
            backend,
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=_TIMEOUT_S[backend]),
        )

    @classmethod
    def join(cls, shard: Shard, backend: str, port: int) -> TorchGroup:
        """For ranks other than 0. port: of rank 0's store."""
        store = _TCPStore(LOOPBACK, port, shard.size, is_master=False)
        return cls(shard, backend, store)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        with self._losses():
            if self._backend == "nccl":
                distributed.all_reduce(x)
                return x
            parts = self._all(x)
        return x.copy_(sum_in_rank_order(parts))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        with self._losses():
            parts = self._all(x)
        return torch.cat(parts, dim=-1) if self.shard.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        plain = self._plain(x)
        self._in_use = [plain]
        with self._losses():
            distributed.broadcast(plain, src=0)
        return x if plain is x else x.copy_(plain)

    def give_up(self) -> None:
        """The others notice by their timeout, or by this process's end."""

    def close(self) -> None:
        """What the last collective worked on is kept until the end: gloo's threads let go of it a
        little later than we do, and whoever does so last needs the interpreter's lock, which torch
        2.4 holds while it waits for these threads."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self._in_use = []

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """torch tells of a lost or late rank by RuntimeErrors of many kinds."""
        try:
            yield
        except RuntimeError as error:
            raise GroupBroken(f"{self._backend}: {error}") from error

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        plain = self._plain(x)
        with torch.inference_mode(False):
            parts = [torch.empty_like(plain) for _ in range(self.shard.size)]
        self._in_use = [plain, *parts]
        distributed.all_gather(parts, plain)
        return parts

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        """What the backend may write to. gloo works in threads of its own, which are not in
        inference mode whatever the caller is in; torch 2.4 lets none of them touch a tensor that
        was made there."""
        if self._backend != "gloo" or not x.is_inference():
            return x
        with torch.inference_mode(False):
            return x.clone()
