"""The ranks of a tensor-parallel group as Ray actors, beside the engine that leads them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import ray

ServeRank = Callable[[str, int], int]
"""(the leader's socket, the rank's number) -> exit status; returns when the leader has gone."""


class Rank:
    """Runs one rank until its leader hangs up; then the actor ends itself."""

    def serve(self, serve: ServeRank, path: str, number: int) -> None:
        status = serve(path, number)
        # Not exit_actor(): a rank that failed must not look like one that has done its work.
        os._exit(status)


class RankActor:
    """A started rank."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._actor)


class RankActors:
    """Starts ranks within the placement group of the Serve replica that calls it: all bundles of
    the group are on one node."""

    def __init__(self, serve: ServeRank, gpus_per_rank: int) -> None:
        self._serve = serve
        self._gpus_per_rank = gpus_per_rank

    def __call__(self, path: str, number: int) -> RankActor:
        """Returns at once; a rank that finds no place never comes to the leader's socket."""
        options = {"num_cpus": 0, "num_gpus": self._gpus_per_rank, "max_restarts": 0}
        actor = ray.remote(Rank).options(**options).remote()
        actor.serve.remote(self._serve, path, number)  # type: ignore[attr-defined]
        return RankActor(actor)
