"""Expert selection and gating by kernels, compared with torch's operators."""

import pytest
import torch
from torch import Tensor

from engine.kernels.reference import ChooseExperts, choose_experts, gating, swiglu
from engine.kernels.registry import expert_choice, has_product_kernel, swiglu_of_chosen
from tests.engine.fixtures import LoadDriver, SaveModel

CPU = torch.device("cpu")


@pytest.fixture
def choose() -> ChooseExperts:
    made = expert_choice(torch.bfloat16, CPU)
    assert made is not choose_experts
    return made


def random_scores(rows: int, experts: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * experts)
    return (3 * torch.randn(rows, columns, generator=generator)).bfloat16()[:, :experts]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("experts", "per_token", "columns"),
    [(1, 1, 64), (8, 2, 64), (8, 8, 8), (60, 4, 64), (128, 8, 128)],
)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_experts_with_largest_scores_are_chosen(
    rows: int, experts: int, per_token: int, columns: int, normalize: bool, choose: ChooseExperts
) -> None:
    scores = random_scores(rows, experts, columns)
    chosen, weights = choose(scores, per_token, normalize=normalize)
    _, expected = choose_experts(scores, per_token, normalize=normalize)
    assert torch.allclose(weights, expected, rtol=1e-5, atol=1e-7)
    # The choice among equal scores is unspecified.
    largest = scores.float().topk(per_token).values
    assert torch.equal(scores.float().gather(1, chosen), largest)
    assert all(len(set(row)) == per_token for row in chosen.tolist())


def test_a_token_s_experts_do_not_depend_on_the_others(choose: ChooseExperts) -> None:
    scores = random_scores(300, 60, 64)
    together = choose(scores, 4, normalize=True)
    for row in (0, 7, 150, 299):
        alone = choose(scores[row : row + 1], 4, normalize=True)
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


def test_nan_scores_choose_valid_experts(choose: ChooseExperts) -> None:
    scores = torch.full((2, 8), torch.nan).bfloat16()
    scores[1] = -torch.inf
    chosen, _ = choose(scores, 3, normalize=True)
    assert chosen.min() >= 0
    assert chosen.max() < 8


@pytest.mark.parametrize(("experts", "per_token", "inner"), [(1, 1, 8), (8, 2, 40), (16, 4, 300)])
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_chosen_experts_are_gated_and_weighed(
    rows: int, experts: int, per_token: int, inner: int
) -> None:
    generator = torch.Generator().manual_seed(inner)
    gate_up = (3 * torch.randn(rows, experts, 2 * inner, generator=generator)).bfloat16()
    scores = torch.randn(rows, experts, generator=generator)
    weights, chosen = scores.softmax(dim=-1).topk(per_token)
    gate = swiglu_of_chosen(torch.bfloat16, CPU)
    result = gate(gate_up, chosen, weights)
    exact = gating(swiglu)(gate_up.double(), chosen, weights)
    assert torch.allclose(result.double(), exact, rtol=2.0**-7, atol=1e-30)
    if rows:
        alone = gate(gate_up[-1:], chosen[-1:], weights[-1:])
        assert torch.equal(alone, result[-1:])


def test_nan_in_unchosen_expert_has_no_effect() -> None:
    gate_up = torch.ones(1, 3, 16).bfloat16()
    gate_up[0, 1] = torch.nan
    gate = swiglu_of_chosen(torch.bfloat16, CPU)
    made = gate(gate_up, torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.5]]))
    assert made.isfinite().all()
    assert not gate(gate_up, torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])).isfinite().all()


def test_other_types_and_devices_are_left_to_torch() -> None:
    assert expert_choice(torch.float32, CPU) is choose_experts
    assert expert_choice(torch.bfloat16, torch.device("cuda")) is choose_experts


@pytest.mark.parametrize("is_fused", [False, True])
def test_models_with_kernels_choose_experts_by_kernel(
    is_fused: bool, checkpoint: SaveModel, driver: LoadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels.cpu import experts as kernels

    calls: set[str] = set()

    def count(name: str) -> None:
        kernel = getattr(kernels, name)

        def counted(*arguments: int) -> None:
            calls.add(name)
            kernel(*arguments)

        monkeypatch.setattr(kernels, name, counted)

    count("choose")
    count("gate_chosen")
    engine = driver(checkpoint("qwen3-moe").directory, dtype="bfloat16", fused=is_fused)
    engine.start(0, [1, 2, 3])
    engine.prefill(0)
    gates = {"gate_chosen"} if has_product_kernel() else set[str]()
    assert calls == ({"choose"} | gates if is_fused else set())
