from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from workers.checkpoint.rope import RopeScaling
from workers.layers.fused import TorchOps
from workers.layers.linear import DenseLinear
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.rotary import Rotary, inverse_frequencies, rotate

CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_rms_norm_by_its_formula():
    x, weight = random(5, 64), random(64)
    rms = (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = x.double() / rms * weight.double()
    norm, ops = RMSNorm(weight, 1e-5), TorchOps()
    torch.testing.assert_close(norm(x, ops).double(), expected, atol=1e-6, rtol=1e-6)
    residual, update = x * 0.25, x * 0.75
    after = norm.after_adding(update, residual, ops)
    torch.testing.assert_close(after.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(residual, x)


def test_gated_mlp_by_its_formula():
    gate, up, down = random(96, 64), random(96, 64) + 0.1, random(64, 96)
    x = random(5, 64)
    mlp = GatedMLP(DenseLinear(torch.cat([gate, up])), DenseLinear(down))
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x, TorchOps()), expected)


def test_rotation_is_that_of_complex_numbers():
    rope = RopeScaling(10000.0)
    heads, positions = random(7, 3, 16), torch.tensor([0, 1, 5, 100, 3, 2, 511], dtype=torch.int32)
    rotated = rotate(heads, Rotary(rope, 16, CPU).angles(positions, torch.float32))
    pairs = torch.complex(heads[..., :8].double(), heads[..., 8:].double())
    angle = positions.double()[:, None] * inverse_frequencies(rope, 16).double()
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotated.double(), expected, atol=1e-4, rtol=1e-4)


def test_scores_depend_on_distance_only():
    rotary = Rotary(RopeScaling(10000.0), 32, CPU)
    query, key = random(1, 1, 32), random(1, 1, 32) + 0.5

    def score(q_position: int, k_position: int) -> float:
        q = rotate(query, rotary.angles(torch.tensor([q_position]), torch.float32))
        k = rotate(key, rotary.angles(torch.tensor([k_position]), torch.float32))
        return float((q * k).sum())

    assert score(10, 3) == pytest.approx(score(107, 100), abs=1e-4)


def test_angles_do_not_depend_on_the_other_positions():
    """A replay has its tokens in steps of other shapes and must find the same bits."""
    rotary = Rotary(RopeScaling(10000.0), 32, CPU)
    positions = torch.randint(0, 131072, (67,), generator=torch.Generator().manual_seed(1))
    together = rotary.angles(positions, torch.float32)
    for count in (1, 2, 3, 16, 33):
        for part, whole in zip(
            rotary.angles(positions[-count:], torch.float32), together, strict=True
        ):
            assert torch.equal(part, whole[-count:])


def test_angles_are_those_of_torch():
    frequencies = inverse_frequencies(RopeScaling(10000.0), 32)
    positions = torch.randint(0, 131072, (500,), generator=torch.Generator().manual_seed(1))
    angle = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = Rotary(RopeScaling(10000.0), 32, CPU).angles(positions, torch.float32)
    torch.testing.assert_close(cos, angle.cos(), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin, angle.sin(), atol=2e-7, rtol=0)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda p: p["rope_type"],
)
def test_frequencies_equal_those_of_transformers(parameters, head_dim):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=131072,
        # The old spelling: both transformers 4 and 5 read it.
        rope_theta=parameters["rope_theta"],
        rope_scaling={k: v for k, v in parameters.items() if k != "rope_theta"},
    )
    expected = llama.LlamaRotaryEmbedding(config).inv_freq
    rope = RopeScaling(
        parameters["rope_theta"],
        parameters["rope_type"],
        parameters.get("factor", 1.0),
        parameters.get("low_freq_factor", 0.0),
        parameters.get("high_freq_factor", 0.0),
        parameters.get("original_max_position_embeddings", 0),
    )
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, atol=0, rtol=1e-6)
