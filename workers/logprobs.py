"""Log-probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

import torch

from cluster.core.ids import TokenId
from cluster.core.plan import TokenLogprob


def token_logprobs(
    logits: torch.Tensor, token_ids: list[TokenId], tops: list[int]
) -> list[TokenLogprob]:
    """One entry per row, of the model's own distribution in fp32.

    logits: [rows, vocab], any float type. token_ids: the token of each row whose log-probability
    is wanted. tops: how many of the likeliest per row, 0 to 20; a row's entry does not depend on
    its neighbours, and of equals the lower id comes first.
    """
    if not token_ids:
        return []
    scores = logits.to(torch.float32)
    totals = torch.logsumexp(scores, dim=-1, keepdim=True)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=scores.device)[:, None]
    own = (scores.gather(1, chosen) - totals)[:, 0].tolist()
    widest = min(max(tops), scores.shape[1])
    ids, values = _likeliest(scores, totals, widest) if widest else ([], [])
    entries: list[TokenLogprob] = []
    for row, (token_id, logprob, top) in enumerate(zip(token_ids, own, tops, strict=True)):
        pairs = list(zip(ids[row][:top], values[row][:top], strict=True)) if top else []
        entries.append(TokenLogprob(token_id, logprob, pairs))
    return entries


def _likeliest(
    scores: torch.Tensor, totals: torch.Tensor, count: int
) -> tuple[list[list[int]], list[list[float]]]:
    values, ids = scores.topk(count, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, by_value).tolist(), (values - totals).tolist()
