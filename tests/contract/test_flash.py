"""The FlashAttention adapter: what each package is asked is what the step means.

No GPU and no package is needed: see fake_flash. What the kernels themselves compute is tested by
tests/gpu where there is a card.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import sys
from dataclasses import replace

import pytest
import torch

from tests.contract import fake_flash
from tests.contract.attention_cases import MIXED, Case, Sequence, Shape, check, make_spec
from workers.attention.flash_backend import PROVIDERS, FlashAttention, choose_provider
from workers.attention.providers import FlashAttn, FlashProvider, InsideVllm, VllmFlashAttn
from workers.attention.varlen import TorchVarlen

FAKES = {
    VllmFlashAttn: fake_flash.vllm_flash_attn,
    InsideVllm: fake_flash.inside_vllm,
    FlashAttn: fake_flash.flash_attn,
    TorchVarlen: fake_flash.torch_varlen,
}
CASES = [Case("flash", "cpu", torch.float16, 5e-3), Case("flash", "cpu", torch.bfloat16, 3e-2)]
DECODES = [Sequence(1, n - 1) for n in (1, 37, 255, 256, 257, 700)]


def install(monkeypatch, provider: type[FlashProvider]) -> fake_flash.Calls:
    """Make `provider` the only package there is, served by its stand-in, and allow the CPU."""
    calls = fake_flash.Calls()
    module = FAKES[provider](calls)
    module.__spec__ = importlib.machinery.ModuleSpec(provider.module, None)
    monkeypatch.setitem(sys.modules, provider.module, module)
    if provider is InsideVllm:
        monkeypatch.setitem(sys.modules, "vllm", type(module)("vllm"))
    monkeypatch.setattr("workers.attention.flash_backend.PROVIDERS", (provider,))
    dtypes = {"cpu": frozenset({torch.float16, torch.bfloat16})}
    allowed = replace(FlashAttention.capabilities, dtypes=dtypes)
    monkeypatch.setattr(FlashAttention, "capabilities", allowed)
    return calls


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.module)
def provider(request) -> type[FlashProvider]:
    return request.param


@pytest.fixture
def calls(monkeypatch, provider) -> fake_flash.Calls:
    return install(monkeypatch, provider)


@pytest.fixture
def pages(provider) -> int:
    """The smallest page that the package takes."""
    return provider.page_multiple


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return request.param


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (8, 1)], ids=str)
def test_mixed_batch_with_shared_heads(calls, pages, case, heads):
    check(case, Shape(heads=heads[0], kv_heads=heads[1], block_size=pages), MIXED)
    assert calls == ["varlen"]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_sizes(calls, pages, case, head_dim):
    check(case, Shape(head_dim=head_dim, block_size=pages), MIXED)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_page_sizes(calls, pages, case, factor):
    check(case, Shape(block_size=factor * pages), [*MIXED, Sequence(20, 600)])


@pytest.mark.parametrize("window", [0, 1, 17, 100])
def test_windows(calls, pages, case, window):
    shape = Shape(block_size=pages, window=window)
    check(case, shape, MIXED)
    check(case, shape, DECODES)


def test_soft_cap(calls, provider, pages, case):
    shape = Shape(block_size=pages, softcap=3.0)
    if not provider.softcap:
        assert "soft cap" in FlashAttention.objection(make_spec(case, shape))
        return
    check(case, shape, MIXED)
    check(case, shape, DECODES)


def test_single_tokens_take_the_call_that_is_made_for_them(calls, provider, pages, case):
    check(case, Shape(block_size=pages), DECODES)
    single = "flash_attn_with_kvcache" in provider.functions
    assert calls == ["kvcache" if single else "varlen"]


def test_a_lone_token_without_context(calls, pages, case):
    check(case, Shape(block_size=pages), [Sequence(1, 0)])


def test_a_prompt_alone(calls, pages, case):
    check(case, Shape(block_size=pages), [Sequence(33, 0)])


def test_padding_tokens_disturb_nobody(calls, pages, case):
    check(case, Shape(block_size=pages), MIXED, padding=6)
    check(case, Shape(block_size=pages), DECODES, padding=3)


def test_more_sequences_than_expected(calls, pages, case, monkeypatch):
    monkeypatch.setattr("workers.attention.flash_backend._EXPECTED_SEQS", 2)
    check(case, Shape(block_size=pages), MIXED)


def test_pages_of_another_size_are_refused(calls, provider, case):
    spec = make_spec(case, Shape(block_size=24))
    wanted = f"block_size must be a multiple of {provider.page_multiple}, got 24"
    assert wanted in FlashAttention.objection(spec)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch, case):
    monkeypatch.setattr("workers.attention.flash_backend.PROVIDERS", (VllmFlashAttn,))
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", None)
    monkeypatch.delitem(sys.modules, "vllm_flash_attn")
    monkeypatch.setattr(VllmFlashAttn, "module", "vllm_flash_attn_that_is_not_there")
    reason = choose_provider(make_spec(case, Shape()))
    assert "not installed (pip install 'headway-serving[flash]'" in reason


def test_an_old_version_is_named_with_what_it_lacks(monkeypatch, case):
    install(monkeypatch, FlashAttn)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        raise AssertionError("never called")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", flash_attn_varlen_func)
    reason = choose_provider(make_spec(case, Shape(block_size=256)))
    assert "takes no block_table" in reason
    assert "2.8.3" in reason


def test_a_package_of_another_torch_is_named_with_the_reason(monkeypatch, tmp_path, case):
    package = tmp_path / "vllm_flash_attn"
    package.mkdir()
    text = "raise ImportError('undefined symbol: _ZN3c104cuda')\n"
    (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm_flash_attn", raising=False)
    reason = VllmFlashAttn.objection(make_spec(case, Shape()))
    assert f"cannot be loaded beside torch {torch.__version__}" in reason
    assert "undefined symbol" in reason


def test_the_cpu_is_refused():
    spec = make_spec(CASES[0], Shape())
    assert FlashAttention.objection(spec) == "device must be one of ['cuda'], got cpu"


def test_the_stand_in_for_torch_has_torchs_signature():
    lacking = TorchVarlen.objection(make_spec(CASES[0], Shape(block_size=256)))
    if lacking:
        pytest.skip(lacking)
    from torch.nn.attention import varlen

    fake = fake_flash.torch_varlen(fake_flash.Calls()).varlen_attn
    assert parameters(fake) == parameters(varlen.varlen_attn)


def parameters(function) -> list[tuple]:
    known = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in known]


@pytest.mark.parametrize("provider", [VllmFlashAttn, InsideVllm, FlashAttn])
def test_the_stand_in_has_the_signatures_of_the_package(provider):
    """Where the package is installed: `make test-flash`, or a machine with vLLM."""
    try:
        real = importlib.import_module(provider.module)
    except ImportError as error:
        if provider is VllmFlashAttn and os.environ.get("HEADWAY_FLASH_PACKAGE") == "required":
            raise
        pytest.skip(f"no {provider.module} here: {error}")
    fake = FAKES[provider](fake_flash.Calls())
    for name in provider.functions:
        assert parameters(getattr(fake, name)) == parameters(getattr(real, name))
