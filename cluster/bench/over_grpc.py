"""`headway serve` under the workload of peers/closed_loop.py, over gRPC.

usage: python -m cluster.bench.over_grpc MODEL_FOLDER DTYPE BUDGET THREADS
"""

from __future__ import annotations

import queue
import sys
import threading

from cluster.bench.peers.closed_loop import AT_A_TIME, OUTPUT, measure, report
from cluster.bench.served import Served
from headway.client import Client, Delta, Sampling


class OverGrpc:
    """One thread per stream under way; what they receive comes out of one queue."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._news: queue.SimpleQueue[tuple[int, int, bool]] = queue.SimpleQueue()

    def submit(self, number: int, prompt: list[int]) -> None:
        threading.Thread(target=self._receive, args=(number, prompt), daemon=True).start()

    def step(self) -> list[tuple[int, int, bool]]:
        return [self._news.get()]

    def _receive(self, number: int, prompt: list[int]) -> None:
        sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        for event in self._client.generate(prompt, sampling):
            if isinstance(event, Delta):
                self._news.put((number, len(event.token_ids), False))
        self._news.put((number, 0, True))


def main() -> None:
    model, dtype, budget, threads = sys.argv[1:]
    options = ["--model", model, "--dtype", dtype, "--threads", threads, "--device", "cpu"]
    options += ["--max-num-batched-tokens", budget, "--max-num-seqs", str(AT_A_TIME)]
    with Served(options) as served, Client(served.address) as client:
        load = OverGrpc(client)
        left = 4
        for number in range(left):
            load.submit(1000 + number, list(range(1000, 1128)))
        while left:
            left -= sum(finished for _, _, finished in load.step())
        found = measure(load.submit, load.step)
    # The server's processes did the work: nobody knows their time here.
    report({**found, "tokens_per_cpu_s": 0.0})


if __name__ == "__main__":
    main()
