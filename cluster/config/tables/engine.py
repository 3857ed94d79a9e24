"""One engine: what it runs on, what it holds, and what it computes next."""

from __future__ import annotations

from functools import partial

from cluster.config.option import INTEGER, NUMBER, PATH, TEXT, Limits, Option, at_least
from cluster.core.config import DECODE_GRAPHS, MAX_RANKS
from cluster.core.policies import (
    BATCHING,
    BUDGETS,
    PREEMPTIONS,
    PREFIX_CACHE,
    QUEUES,
    RESERVATIONS,
    VICTIMS,
    PolicyChoice,
)

_POLICIES = PolicyChoice()

_engine = partial(Option, "engine")
_scheduling = partial(Option, "scheduling")

ENGINE = (
    _engine(
        "device",
        TEXT,
        "auto",
        "auto takes a GPU where torch sees one",
        choices=("auto", "cpu", "cuda"),
    ),
    _engine(
        "attention_backend",
        TEXT,
        "auto",
        "flash, triton, native or torch; auto takes the first that fits: flash, triton, torch "
        "on a GPU, native, torch on a CPU",
        unit="NAME",
    ),
    _engine(
        "max_num_batched_tokens",
        INTEGER,
        None,
        "token budget of a step: smaller means shorter gaps between tokens, larger faster prompts",
        limits=at_least(1),
        unit="N",
        unset="256 on CPU, 2048 on GPU",
        example=512,
    ),
    _engine(
        "max_num_seqs",
        INTEGER,
        None,
        "sequences running at once",
        limits=at_least(1),
        unit="N",
        unset="32 on CPU, 256 on GPU",
        example=64,
    ),
    _engine(
        "block_size",
        INTEGER,
        16,
        "KV positions per block",
        limits=at_least(1),
        unit="N",
    ),
    _engine(
        "num_blocks",
        INTEGER,
        None,
        "KV blocks of one engine; overrides the share",
        limits=at_least(1),
        unit="N",
        unset="what kv_memory_share holds",
        example=4096,
    ),
    _engine(
        "kv_memory_share",
        NUMBER,
        None,
        "share of free memory for all KV caches of a node",
        limits=Limits(0.0, 0.95, low_open=True),
        unit="SHARE",
        unset="0.1 on CPU, 0.85 on GPU",
        example=0.5,
    ),
    _engine(
        "watermark",
        NUMBER,
        0.02,
        "share of the blocks kept free when a sequence comes in: more of it, fewer preemptions",
        limits=Limits(0.0, 1.0, high_open=True),
        unit="SHARE",
    ),
    _engine(
        "step_log",
        PATH,
        None,
        "write every scheduling decision for `headway replay` (contains prompts as token ids)",
        unit="FOLDER",
        unset="not written",
        example="/var/lib/headway/steps",
    ),
    _engine("threads", INTEGER, 1, "CPU threads per rank", limits=at_least(1), unit="N"),
    _engine(
        "cores",
        TEXT,
        None,
        "cores of a CPU engine: auto claims a free one per thread and leaves one for routers; "
        "a list like 2-5,7 is for one engine of one rank",
        unit="auto|LIST",
        unset="any",
        example="2-5,7",
    ),
    _engine(
        "tensor_parallel_size",
        INTEGER,
        1,
        "ranks that share the model, each a process on the engine's node, with a GPU each",
        limits=Limits(1, MAX_RANKS),
        unit="N",
    ),
    _engine(
        "collectives",
        TEXT,
        "auto",
        "how ranks exchange; local: threads of one process",
        choices=("auto", "shm", "gloo", "nccl", "local"),
    ),
    _engine(
        "decode_graphs",
        TEXT,
        "auto",
        "run decode steps as CUDA graphs where the attention backend allows it",
        choices=DECODE_GRAPHS,
    ),
)

SCHEDULING = (
    _scheduling(
        "policy",
        TEXT,
        _POLICIES.batching,
        "how steps are composed",
        choices=BATCHING,
    ),
    _scheduling("queue", TEXT, _POLICIES.queue, "who is next", choices=QUEUES),
    _scheduling(
        "reservation",
        TEXT,
        _POLICIES.reservation,
        "blocks that a sequence takes when it comes in",
        choices=RESERVATIONS,
    ),
    _scheduling(
        "victims",
        TEXT,
        _POLICIES.victims,
        "who gives way for blocks",
        choices=VICTIMS,
    ),
    _scheduling(
        "preemption",
        TEXT,
        _POLICIES.preemption,
        "what becomes of a victim's KV",
        choices=PREEMPTIONS,
    ),
    _scheduling(
        "host_blocks",
        INTEGER,
        0,
        "blocks of host memory for preemption by swap",
        limits=at_least(0),
        unit="N",
    ),
    _scheduling(
        "prefix_cache",
        TEXT,
        _POLICIES.prefix_cache,
        "share the KV blocks of prompts that begin alike",
        choices=PREFIX_CACHE,
    ),
    _scheduling(
        "budget",
        TEXT,
        _POLICIES.budget,
        "fixed: max_num_batched_tokens; itl: as many as itl_objective allows",
        choices=BUDGETS,
    ),
    _scheduling(
        "itl_objective",
        NUMBER,
        _POLICIES.itl_objective_s * 1e3,
        "P99 of the gap between two tokens that the itl budget holds",
        limits=at_least(0.1),
        unit="MS",
    ),
    _scheduling(
        "max_queue_delay",
        NUMBER,
        None,
        "how long a request-level batch waits to fill",
        limits=at_least(0),
        unit="MS",
        unset="dynamic 50, static 1000",
        example=50.0,
    ),
    _scheduling(
        "aging",
        NUMBER,
        _POLICIES.aging_s,
        "seconds of waiting that count as one level of priority",
        limits=at_least(0.001),
        unit="SECONDS",
    ),
    _scheduling(
        "fair_quantum",
        INTEGER,
        _POLICIES.fair_quantum,
        "tokens per tenant and turn of the fair queue",
        limits=at_least(1),
        unit="N",
    ),
)
