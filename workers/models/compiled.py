"""All decoder layers as one call of the compiled kernels: on a decode step the way between the
kernels through Python would cost about a tenth of the step."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, pointer

import torch

from workers.attention.backend import LayerCache
from workers.checkpoint.rope import RopeScaling
from workers.layers.linear import Linear, NativeLinear
from workers.layers.mlp import gelu_gate, silu_gate
from workers.layers.norm import HeadNorm, RMSNorm
from workers.layers.parallel import SummedLinear
from workers.layers.rotary import RotaryAngles
from workers.models.layer import DecoderLayer, EachLayer, Layers, LayerStep
from workers.native import layers as native
from workers.parallel.collectives import Alone, Collectives
from workers.parallel.shm import SharedMemoryGroup

_ACTIVATIONS = (silu_gate, gelu_gate)
"""In the order of Activation in layers.cpp."""


class _NotCompiled(Exception):
    """A layer has a part that the compiled kernels do not know."""


def layers_of(layers: Sequence[DecoderLayer], collectives: Collectives) -> Layers:
    """The fastest way through the layers; at least one."""
    each = EachLayer(layers)
    try:
        return CompiledLayers(layers, collectives, each)
    except _NotCompiled:
        return each


class CompiledLayers:
    """Bitwise what EachLayer does, for products, attention and collectives of the compiled
    kernels. A step that another attention backend has planned goes through each layer."""

    def __init__(
        self, layers: Sequence[DecoderLayer], collectives: Collectives, each: EachLayer
    ) -> None:
        """Raises _NotCompiled for layers or collectives that are of another kind."""
        self._each = each  # keeps the weights that the views point into
        self._group = _group(collectives)
        self._ropes = sorted({layer.kind.rope for layer in layers}, key=repr)
        views = [_layer_view(layer, self._ropes) for layer in layers]
        self._views = (native.LayerView * len(views))(*views)
        self._calls = native.load_layer_calls(_native(layers[0].qkv).dtype)
        self._caches: Sequence[LayerCache] = ()

    def __call__(
        self, hidden: torch.Tensor, step: LayerStep, caches: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planned = step.attention.native_step()
        if planned is None:
            return self._each(hidden, step, caches)
        self._point_at(caches)
        tokens, width = hidden.shape
        num_logits = len(step.logits_index)
        angles = [_angles_view(step.angles[rope]) for rope in self._ropes]
        stack = native.StackView(
            layers=self._views,
            angles=(native.AnglesView * len(angles))(*angles),
            slots=planned.slots.data_ptr(),
            logits_index=step.logits_index.data_ptr(),
            num_layers=len(self._views),
            tokens=tokens,
            num_logits=num_logits,
            width=width,
        )
        if self._group is not None:
            stack.group = pointer(self._group.view)
        shape = byref(planned.shape)
        scratch = hidden.new_empty(self._calls.scratch(byref(stack), shape))
        stack.scratch = scratch.data_ptr()
        last, update = hidden.new_empty(2, num_logits, width)
        outcome = self._calls.run(
            byref(stack),
            byref(planned.step),
            shape,
            hidden.data_ptr(),
            last.data_ptr(),
            update.data_ptr(),
        )
        if self._group is not None:
            self._group.check(outcome)
        return last, update

    def _point_at(self, caches: Sequence[LayerCache]) -> None:
        if caches is self._caches:
            return
        for view, cache in zip(self._views, caches, strict=True):
            view.keys, view.values = cache.keys.data_ptr(), cache.values.data_ptr()
        self._caches = caches


def _layer_view(layer: DecoderLayer, ropes: Sequence[RopeScaling]) -> native.LayerView:
    norms, mlp = layer.norms, layer.mlp
    if mlp.gate not in _ACTIVATIONS:
        raise _NotCompiled
    return native.LayerView(
        attention_norm=_norm_view(norms.attention),
        mlp_norm=_norm_view(norms.mlp),
        after_attention=_norm_view(norms.after_attention),
        after_mlp=_norm_view(norms.after_mlp),
        head_norm=_norm_view(norms.heads),
        qkv=_linear_view(layer.qkv),
        attention_out=_linear_view(layer.attention_out),
        gate_up=_linear_view(mlp.gate_up),
        down=_linear_view(mlp.down),
        window=layer.kind.window,
        angles=ropes.index(layer.kind.rope),
        normed_heads=0 if norms.heads is None else len(norms.heads.weight),
        activation=_ACTIVATIONS.index(mlp.gate),
    )


def _linear_view(linear: Linear) -> native.LinearView:
    found = _native(linear)
    return native.LinearView(*found.pointers, *found.shape)


def _native(linear: Linear) -> NativeLinear:
    if isinstance(linear, SummedLinear):
        linear = linear.linear
    if not isinstance(linear, NativeLinear):
        raise _NotCompiled
    return linear


def _norm_view(norm: RMSNorm | HeadNorm | None) -> native.NormView:
    if norm is None:
        return native.NormView()
    weight = norm.weight
    return native.NormView(weight.data_ptr(), norm.eps, weight.dtype is torch.float32)


def _angles_view(angles: RotaryAngles) -> native.AnglesView:
    return native.AnglesView(angles.cos.data_ptr(), angles.sin.data_ptr())


def _group(collectives: Collectives) -> SharedMemoryGroup | None:
    if isinstance(collectives, Alone):
        return None
    if isinstance(collectives, SharedMemoryGroup):
        return collectives
    raise _NotCompiled
