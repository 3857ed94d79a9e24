"""Which engines have gone and which have come, for a person who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class RollCall:
    """Told now and then which engines there are, it says what has changed; nothing at first."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._present: set[str] | None = None

    def __call__(self, engine_ids: Iterable[str]) -> None:
        present = set(engine_ids)
        known = self._present if self._present is not None else present
        self._present = present
        for name in sorted(known - present):
            if present:
                self._say(
                    f"{name} is gone; {_engines(len(present))} left to go on with its streams"
                )
            else:
                self._say(f"{name} is gone; its streams wait for the next engine")
        for name in sorted(present - known):
            self._say(f"{name} is up; {_engines(len(present))} now")


def _engines(count: int) -> str:
    return f"{count} engine{'s' if count != 1 else ''}"
