"""Attention backends by the name that the configuration uses."""

from __future__ import annotations

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionBackend, AttentionSpec
from workers.attention.torch_backend import TorchAttention

BACKENDS: dict[str, type[AttentionBackend]] = {TorchAttention.name: TorchAttention}
"""In order of preference for "auto", best first."""


def make_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """See `choose_attention`."""
    return choose_attention(name, spec)(spec)


def choose_attention(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    """The backend called `name`; for "auto" the first whose capabilities cover `spec`.

    Raises ConfigError for an unknown name or a spec that is not covered.
    """
    if name == "auto":
        return _first_capable(spec)
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend must be one of {['auto', *BACKENDS]}, got {name!r}")
    objection = BACKENDS[name].objection(spec)
    if objection is not None:
        raise ConfigError(f"attention backend {name!r}: {objection}")
    return BACKENDS[name]


def _first_capable(spec: AttentionSpec) -> type[AttentionBackend]:
    objections = []
    for name, backend in BACKENDS.items():
        objection = backend.objection(spec)
        if objection is None:
            return backend
        objections.append(f"{name}: {objection}")
    raise ConfigError(f"attention_backend 'auto': none fits ({'; '.join(objections)})")
