"""vLLM's scheduler alone, without a model: microseconds of thread CPU time per step, as JSON lines.

usage: PYTHON_WITH_VLLM vllm_scheduler.py MODEL_FOLDER STEPS     (only the folder's config is read)

Written against vLLM 0.32. The cases are those of cluster/bench/scheduler.py with the same names.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, BLOCKS, BUDGET = 16, 20_000, 2048
CASES = (("32 running + 128 waiting", 32, 128), ("256 running + 1,024 waiting", 256, 1024))


def make_scheduler(folder, max_num_seqs):
    model = ModelConfig(model=folder, dtype="bfloat16", seed=0, max_model_len=8192)
    scheduling = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=BUDGET,
        max_model_len=8192,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(
        block_size=BLOCK,
        gpu_memory_utilization=0.9,
        cache_dtype="auto",
        enable_prefix_caching=False,
    )
    config = VllmConfig(scheduler_config=scheduling, model_config=model, cache_config=cache)
    cache.num_gpu_blocks = BLOCKS
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.bfloat16
    )
    kv = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def make_request(number):
    sampling = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0)
    sampling.update_from_generation_config({}, 2)
    ids = [(number * 7 + i) % 30_000 for i in range(128)]
    return Request(
        request_id=str(number), prompt_token_ids=ids, sampling_params=sampling, pooling_params=None
    )


def step(scheduler):
    """(schedule, update) in microseconds."""
    begun = time.thread_time_ns()
    output = scheduler.schedule()
    scheduled = time.thread_time_ns() - begun
    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[i] for i in ids]
    tokens = [[5] if r.num_computed_tokens >= r.num_prompt_tokens else [] for r in requests]
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={i: at for at, i in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    begun = time.thread_time_ns()
    scheduler.update_from_output(output, result)
    return scheduled / 1e3, (time.thread_time_ns() - begun) / 1e3


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    for name, running, waiting in CASES:
        scheduler = make_scheduler(folder, running)
        for number in range(running + waiting):
            scheduler.add_request(make_request(number))
        while len(scheduler.running) < running or any(
            r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running
        ):
            step(scheduler)
        times = sorted(sum(step(scheduler)) for _ in range(steps))
        print(json.dumps({"case": name, "step_p50_us": times[len(times) // 2]}), flush=True)


if __name__ == "__main__":
    main()
