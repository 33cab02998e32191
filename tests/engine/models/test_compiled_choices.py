"""Experts chosen by a kernel, beside those that torch's operators choose."""

import pytest
import torch
from torch import Tensor

from engine.models.compiled_choices import choosing
from engine.models.moe import ChooseExperts, choose_experts
from tests.engine.fixtures import LoadDriver, SaveModel

CPU = torch.device("cpu")


@pytest.fixture
def choose() -> ChooseExperts:
    made = choosing(torch.bfloat16, CPU)
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
def test_experts_are_those_of_the_largest_scores(
    rows: int, experts: int, per_token: int, columns: int, normalize: bool, choose: ChooseExperts
) -> None:
    scores = random_scores(rows, experts, columns)
    chosen, weights = choose(scores, per_token, normalize=normalize)
    _, expected = choose_experts(scores, per_token, normalize=normalize)
    assert torch.allclose(weights, expected, rtol=1e-5, atol=1e-7)
    # Which of equal scores are chosen is open.
    largest = scores.float().topk(per_token).values
    assert torch.equal(scores.float().gather(1, chosen), largest)
    assert all(len(set(row)) == per_token for row in chosen.tolist())


def test_a_token_s_experts_do_not_depend_on_the_others(choose: ChooseExperts) -> None:
    scores = random_scores(300, 60, 64)
    together = choose(scores, 4, normalize=True)
    for row in (0, 7, 150, 299):
        alone = choose(scores[row : row + 1], 4, normalize=True)
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


def test_scores_that_are_no_numbers_choose_experts_that_there_are(choose: ChooseExperts) -> None:
    scores = torch.full((2, 8), torch.nan).bfloat16()
    scores[1] = -torch.inf
    chosen, _ = choose(scores, 3, normalize=True)
    assert chosen.min() >= 0
    assert chosen.max() < 8


def test_other_types_and_devices_are_left_to_torch() -> None:
    assert choosing(torch.float32, CPU) is choose_experts
    assert choosing(torch.bfloat16, torch.device("cuda")) is choose_experts


@pytest.mark.parametrize("is_fused", [False, True])
def test_models_choose_by_the_kernel_where_they_have_kernels(
    is_fused: bool, checkpoint: SaveModel, driver: LoadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models.kernels import choices

    calls: list[int] = []
    kernel = choices.choose

    def counted(*arguments: int) -> None:
        calls.append(1)
        kernel(*arguments)

    monkeypatch.setattr(choices, "choose", counted)
    engine = driver(checkpoint("qwen3-moe").directory, dtype="bfloat16", fused=is_fused)
    engine.start(0, [1, 2, 3])
    engine.prefill(0)
    assert bool(calls) == is_fused
