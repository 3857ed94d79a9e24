"""Where FlashAttention comes from: one class per package, with its own argument mapping.

All of them attend over pages of [blocks, block_size, kv_heads, head_dim], causal, aligned lower
right. They differ in the names of their arguments, in the page sizes they take, and in which call
is right for single tokens. `varlen` has the one inside torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workers.attention.backend import AttentionSpec, LayerCache
from workers.attention.meta import StepMeta

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class FlashStep:
    """A step, and what only some packages want of it.

    cu_seqlens_k: [S + 1], int32, where each sequence's keys would begin if they lay end to end;
    None in a step of single tokens, which no package asks it for.
    """

    meta: StepMeta
    cu_seqlens_k: torch.Tensor | None


class FlashProvider(ABC):
    """One package's FlashAttention.

    module, distribution: what is imported, and what it is called where packages are installed.
    advice: how to get it. functions: the functions called, with the arguments given by name.
    page_multiple: of a page's tokens. softcap: whether scores can be capped.
    architectures: first and last major compute capability that its binaries were built for.
    """

    module: ClassVar[str]
    distribution: ClassVar[str]
    advice: ClassVar[str]
    functions: ClassVar[Mapping[str, frozenset[str]]]
    page_multiple: ClassVar[int]
    softcap: ClassVar[bool] = True
    architectures: ClassVar[tuple[int, int]] = (8, 12)

    def __init__(self, spec: AttentionSpec) -> None:
        """`objection` has nothing against `spec`."""
        self.spec = spec
        package = importlib.import_module(self.module)
        self._calls: dict[str, Function] = {n: getattr(package, n) for n in self.functions}

    @classmethod
    def objection(cls, spec: AttentionSpec) -> str | None:
        """Why this package cannot serve `spec` here, with what to do about it, or None."""
        missing = cls._missing()
        if missing is not None:
            return missing
        if spec.block_size % cls.page_multiple:
            return f"block_size must be a multiple of {cls.page_multiple}, got {spec.block_size}"
        if spec.softcap and not cls.softcap:
            return f"no soft cap of scores, got {spec.softcap:g}"
        if spec.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(spec.device)
            first, last = cls.architectures
            if not first <= major <= last:
                return f"compute capability must be {first}.0 to {last}.x, got {major}.{minor}"
        return None

    @classmethod
    def _missing(cls) -> str | None:
        """What keeps the functions from being called; imports the package if it is there."""
        try:
            if importlib.util.find_spec(cls.module) is None:
                return f"not installed ({cls.advice})"
            package = importlib.import_module(cls.module)
        except ModuleNotFoundError:
            return f"not installed ({cls.advice})"
        # A binary of another torch or CUDA fails in the loader, which knows many exceptions.
        except (ImportError, OSError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return (
                f"version {cls.version()} cannot be loaded beside torch {torch.__version__} "
                f"({reason}); {cls.advice}"
            )
        for name, wanted in cls.functions.items():
            function = getattr(package, name, None)
            known = inspect.signature(function).parameters if callable(function) else {}
            lacking = sorted(wanted - set(known))
            if lacking:
                return f"{name} of version {cls.version()} takes no {lacking[0]}; {cls.advice}"
        return None

    @classmethod
    def version(cls) -> str:
        """As installed, or "unknown"."""
        try:
            return importlib.metadata.version(cls.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    @abstractmethod
    def attend(
        self,
        step: FlashStep,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        window: int,
    ) -> None:
        """See AttentionBackend.run."""


def window_size(window: int) -> tuple[int, int]:
    """(keys to the left, keys to the right) beside a query's own. 0: all to the left."""
    return (window - 1, 0) if window else (-1, -1)


class FlashAttn(FlashProvider):
    """The original package (Dao, 2023).

    Single tokens go through the call that is made for them: the variable-length one, given pages,
    is wrong when it splits the keys, and without splitting it leaves a GPU idle.
    """

    module = "flash_attn"
    distribution = "flash-attn"
    advice = "install flash-attn 2.8.3 for your torch, it is built from source"
    functions: ClassVar[Mapping[str, frozenset[str]]] = {
        "flash_attn_varlen_func": frozenset(
            {
                *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
                *("softmax_scale", "causal", "window_size", "softcap", "block_table"),
            }
        ),
        "flash_attn_with_kvcache": frozenset(
            {
                *("q", "k_cache", "v_cache", "cache_seqlens", "block_table", "softmax_scale"),
                *("causal", "window_size", "softcap", "num_splits"),
            }
        ),
    }
    page_multiple = 256

    def attend(
        self,
        step: FlashStep,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        window: int,
    ) -> None:
        meta = step.meta
        scoring = {
            "softmax_scale": self.spec.scale,
            "causal": True,
            "window_size": window_size(window),
            "softcap": self.spec.softcap,
            "block_table": meta.block_table,
        }
        if step.cu_seqlens_k is None:
            seqs = meta.num_seqs
            result = self._calls["flash_attn_with_kvcache"](
                q=query[:seqs].unsqueeze(1),
                k_cache=cache.keys,
                v_cache=cache.values,
                cache_seqlens=meta.seqused_k,
                # 0: as many parts as the package thinks right.
                num_splits=0,
                **scoring,
            )
            out[:seqs].copy_(result.squeeze(1))
            return
        result = self._calls["flash_attn_varlen_func"](
            q=query,
            k=cache.keys,
            v=cache.values,
            cu_seqlens_q=meta.cu_seqlens_q,
            cu_seqlens_k=step.cu_seqlens_k,
            max_seqlen_q=meta.max_q,
            max_seqlen_k=meta.max_k,
            **scoring,
        )
        out.copy_(result)


class VllmFlashAttn(FlashAttn):
    """vLLM's fork as a package of its own: the same calls, small pages."""

    module = "vllm_flash_attn"
    distribution = "vllm-flash-attn"
    advice = "pip install 'headway-serving[flash]', which needs torch 2.4.0 and Python <= 3.12"
    page_multiple = 16
    # Built for 8.0 and 9.0, with nothing that a later card could compile.
    architectures = (8, 9)


class InsideVllm(FlashProvider):
    """vLLM's fork as it comes inside vLLM: lengths instead of offsets, and one call for all."""

    module = "vllm.vllm_flash_attn"
    distribution = "vllm"
    advice = "install vllm beside Headway"
    functions: ClassVar[Mapping[str, frozenset[str]]] = {
        "flash_attn_varlen_func": frozenset(
            {
                *("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k"),
                *("softmax_scale", "causal", "window_size", "softcap", "block_table"),
            }
        ),
    }
    page_multiple = 16

    def attend(
        self,
        step: FlashStep,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        window: int,
    ) -> None:
        meta = step.meta
        result = self._calls["flash_attn_varlen_func"](
            q=query,
            k=cache.keys,
            v=cache.values,
            max_seqlen_q=meta.max_q,
            cu_seqlens_q=meta.cu_seqlens_q,
            max_seqlen_k=meta.max_k,
            seqused_k=meta.seqused_k,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=list(window_size(window)),
            softcap=self.spec.softcap,
            block_table=meta.block_table,
        )
        out.copy_(result)
