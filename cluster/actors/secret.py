"""The secret that engines and routers of one Ray cluster know each other by."""

from __future__ import annotations

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_KEY = b"hop-secret"
_NAMESPACE = b"headway"


def cluster_secret(proposed: str) -> str:
    """The first one that was proposed on this cluster: an application that is deployed anew must
    still be let in by the engines that are there. Kept where Ray keeps what it knows of itself;
    whoever can read that can run code on the cluster anyway."""
    _internal_kv_put(_KEY, proposed.encode(), overwrite=False, namespace=_NAMESPACE)
    kept: bytes = _internal_kv_get(_KEY, namespace=_NAMESPACE)
    return kept.decode()
