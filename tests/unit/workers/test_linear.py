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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 320])
def test_the_rows_of_a_packed_weight_can_be_looked_up(dtype, width):
    weight = random(96, width, dtype=dtype)
    linear, ids = native(weight.clone()), torch.tensor([95, 0, 17, 17, 31, 32, 48])
    assert torch.equal(linear.rows(ids), weight[ids])
    assert torch.equal(linear.rows(torch.arange(96, dtype=torch.int32)), weight)
    assert linear.rows(ids[:0]).shape == (0, width)


@pytest.mark.parametrize("bad", [-1, 96])
def test_a_row_that_there_is_not_is_refused(bad):
    linear = native(random(96, 64))
    with pytest.raises(IndexError, match=rf"ids must be in \[0, 96\), got {bad}"):
        linear.rows(torch.tensor([0, bad, 95]))


def test_a_native_weight_is_not_needed_any_more():
    weight = random(96, 64)
    linear, x = native(weight), random(2, 64)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


@pytest.mark.parametrize("out", [32, 64, 96, 160, 224])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_groups_of_outputs(dtype, out):
    """Kernels take several groups at a time, and threads take shares of them."""
    weight, x = random(out, 64, dtype=dtype), random(70, 64, dtype=dtype)
    whole = native(weight)(x)
    for begin in range(0, out, 32):
        part = native(weight[begin : begin + 32])(x)
        assert torch.equal(whole[:, begin : begin + 32], part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_blocks_give_the_bits_of_rows_by_themselves(dtype):
    """As many rows as do not fit the second-level cache at once."""
    linear, x = native(random(64, 4096, dtype=dtype)), random(300, 4096, dtype=dtype)
    whole = linear(x)
    for begin, end in ((0, 1), (60, 77), (127, 129), (290, 300)):
        assert torch.equal(linear(x[begin:end].contiguous()), whole[begin:end])
