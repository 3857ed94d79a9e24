"""A rank other than the leader: loads its shard, runs the plans it is sent, dies with it."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from typing import Protocol

from cluster.core.errors import HeadwayError, WireError
from workers.parallel.carriers import join_group
from workers.parallel.collectives import GroupBroken, Shard
from workers.parallel.frames import (
    Beat,
    Channel,
    Failed,
    Hello,
    Loading,
    Ready,
    Run,
    Setup,
    ToRank,
)
from workers.resolved import resolve
from workers.shard import ModelShard, load_shard

logger = logging.getLogger(__name__)

BEAT_S = 0.5
_LAST_STEP_S = 2.0
"""When the leader is gone, a step under way gets so long to notice by itself."""


class _Revocable(Protocol):
    def give_up(self) -> None: ...


def serve_rank(path: str, rank: int) -> int:
    """Serve until the leader that listens at `path` hangs up. Returns the exit status.

    If the leader dies in the middle of a step that cannot be left, the process ends itself.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    channel: Channel[ToRank] = Channel(connection, ToRank)
    channel.send(Hello(rank, os.getpid()))
    done = threading.Event()
    threading.Thread(target=_beat, args=(channel, done), name="beat", daemon=True).start()
    try:
        shard, revocable = _load(channel, connection, rank)
        watch = (connection, revocable, done)
        threading.Thread(target=_die_with_leader, args=watch, name="watch", daemon=True).start()
        channel.send(Ready(shard.weight_bytes))
        _serve(channel, shard)
    except OSError:
        logger.info("rank %d: the leader is gone", rank)
        return 1
    except Exception as error:
        # With the leader gone there is nobody to tell, and nothing new in what broke.
        if not isinstance(error, GroupBroken):
            logger.exception("rank %d failed", rank)
        _tell(channel, error)
        return 1
    finally:
        done.set()
    return 0


def _load(
    channel: Channel[ToRank], connection: socket.socket, rank: int
) -> tuple[ModelShard, _Revocable]:
    setup = channel.receive()
    if not isinstance(setup, Setup):
        raise WireError(f"a setup was expected, got {setup!r}")
    place = Shard(rank, setup.size)
    group = join_group(setup, place, connection)
    chosen = resolve(setup.config, setup.host_blocks, place)

    def report(stage: str, share: float) -> None:
        channel.send(Loading(stage, share))

    return load_shard(setup.config, chosen, group, report, setup.host_blocks), group


def _serve(channel: Channel[ToRank], shard: ModelShard) -> None:
    while (message := channel.receive()) is not None:
        if not isinstance(message, Run):
            raise WireError(f"a plan was expected, got {message!r}")
        shard.run(message.plan)


def _tell(channel: Channel[ToRank], error: Exception) -> None:
    bad_setup = isinstance(error, HeadwayError) and not isinstance(error, WireError)
    reason = str(error) if isinstance(error, HeadwayError | GroupBroken) else repr(error)
    try:
        channel.send(Failed(reason, bad_setup))
    except (OSError, WireError):
        logger.info("the leader is gone, and was not told: %s", reason)


def _beat(channel: Channel[ToRank], done: threading.Event) -> None:
    while not done.is_set():
        try:
            channel.send(Beat())
        except OSError:
            return
        done.wait(BEAT_S)


def _die_with_leader(connection: socket.socket, group: _Revocable, done: threading.Event) -> None:
    """The death pipe. The main thread may be deep in a kernel or in a collective."""
    poller = select.poll()
    # No event is asked for: a hang-up is always told, what comes in is left to the main thread.
    poller.register(connection, getattr(select, "POLLRDHUP", 0))
    poller.poll()
    group.give_up()
    if not done.wait(_LAST_STEP_S):
        os._exit(1)
