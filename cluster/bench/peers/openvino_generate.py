"""OpenVINO GenAI's continuous batching under the workload of closed_loop.py.

usage: PYTHON_WITH_OPENVINO_GENAI openvino_generate.py EXPORTED_MODEL DTYPE BUDGET THREADS

Written against openvino-genai 2026.4. The model is exported once, in an environment of its own:
optimum-cli export openvino -m FOLDER --task text-generation-with-past --weight-format fp32 OUT
"""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai
from closed_loop import AT_A_TIME, OUTPUT, measure, report

PRECISION = {"bfloat16": "bf16", "float32": "f32"}


def main() -> None:
    model, dtype, budget, threads = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = int(budget)
    scheduler.max_num_seqs = AT_A_TIME
    scheduler.cache_size = 1
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": PRECISION[dtype],
        "KV_CACHE_PRECISION": PRECISION[dtype],
        "INFERENCE_NUM_THREADS": int(threads),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_HYPER_THREADING": False,
    }
    pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    handles: dict[int, object] = {}

    def submit(number: int, prompt: list[int]) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = OUTPUT, True, False
        tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles[number] = pipe.add_request(submit.base + number, tokens, config)

    def step() -> list[tuple[int, int, bool]]:
        pipe.step()
        found = []
        for number, handle in list(handles.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            over = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if over:
                del handles[number]
            if count or over:
                found.append((number, count, over))
        return found

    submit.base = 1000
    for number in range(4):
        submit(number, list(range(1000, 1128)))
    while handles:
        step()
    submit.base = 2000
    report(measure(submit, step))


main()
