"""Building blocks against plain formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.kernels.reference import rms_norm, rotate
from engine.models.attention.rotary import rotary_table, rotation
from engine.models.module import add_to
from engine.models.moe import Expert, GroupedExperts, Router, SparseMlp, StackedExperts
from engine.models.products.dense import DenseLinear, PackedLinear, prepare_linear
from engine.models.spec import RopeSpec

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_prepared_linear_equals_the_plain_product(
    dtype: torch.dtype, rows: int, biased: bool
) -> None:
    weight, x = torch.randn(48, 40).to(dtype), torch.randn(rows, 40).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    result = prepare_linear(weight, bias)(x)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert torch.allclose(result, F.linear(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_linear_that_cannot_be_packed_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise RuntimeError("this processor cannot")

    monkeypatch.setattr("engine.models.products.dense.PackedLinear", refuse)
    monkeypatch.setattr("engine.models.products.dense._packable", {})
    assert isinstance(prepare_linear(torch.randn(8, 8)), DenseLinear)


def test_linear_whose_packed_product_differs_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.products.dense._packable", {})
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: torch.zeros(x.shape[0], 8))
    assert isinstance(prepare_linear(torch.randn(8, 8)), DenseLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("has_unit", [False, True])
def test_a_product_is_added_to_sums(
    dtype: torch.dtype, rows: int, biased: bool, has_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.products.dense.has_matrix_unit", lambda: has_unit)
    monkeypatch.setattr("engine.models.products.dense._packable", {})
    monkeypatch.setattr("engine.models.products.dense._ADDING_WEIGHTS", 0)
    weight, x = torch.randn(48, 40).to(dtype), torch.randn(rows, 40).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    sums = torch.randn(rows, 48).to(dtype)
    expected = sums.float() + x.float() @ weight.float().T + (0 if bias is None else bias.float())
    result = add_to(sums, prepare_linear(weight, bias), x)
    assert result.dtype == dtype
    assert result.shape == sums.shape
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert torch.allclose(result.float(), expected, rtol=tolerance, atol=tolerance)


def test_an_mlp_is_added_to_sums_like_any_function() -> None:
    gate_up, down = torch.randn(24, 16).bfloat16(), torch.randn(16, 12).bfloat16()
    x, sums = torch.randn(5, 16).bfloat16(), torch.randn(5, 16).bfloat16()
    mlp = Expert(prepare_linear(gate_up), prepare_linear(down))
    added = add_to(sums.clone(), mlp, x)
    plain = add_to(sums.clone(), lambda rows: mlp(rows), x)
    assert torch.equal(plain, sums + mlp(x))
    assert torch.allclose(added, plain, rtol=2e-2, atol=2e-2)


def test_packed_product_with_other_sums_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.products.dense._packable", {})
    monkeypatch.setattr(PackedLinear, "add_to", lambda self, sums, x: sums)
    assert isinstance(prepare_linear(torch.randn(8, 8)), DenseLinear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_normalized_like_few(dtype: torch.dtype) -> None:
    width = 96
    rows = (torch.get_num_threads() << 18) // width + 5
    x, weight = torch.randn(rows, width).to(dtype), torch.rand(width).to(dtype)
    many = rms_norm(x, weight, 1e-6)
    few = torch.cat([rms_norm(some, weight, 1e-6) for some in torch.split(x, 100)])
    assert many.dtype == dtype
    assert torch.equal(many, few)


@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1.0, 1e15])
def test_rms_norm_of_small_and_large_states_is_accurate(scale: float) -> None:
    x, weight = torch.randn(3, 64, dtype=torch.float64) * scale, torch.ones(64)
    expected = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(rms_norm(x.float(), weight, 1e-6), expected.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    ],
    ids=str,
)
def test_rotation_equals_the_reference(scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, **scaling}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters=parameters,
    )
    positions = torch.tensor([0, 1, 17, 500, 1023])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    x = torch.randn(5, 3, 128)
    turned = torch.cat((-x[..., 64:], x[..., :64]), dim=-1)
    expected = x * cos[0].unsqueeze(1) + turned * sin[0].unsqueeze(1)

    fields = {name: value for name, value in scaling.items() if name != "rope_type"}
    rope = RopeSpec(theta=10000.0, kind=scaling["rope_type"], **fields)
    table = rotary_table(rope, 128, 1024, torch.float32, CPU)
    assert torch.allclose(rotate(x, *rotation(table, positions)), expected, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_sparse_mlp_is_the_weighted_sum_of_chosen_experts(normalize: bool) -> None:
    x, score = torch.randn(20, 16), torch.randn(7, 16)
    score[3] = -score.sum(0) * 50  # an expert that hardly anyone chooses
    gate_up, down = torch.randn(7, 24, 16), torch.randn(7, 16, 12)
    grouped = GroupedExperts(
        [Expert(DenseLinear(gate_up[e], None), DenseLinear(down[e], None)) for e in range(7)]
    )
    stacked = StackedExperts(gate_up, down.transpose(1, 2).contiguous())
    router = Router(DenseLinear(score, None), 7, 3, normalize=normalize)

    probabilities = torch.softmax(x @ score.T, dim=-1)
    expected = torch.zeros_like(x)
    for token in range(20):
        weights, chosen = probabilities[token].topk(3)
        weights = weights / weights.sum() if normalize else weights
        for weight, expert in zip(weights, chosen, strict=True):
            inner = gate_up[expert] @ x[token]
            inner = F.silu(inner[:12]) * inner[12:]
            expected[token] += weight * (down[expert] @ inner)
    for experts in (grouped, stacked):
        mlp = SparseMlp(router, experts)
        assert torch.allclose(mlp(x), expected, atol=1e-3)
        assert torch.allclose(mlp(x[:1]), expected[:1], atol=1e-3)
        many = mlp(x.repeat(5, 1))
        assert torch.allclose(many, expected.repeat(5, 1), atol=1e-3)
