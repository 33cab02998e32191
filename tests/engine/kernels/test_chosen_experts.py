"""The kernel that computes experts for the tokens routed to them, compared with exact sums."""

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import chosen_experts as kernels
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.chosen_experts import ChosenExperts
from engine.kernels.reference import swiglu
from engine.kernels.registry import experts_kernel
from engine.models.loading.decoder import AdapterCapacity
from engine.shared.config import BUNDLED_MODEL
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel

pytestmark = [
    pytest.mark.skipif(not has_pairs(), reason="needs AVX-512 for bfloat16"),
    pytest.mark.usefixtures("as_zen4"),
]

SHAPES = [(64, 64, 1, 1), (192, 128, 8, 2), (128, 320, 16, 4), (1280, 64, 5, 5)]
"""Hidden size, inner size, number of experts, and experts per token."""


class Layer:
    """Random experts and routing."""

    def __init__(self, hidden: int, inner: int, experts: int, wanted: int, tokens: int) -> None:
        self._random = torch.Generator().manual_seed(hidden + inner)
        self.gate_up = self._normal(experts, 2 * inner, hidden) * hidden**-0.5
        self.down = self._normal(experts, hidden, inner) * inner**-0.5
        self.x = self._normal(tokens, hidden)
        scores = torch.randn(tokens, experts, generator=self._random)
        self.weights, self.chosen = scores.softmax(dim=-1).topk(wanted)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).bfloat16()

    def made(self) -> ChosenExperts:
        hidden, inner = self.down.shape[1:]
        return ChosenExperts(hidden, inner, zip(self.gate_up, self.down, strict=True))

    def exact(self) -> Tensor:
        """Return the combined output of the experts, [tokens, hidden], in float64."""
        inner = swiglu(torch.einsum("th,eih->tei", self.x.double(), self.gate_up.double()))
        made = torch.einsum("tei,ehi->teh", inner, self.down.double())
        shares = torch.zeros(made.shape[:2]).scatter_(1, self.chosen, self.weights)
        return torch.einsum("teh,te->th", made, shares.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 60, 300])
def test_results_differ_only_by_rounding(shape: tuple[int, int, int, int], tokens: int) -> None:
    layer = Layer(*shape, tokens)
    result = layer.made()(layer.x, layer.chosen, layer.weights)
    assert result.shape == layer.x.shape
    assert torch.allclose(result.double(), layer.exact(), rtol=2.0**-7, atol=2.0**-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_token_has_same_bits_in_batch_of_any_size(shape: tuple[int, int, int, int]) -> None:
    layer = Layer(*shape, 200)
    experts = layer.made()
    whole = experts(layer.x, layer.chosen, layer.weights)
    for first, end in ((0, 1), (199, 200), (7, 24), (100, 131), (3, 160)):
        rows = slice(first, end)
        part = experts(layer.x[rows], layer.chosen[rows], layer.weights[rows])
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_do_not_change_a_bit(shape: tuple[int, int, int, int]) -> None:
    layer = Layer(*shape, 90)
    experts = layer.made()
    results = []
    for number in (1, 2, 3, 5, 7):
        torch.set_num_threads(number)
        results.append(experts(layer.x, layer.chosen, layer.weights))
    assert all(torch.equal(each, results[0]) for each in results)


def test_one_expert_can_have_all_tokens() -> None:
    layer = Layer(192, 128, 8, 1, 400)
    layer.chosen.fill_(7)
    result = layer.made()(layer.x, layer.chosen, layer.weights)
    assert torch.allclose(result.double(), layer.exact(), rtol=2.0**-7, atol=2.0**-6)


def test_nan_of_expert_or_token_does_not_spread() -> None:
    layer = Layer(192, 128, 8, 2, 40)
    layer.chosen[:] = torch.tensor([[0, 2]])
    layer.chosen[9, 1] = 5
    layer.gate_up[5], layer.gate_up[1] = torch.nan, torch.nan
    layer.x[30] = torch.inf
    result = layer.made()(layer.x, layer.chosen, layer.weights)
    broken = torch.zeros(40, dtype=torch.bool)
    broken[[9, 30]] = True
    assert torch.equal(result.isfinite().all(dim=1), ~broken)
    assert torch.equal(result.isfinite().any(dim=1), ~broken)


def test_inputs_can_be_non_contiguous() -> None:
    layer = Layer(192, 128, 8, 2, 40)
    experts = layer.made()
    expected = experts(layer.x, layer.chosen, layer.weights)
    wide = torch.cat([layer.x, layer.x], dim=1)
    apart = [torch.stack([each, each], dim=1)[:, 0] for each in (layer.chosen, layer.weights)]
    assert torch.equal(experts(wide[:, 192:], *apart), expected)


@pytest.mark.parametrize(("hidden", "inner"), [(96, 64), (64, 40)])
def test_sizes_not_divisible_into_blocks_have_no_kernel(hidden: int, inner: int) -> None:
    assert experts_kernel(64, 64) is not None
    assert experts_kernel(hidden, inner) is None


def test_experts_that_differ_from_stock_ones_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: int) -> None:
        pass

    monkeypatch.setattr(kernels, "compute", wrong)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    assert experts_kernel(64, 192) is None
    assert "experts of [64, 192] are torch's own" in caplog.text


@pytest.mark.parametrize("name", ["qwen3-moe-blocks", "glm4-moe-blocks", "llama4-blocks"])
def test_models_are_as_accurate_as_with_stock_operators(
    name: str,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _count_calls(monkeypatch)
    directory = checkpoint(name).directory

    def logits(**settings: Any) -> list[Tensor]:
        engine = driver(directory, **settings)
        calls.clear()
        found = []
        # If rounding selects a different expert, later tokens change too, so use several prompts.
        for number in range(5):
            engine.start(0, prompt(70 + number)[number:])
            parts = [engine.logits({0: 60}), *(engine.logits({0: 1}) for _ in range(9))]
            found.append(torch.cat(parts).float())
        return found

    exact, stock = logits(dtype="float32"), logits(dtype="bfloat16")
    assert not calls
    with_kernels = logits(dtype="bfloat16", fused=True)
    assert calls
    errors = [
        float((kernels - right).abs().median() / (rounded - right).abs().median())
        for kernels, rounded, right in zip(with_kernels, stock, exact, strict=True)
    ]
    assert statistics.median(errors) < 1.4


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"adapters": AdapterCapacity(2, 4)}, {}]
)
def test_quantized_and_adapted_experts_use_separate_products(
    settings: dict[str, Any],
    checkpoint: SaveModel,
    driver: LoadDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _count_calls(monkeypatch)
    engine = driver(
        checkpoint("qwen3-moe-blocks").directory, dtype="bfloat16", fused=True, **settings
    )
    engine.start(0, [1, 2, 3])
    engine.prefill(0)
    assert bool(calls) == (not settings)


@pytest.mark.parametrize("is_fused", [False, True])
def test_model_with_kernels_calls_experts_kernel_once_per_layer(
    is_fused: bool, driver: LoadDriver, prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_calls(monkeypatch)
    engine = driver(BUNDLED_MODEL, dtype="bfloat16", fused=is_fused)
    engine.start(0, prompt(20))
    calls.clear()
    engine.prefill(0)
    assert len(calls) == (6 if is_fused else 0)


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of threads of each kernel call."""
    calls, compute = list[int](), kernels.compute

    def counted(threads: int, *arguments: int) -> None:
        calls.append(threads)
        compute(threads, *arguments)

    monkeypatch.setattr(kernels, "compute", counted)
    return calls
