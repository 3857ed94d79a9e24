"""gloo's threads are not in inference mode: what they write to must not have been made there."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from workers.parallel.collectives import Shard
from workers.parallel.torchdist import TorchGroup, create_store


@pytest.fixture
def group(monkeypatch):
    if not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    given: list[torch.Tensor] = []
    for name in ("all_gather", "broadcast"):
        real = getattr(distributed, name)

        def watched(*args, real=real, **options):
            for value in args:
                given.extend(value if isinstance(value, list) else [value])
            return real(*args, **options)

        monkeypatch.setattr(distributed, name, watched)
    group = TorchGroup(Shard(0, 1), "gloo", create_store(1))
    yield group, given
    group.close()


@pytest.mark.timeout(30)
def test_what_was_made_in_inference_mode_is_not_handed_over(group):
    ranks, given = group
    with torch.inference_mode():
        x = torch.arange(6.0).view(2, 3)
        assert ranks.all_reduce(x) is x
        assert ranks.broadcast(x) is x
        assert torch.equal(ranks.gather(x), torch.arange(6.0).view(2, 3))
    assert len(given) == 5
    assert not any(tensor.is_inference() for tensor in given)
