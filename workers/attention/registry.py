"""Attention backends by the name that the configuration uses."""

from __future__ import annotations

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionBackend, AttentionSpec
from workers.attention.native_backend import NativeAttention
from workers.attention.torch_backend import TorchAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    NativeAttention.name: NativeAttention,
    TorchAttention.name: TorchAttention,
}
"""In order of preference for "auto", best first."""


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
    for candidate in BACKENDS if name == "auto" else (name,):
        objection = BACKENDS[candidate].objection(spec)
        if objection is None:
            fitting.append(BACKENDS[candidate])
        else:
            objections.append(f"{candidate}: {objection}")
    if not fitting:
        raise ConfigError(f"attention_backend {name!r}: none fits ({'; '.join(objections)})")
    return fitting
