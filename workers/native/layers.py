"""Decoder layers as layers.cpp takes them. Structures mirror those there."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch

from workers.native.bindings import SUFFIX, GroupView, HeadShape, StepView, load_library


class LinearView(ctypes.Structure):
    """A packed weight, [out, in], and its bias."""

    _fields_ = [  # ctypes reads it as it is
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("in_width", c_int32),
        ("out_width", c_int32),
    ]


class NormView(ctypes.Structure):
    """wide: the weight is fp32, whatever the model's dtype. Without a weight there is no norm."""

    _fields_ = [("weight", c_void_p), ("eps", c_float), ("wide", c_int32)]


class AnglesView(ctypes.Structure):
    """[tokens, head_dim / 2] each."""

    _fields_ = [("cos", c_void_p), ("sin", c_void_p)]


class LayerView(ctypes.Structure):
    """angles: which of the step's. activation: its place in Activation."""

    _fields_ = [
        ("attention_norm", NormView),
        ("mlp_norm", NormView),
        ("after_attention", NormView),
        ("after_mlp", NormView),
        ("head_norm", NormView),
        ("qkv", LinearView),
        ("attention_out", LinearView),
        ("gate_up", LinearView),
        ("down", LinearView),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int32),
        ("angles", c_int32),
        ("normed_heads", c_int32),
        ("activation", c_int32),
    ]


class StackView(ctypes.Structure):
    """All layers of a model, and a step's tokens. width: of the residual stream."""

    _fields_ = [
        ("layers", POINTER(LayerView)),
        ("angles", POINTER(AnglesView)),
        ("slots", c_void_p),
        ("logits_index", c_void_p),
        ("group", POINTER(GroupView)),
        ("scratch", c_void_p),
        ("num_layers", c_int32),
        ("tokens", c_int32),
        ("num_logits", c_int32),
        ("width", c_int32),
    ]


class NativeStep(NamedTuple):
    """A step that a native attention backend has planned. slots: [T] int32."""

    shape: HeadShape
    step: StepView
    slots: torch.Tensor


class LayerCalls:
    """The entry points for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        def entry(name: str, result: Any, *arguments: Any) -> Any:
            function = library[f"headway_{name}_{SUFFIX[dtype]}"]
            function.argtypes, function.restype = list(arguments), result
            return function

        stack, step, shape = POINTER(StackView), POINTER(StepView), POINTER(HeadShape)
        # stack, shape -> elements
        self.scratch = entry("layers_scratch", c_int64, stack, shape)
        # stack, step, shape, hidden, last, update -> outcome of the group's collectives
        self.run = entry("layers", c_int32, stack, step, shape, c_void_p, c_void_p, c_void_p)


def load_layer_calls(dtype: torch.dtype) -> LayerCalls:
    """Raises BuildError where nothing can be compiled."""
    return LayerCalls(load_library(), dtype)
