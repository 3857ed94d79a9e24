"""The compiled library as typed calls. Structures and signatures mirror kernels.cpp."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import torch

from workers.native.build import BuildError, build, find_compiler
from workers.native.levels import Level, usable_levels

logger = logging.getLogger(__name__)

SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
DTYPES = frozenset(SUFFIX)


class StepView(ctypes.Structure):
    """Step of paging.cpp. table_stride: elements from row to row of the block table."""

    _fields_ = [  # ctypes reads it as it is
        ("block_table", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("seqused_k", c_void_p),
        ("table_stride", c_int32),
        ("num_seqs", c_int32),
        ("num_decodes", c_int32),
        ("threads", c_int32),
    ]


class HeadShape(ctypes.Structure):
    """Shape of paging.cpp."""

    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    # step, shape, window, query, query_stride, keys, values, out
    "attend": [
        POINTER(StepView),
        POINTER(HeadShape),
        c_int32,
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
    ],
    # shape, key, value, key_stride, value_stride, slots, tokens, keys, values
    "write_kv": [
        POINTER(HeadShape),
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int32,
        c_void_p,
        c_void_p,
    ],
    # shape, heads, cos, sin, slots, tokens, query, keys, values, threads
    "rotate_and_write": [
        POINTER(HeadShape),
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
    ],
    # logits, rows, vocab, peaks, ids, threads
    "largest": [c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int32],
    # logits, peaks, temperatures, keys, rows, vocab, ids, threads
    "race": [
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
        c_int32,
        c_void_p,
        c_int32,
    ],
    # logits, peaks, temperatures, top_k, top_p, min_p, keys, rows, vocab, ids, threads
    "draw_filtered": [*([c_void_p] * 7), c_int32, c_int32, c_void_p, c_int32],
    # in, out
    "can_linear": [c_int32, c_int32],
    # weight, in, out, packed
    "pack": [c_void_p, c_int32, c_int32, c_void_p],
    # packed, ids, count, in, out, y
    "packed_rows": [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p],
    # x, packed, bias, rows, in, out, threads, y
    "linear": [
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
        c_int32,
        c_int32,
        c_int32,
        c_void_p,
    ],
    # x, residual, weight, eps, rows, width, sum, out, threads
    "rms_norm": [
        c_void_p,
        c_void_p,
        c_void_p,
        c_float,
        c_int32,
        c_int32,
        c_void_p,
        c_void_p,
        c_int32,
    ],
    # heads, weight, eps, tokens, heads per token, normed ones, head_dim
    "norm_heads": [c_void_p, c_void_p, c_float, c_int32, c_int32, c_int32, c_int32],
    # gate_up, rows, width, out, threads
    "silu_mul": [c_void_p, c_int32, c_int32, c_void_p, c_int32],
    "gelu_mul": [c_void_p, c_int32, c_int32, c_void_p, c_int32],
}


class Kernels:
    """The entry points for one dtype. Pointers are `Tensor.data_ptr()` of CPU tensors.

    rms_norm, norm_heads: by the dtype of the weight, `dtype` itself or fp32.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        def entry(name: str, suffix: str = SUFFIX[dtype]) -> Any:
            function = library[f"headway_{name}_{suffix}"]
            function.argtypes = _SIGNATURES[name]
            function.restype = None
            return function

        self.dtype = dtype
        self.attend = entry("attend")
        self.write_kv = entry("write_kv")
        self.rotate_and_write = entry("rotate_and_write")
        weights = {w: f"{SUFFIX[dtype]}_{SUFFIX[w]}" for w in {dtype, torch.float32}}
        self.rms_norm = {w: entry("rms_norm", suffix) for w, suffix in weights.items()}
        self.norm_heads = {w: entry("norm_heads", suffix) for w, suffix in weights.items()}
        self.silu_mul = entry("silu_mul")
        self.gelu_mul = entry("gelu_mul")
        self.largest = entry("largest")
        self.race = entry("race")
        self.draw_filtered = entry("draw_filtered")
        self.linear = entry("linear")
        self.pack = entry("pack")
        self.packed_rows = entry("packed_rows")
        self.packed_rows.restype = c_int32
        self.can_linear = entry("can_linear")
        self.can_linear.restype = c_int32


def load_kernels(dtype: torch.dtype) -> Kernels:
    """The kernels at the best level that can be built and run here; built on first use.

    Raises BuildError when there is none; the reason is logged once.
    """
    return _kernels(load_library(), dtype)


def kernels_for(tensor: torch.Tensor) -> Kernels | None:
    """The kernels for a tensor of its device and dtype, or None where there are none."""
    if tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        return None
    try:
        return load_kernels(tensor.dtype)
    except BuildError:
        return None


class GroupView(ctypes.Structure):
    """Group of collective.cpp. capacity: bytes per buffer, a multiple of 64."""

    _fields_ = [  # ctypes reads it as it is
        ("memory", c_void_p),
        ("capacity", c_int64),
        ("sequence", c_uint64),
        ("patience_us", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
    ]


class GroupCalls:
    """The collectives; each returns 0, -1 when given up, or 1 + the rank that does not answer."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def entry(name: str, *arguments: Any) -> Any:
            function = library[f"headway_group_{name}"]
            function.argtypes = [POINTER(GroupView), *arguments]
            function.restype = c_int32
            return function

        self.all_reduce = {
            dtype: entry(f"all_reduce_{suffix}", c_void_p, c_int64)
            for dtype, suffix in SUFFIX.items()
        }
        self.gather = entry("gather", c_void_p, c_int64, c_int64, c_void_p)
        self.broadcast = entry("broadcast", c_void_p, c_int64)
        self.give_up = entry("give_up")
        self.give_up.restype = None
        self.bytes = library.headway_group_bytes
        self.bytes.argtypes, self.bytes.restype = [c_int32, c_int64], c_int64


def load_group_calls() -> GroupCalls:
    """Raises BuildError where nothing can be compiled."""
    return GroupCalls(load_library())


def unavailable() -> str | None:
    """Why nothing can be built here, or None; cheap, because it builds nothing itself."""
    if find_compiler() is None:
        try:
            load_kernels(torch.float32)
        except BuildError as error:
            return str(error)
    return None


@functools.cache
def _kernels(library: ctypes.CDLL, dtype: torch.dtype) -> Kernels:
    return Kernels(library, dtype)


@functools.cache
def _outcome(levels: tuple[Level, ...]) -> ctypes.CDLL | BuildError:
    """The library, or why there is none: a failed build is not tried again, nor told again."""
    failure = BuildError("this CPU has none of the levels")
    for level in levels:
        try:
            return _load(level)
        except BuildError as error:
            failure = error
            logger.debug("level %s: %s", level.name, error)
    logger.warning("native CPU kernels are not available, torch's operators serve: %s", failure)
    return failure


def load_library() -> ctypes.CDLL:
    """At the best level that can be built and run here. Raises BuildError."""
    return _library(tuple(usable_levels()))


def _library(levels: tuple[Level, ...]) -> ctypes.CDLL:
    outcome = _outcome(levels)
    if isinstance(outcome, BuildError):
        raise outcome
    return outcome


def _load(level: Level) -> ctypes.CDLL:
    path = build(level)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error
    if library.headway_prepare() != 0:
        raise BuildError(f"the system does not permit level {level.name}")
    return library
