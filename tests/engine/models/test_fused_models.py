"""Models with fused kernels are as close to float32 as with stock operators."""

import statistics
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import experts
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.compiling import Kernel
from engine.kernels.cpu.rows import CompiledKernels
from engine.kernels.processor import is_invariance_free
from engine.kernels.registry import has_product_kernel
from engine.models.attention import choice, patches
from engine.models.attention.fused import FusedAttention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.patches import PatchAttention
from engine.models.loading import invariance
from engine.models.spec import UnsupportedModel
from tests.engine.driver import Driver
from tests.engine.fixtures import AsKind, LoadDriver, MakePrompt, SaveModel

LENGTH = 70
_LLAMAS = {"llama", "mistral-window", "qwen2", "qwen3", "mixtral", "qwen3-moe"}
USED = {
    "rms_norm": {*_LLAMAS, "gemma2", "gemma3", "deepseek2", "llama4", "gpt-oss"},
    "rms_norm_heads": {"qwen3", "qwen3-moe", "gemma3"},
    "swiglu": {*_LLAMAS, "deepseek2", "llama4", "cohere"},
    "rotate_and_store": {*_LLAMAS, "gemma2", "gemma3", "llama4", "gpt-oss", "cohere"},
    "attend": {*_LLAMAS, "gemma2", "gemma3", "gpt-oss", "cohere"},
}
"""By what is called in which families."""
SPARSE = {"mixtral", "qwen3-moe", "deepseek2", "llama4", "gpt-oss"}
"""Whose tokens choose experts."""
GATED_TOGETHER: dict[str, set[str]] = {
    "mixtral": {"swiglu"},
    "qwen3-moe": {"swiglu"},
    "deepseek2": set(),  # these have other MLPs besides
    "llama4": set(),
}
"""Whose experts run together, where kernels compute their products, and what that spares."""
FAMILIES = sorted(set[str]().union(*USED.values()))
HAS_PAIRS = pytest.mark.skipif(not has_pairs(), reason="needs AVX-512 for bfloat16")


KINDS = ["amd-avx512-bf16", "amx", "no pairs"] if has_pairs() else ["no pairs"]


@pytest.fixture(params=KINDS)
def by_pairs(request: Any, as_kind: AsKind, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the kernel that adds pairs attends, on some kinds of processors."""
    if request.param == "no pairs":
        monkeypatch.setattr(choice, "has_patch_attention", lambda _spec: False)
    else:
        as_kind(request.param)
    return bool(request.param != "no pairs")


@pytest.mark.parametrize(
    ("name", "by_pairs"),
    [
        (name, kind)
        for kind in KINDS
        for name in FAMILIES
        # What kinds of processors do otherwise, they do for every family alike.
        if kind is KINDS[0] or name in ("llama", "gemma3", "qwen3-moe", "gpt-oss")
    ],
    indirect=["by_pairs"],
)
def test_logits_are_as_accurate_as_without_kernels(
    name: str,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    by_pairs: bool,
) -> None:
    called = _count_calls(monkeypatch)
    directory = checkpoint(name).directory
    in_full, rounded, fused = (
        driver(directory, **settings)
        for settings in (
            {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "fused": True},
        )
    )  # fmt: skip

    def logits(engine: Driver, tokens: list[int]) -> torch.Tensor:
        called.clear()
        engine.start(0, tokens)
        engine.start(1, tokens[:50])
        first = engine.logits({0: 60, 1: 40})
        second = engine.logits({0: 1, 1: 10})
        return torch.cat((first, second, *(engine.logits({0: 1}) for _ in range(9)))).float()

    # Where two experts are nearly tied a rounding chooses another one, and all tokens that attend
    # to that one are further off, in whichever way they are computed: so several prompts count.
    errors: list[float] = []
    for number in range(5 if name in SPARSE else 1):
        tokens = prompt(LENGTH + number)[number:]
        exact = logits(in_full, tokens)
        stock = logits(rounded, tokens)
        assert not called
        with_kernels = logits(fused, tokens)
        expected = {kernel for kernel, names in USED.items() if name in names}
        if name in GATED_TOGETHER and has_product_kernel():
            expected = expected - GATED_TOGETHER[name] | {"gate_chosen"}
        if not by_pairs:
            expected -= {"attend"}
        assert called == expected
        rounding = (stock - exact).abs().median()
        errors.append(float((with_kernels - exact).abs().median() / rounding))
    assert statistics.median(errors) < 1.4


def test_8_bit_cache_uses_stock_operators(
    checkpoint: SaveModel, driver: LoadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = _count_calls(monkeypatch)
    directory = checkpoint("llama").directory
    engine = driver(directory, dtype="bfloat16", kv_cache_dtype="fp8", fused=True)
    assert isinstance(engine.runner.model.attention, PagedAttention)
    called.clear()
    engine.start(0, [1, 2, 3])
    engine.prefill(0)
    engine.decode(2, 0)
    assert called == {"rms_norm", "swiglu"}


def test_batch_invariant_prompts_and_decodes_use_same_attention(
    checkpoint: SaveModel, driver: LoadDriver, by_pairs: bool
) -> None:
    directory = checkpoint("llama").directory
    invariant = driver(directory, dtype="bfloat16", fused=True, batch_invariant=True)
    plain = driver(directory, dtype="bfloat16", fused=True)
    kinds = [type(each.runner.model.attention) for each in (invariant, plain)]
    expected: list[type] = [PagedAttention, PagedAttention]
    if by_pairs:
        expected = [PatchAttention, PatchAttention if is_invariance_free() else FusedAttention]
    assert kinds == expected


def test_capped_scores_are_computed_by_kernel_or_refused(
    checkpoint: SaveModel, driver: LoadDriver, by_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariance, "has_patch_attention", lambda _spec: by_pairs)
    directory = checkpoint("gemma2").directory
    load = partial(driver, directory, dtype="bfloat16", batch_invariant=True)
    refused = pytest.raises(UnsupportedModel, match="caps attention scores")
    with nullcontext() if by_pairs else refused:
        assert isinstance(load(fused=True).runner.model.attention, PatchAttention)
    with refused:
        load()
    monkeypatch.setattr(invariance, "has_patch_attention", lambda _spec: True)
    monkeypatch.setattr(choice, "_agree", lambda *_: False)
    with refused:
        load(fused=True)


@HAS_PAIRS
def test_attention_that_differs_from_torch_uses_stock_operators(
    checkpoint: SaveModel,
    driver: LoadDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    as_zen4: None,
) -> None:
    def wrong(_attention: Any, queries: Tensor, *_: Any) -> Tensor:
        return queries.new_zeros(len(queries), queries.shape[1] * queries.shape[2])

    monkeypatch.setattr(PatchAttention, "attend", wrong)
    engine = driver(checkpoint("llama").directory, dtype="bfloat16", fused=True)
    assert isinstance(engine.runner.model.attention, PagedAttention)
    assert "operators of attention are torch's own: fused kernels differ" in caplog.text


@HAS_PAIRS
def test_uncompilable_attention_uses_stock_operators(
    checkpoint: SaveModel,
    driver: LoadDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    as_zen4: None,
) -> None:
    def of_no_type(pointer: Any) -> None:
        pointer.attend()

    monkeypatch.setattr(patches, "patch_attention", lambda *_shape: Kernel(of_no_type, 1))
    engine = driver(checkpoint("llama").directory, dtype="bfloat16", fused=True)
    assert isinstance(engine.runner.model.attention, PagedAttention)
    assert "operators of attention are torch's own" in caplog.text
    engine.start(0, [1, 2, 3])
    engine.prefill(0)
    engine.decode(2, 0)


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    called: set[str] = set()

    def watch(owner: object, name: str, label: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            called.add(label)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("rms_norm", "rms_norm_heads", "swiglu", "rotate_and_store"):
        watch(CompiledKernels, name, name)
    watch(experts, "gate_chosen", "gate_chosen")
    watch(PatchAttention, "attend", "attend")
    return called
