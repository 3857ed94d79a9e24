"""Attention backends by the name that the configuration uses."""

from __future__ import annotations

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionBackend, AttentionSpec
from workers.attention.flash_backend import FlashAttention
from workers.attention.native_backend import NativeAttention
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton_backend import TritonAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    FlashAttention.name: FlashAttention,
    TritonAttention.name: TritonAttention,
    NativeAttention.name: NativeAttention,
    TorchAttention.name: TorchAttention,
}
"""By name."""

_PREFERRED: dict[str, tuple[type[AttentionBackend], ...]] = {
    "cuda": (FlashAttention, TritonAttention, TorchAttention),
    "cpu": (NativeAttention, TorchAttention),
}
"""What "auto" tries per type of device, best first."""


def make_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`; for "auto" the first that covers `spec` and works.

    Raises ConfigError for an unknown name, a spec that is not covered, or kernels that do not
    compile.
    """
    backends = candidates(name, spec)
    for backend in backends[:-1]:
        try:
            return backend(spec)
        except ConfigError:
            # It has logged why; the next one serves.
            continue
    return backends[-1](spec)


def candidates(name: str, spec: AttentionSpec) -> list[type[AttentionBackend]]:
    """The backends that `name` admits for `spec`, best first, at least one; nothing is compiled.

    Raises ConfigError for an unknown name or a spec that is not covered.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention_backend must be one of {['auto', *BACKENDS]}, got {name!r}")
    fitting, objections = [], []
    for backend in _PREFERRED[spec.device.type] if name == "auto" else (BACKENDS[name],):
        objection = backend.objection(spec)
        if objection is None:
            fitting.append(backend)
        else:
            objections.append(f"{backend.name}: {objection}")
    if not fitting:
        raise ConfigError(f"attention_backend {name!r}: none fits ({'; '.join(objections)})")
    return fitting
