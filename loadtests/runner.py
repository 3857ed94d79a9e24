"""A load without Locust: children on this machine, their results in one place."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from loadtests.collect import ChildEnd, Results
from loadtests.job import Child, ChildFailed, Job
from loadtests.records import Record

START_DELAY_S = 0.5

Progress = Callable[[Results], None]


def run_load(job: Job, children: int = 1, progress: Progress | None = None) -> Results:
    """Blocks until every request has ended. progress: called now and then, from this thread.

    Raises ChildFailed when the server cannot be used at all.
    """
    results = Results()
    with _children(job, children) as started:
        for child in started:
            results.expect_child(child.wait_ready())
        start = time.time() + START_DELAY_S
        for child in started:
            child.go(start)
        lock = threading.Lock()
        failures: list[ChildFailed] = []
        threads = [
            threading.Thread(target=_read, args=(child, results, lock, failures), daemon=True)
            for child in started
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.25) if threads[0].is_alive() else time.sleep(0.25)
            if progress is not None:
                with lock:
                    progress(results)
        if failures:
            raise failures[0]
    return results


@contextlib.contextmanager
def _children(job: Job, count: int) -> Iterator[list[Child]]:
    started: list[Child] = []
    try:
        for shard in range(count):
            started.append(Child(job, shard, count))
        yield started
    finally:
        for child in started:
            child.stop()


def _read(
    child: Child, results: Results, lock: threading.Lock, failures: list[ChildFailed]
) -> None:
    try:
        for event in child.events():
            with lock:
                if "record" in event:
                    results.add_record(Record.from_json(event["record"]))
                elif "end" in event:
                    results.add_child(ChildEnd.from_json(event["end"]))
    except ChildFailed as error:
        failures.append(error)
