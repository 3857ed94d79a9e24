"""Every change of a sequence's state stands in this one table.

The diagram in ARCHITECTURE.md is generated from it (`python -m cluster.core.lifecycle`).
"""

from __future__ import annotations

from enum import Enum

from cluster.core.errors import IllegalTransition


class State(Enum):
    WAITING = "waiting"
    """In the queue, nothing computed yet. Holds no blocks."""
    RUNNING = "running"
    """May be planned in any step. Holds blocks."""
    PREEMPTED = "preempted"
    """Its blocks were taken; waits, ahead of newcomers, to be replayed. Holds no blocks."""
    PAUSED = "paused"
    """Its reader is slow: out of every queue until resumed. Holds no blocks."""
    PADDING = "padding"
    """Over for its reader, but its row stays in the batch until the batch ends. Holds blocks."""
    FINISHED = "finished"
    """Over, for whatever reason. Holds no blocks."""


class Event(Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    PAUSE = "pause"
    RESUME = "resume"
    FINISH = "finish"
    KEEP_ROW = "keep row"
    LEAVE_BATCH = "leave batch"
    ABORT = "abort"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.WAITING, Event.PAUSE): State.PAUSED,
    (State.WAITING, Event.ABORT): State.FINISHED,
    (State.RUNNING, Event.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.KEEP_ROW): State.PADDING,
    (State.RUNNING, Event.ABORT): State.FINISHED,
    (State.PADDING, Event.LEAVE_BATCH): State.FINISHED,
    (State.PREEMPTED, Event.ADMIT): State.RUNNING,
    (State.PREEMPTED, Event.PAUSE): State.PAUSED,
    (State.PREEMPTED, Event.ABORT): State.FINISHED,
    (State.PAUSED, Event.RESUME): State.PREEMPTED,
    (State.PAUSED, Event.ABORT): State.FINISHED,
}


def advance(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransition, which is always a bug of ours."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a {state.value} sequence cannot {event.value}") from None


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> waiting"]
    lines += [
        f"    {source.value} --> {target.value}: {event.value}"
        for (source, event), target in TRANSITIONS.items()
    ]
    lines.append("    finished --> [*]")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
