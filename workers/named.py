"""The ids that a request's parameters name, as arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cluster.core.sampling import SamplingParams


class NamedIds:
    """Made once, when a sequence comes in: there may be 65,536 of them, and a step that turned them
    from Python's integers again for each row would take a second.

    allowed, stops, bias_ids: [n] int64, those beyond the vocabulary left out. biases: [n] float32,
    one for each of bias_ids. None where the parameters name none.
    """

    __slots__ = ("allowed", "bias_ids", "biases", "stops")

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        self.allowed = _below(params.allowed_token_ids, vocab)
        self.stops = _below(params.stop_token_ids, vocab) if params.min_tokens else None
        biased = [(i, bias) for i, bias in params.logit_bias if i < vocab]
        self.bias_ids = _below((i for i, _ in biased), vocab)
        self.biases = np.array([bias for _, bias in biased], np.float32) if biased else None


def _below(ids: Iterable[int], vocab: int) -> np.ndarray | None:
    found = np.fromiter(ids, np.int64)
    return found[found < vocab] if len(found) else None


NO_IDS = NamedIds(SamplingParams(max_tokens=1), 0)
