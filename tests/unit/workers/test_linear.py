"""Every way to multiply gives what the plain product gives, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from workers.layers.linear import (
    DenseLinear,
    Linear,
    NativeLinear,
    PackedLinear,
    can_pack,
    make_linear,
)
from workers.native import bindings
from workers.native.build import BuildError

ROWS = (1, 2, 7, 12, 13, 16, 17, 33, 64)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def native(weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
    try:
        kernels = bindings.load_kernels(weight.dtype)
    except BuildError as error:
        pytest.skip(str(error))
    if not kernels.can_linear(weight.shape[1], len(weight)):
        pytest.skip("no kernels for this dtype at this machine's level")
    return NativeLinear(kernels, weight, bias)


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    if not can_pack(weight):
        pytest.skip("oneDNN does not take this dtype here")
    return PackedLinear(weight, bias)


@pytest.fixture(params=[native, packed])
def make(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 320])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_product_in_double(make, dtype, width, biased):
    weight = random(96, width, dtype=dtype)
    bias = random(96, dtype=dtype) if biased else None
    linear = make(weight, bias)
    for rows in ROWS:
        x = random(rows, width, dtype=dtype)
        expected = x.double() @ weight.double().T
        if bias is not None:
            expected += bias
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 320, 1536])
def test_native_rows_do_not_depend_on_their_number(dtype, width):
    """What "identical after replay" rests on: a chunk and a decode give the same row."""
    _same_bits(native(random(96, width, dtype=dtype)), random(64, width, dtype=dtype))


def test_packed_fp32_rows_do_not_depend_on_their_number():
    _same_bits(packed(random(96, 64)), random(64, 64))


def _same_bits(linear: Linear, x: torch.Tensor) -> None:
    whole = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows].contiguous()), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(dtype):
    linear, x = native(random(96, 64, dtype=dtype)), random(20, 64, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x)
        torch.set_num_threads(2)
        assert torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(before)


def test_no_rows():
    assert native(random(96, 64))(random(0, 64)).shape == (0, 96)


def test_nan_stays_in_its_row():
    x = random(3, 64)
    x[1, 5] = float("nan")
    y = native(random(96, 64))(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_what_no_kernel_takes():
    assert isinstance(make_linear(random(8, 8, dtype=torch.float16)), DenseLinear)
    assert not isinstance(make_linear(random(10, 33)), NativeLinear)


def test_a_native_weight_is_not_copied():
    weight = random(96, 64)
    linear = native(weight)
    weight.zero_()
    assert not linear(random(2, 64)).any()
