"""Top-k, top-p and min-p filtering by torch's operators and by kernels."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.runner import categorical
from engine.runner.compiled_draws import drawing_for
from engine.runner.filters import WITH_TORCH, DrawFiltered, Filters, cutoff, draw_filtered
from engine.runner.slots import FloatArray, IntArray

VOCAB = 1000


@pytest.fixture(params=["torch", "kernels"])
def draw(request: pytest.FixtureRequest) -> DrawFiltered:
    return draw_filtered if request.param == "torch" else by_kernels()


@pytest.fixture(params=["filtered by torch", "filtered by kernels", "torch", "kernels"])
def any_draw(request: pytest.FixtureRequest) -> DrawFiltered:
    """Draws with filters, and draws that ignore them."""
    by_torch = request.param.endswith("torch")
    drawing = WITH_TORCH if by_torch else drawing_for(torch.bfloat16, torch.device("cpu"))
    if request.param.startswith("filtered"):
        return drawing.filtered
    return lambda logits, temperature, _, uniforms: drawing.unfiltered(
        logits, temperature, uniforms
    )


def by_kernels() -> DrawFiltered:
    made = drawing_for(torch.bfloat16, torch.device("cpu")).filtered
    assert made is not draw_filtered
    return made


def normal(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


class Rows(NamedTuple):
    logits: Tensor
    temperature: FloatArray
    filters: Filters
    uniforms: FloatArray

    def of(self, rows: IntArray) -> "Rows":
        logits = self.logits[torch.from_numpy(rows)]
        return Rows(logits, self.temperature[rows], self.filters.of(rows), self.uniforms[rows])


def some_rows(rows: int, vocab: int, forbidden: float = 0.0) -> Rows:
    """Return rows in bfloat16 with filters of all kinds, and a share of tokens forbidden."""
    random = np.random.default_rng(vocab)
    logits = 3 * normal(rows, vocab, seed=vocab)
    logits[torch.from_numpy(random.random((rows, vocab)) < forbidden)] = -torch.inf
    logits[:, vocab // 2] = 1.0
    top_k = np.minimum(random.choice([0, 1, 5, 20, 64, 500, 3000], rows), vocab)
    top_p = random.choice([1.0, 0.95, 0.8, 0.1], rows)
    filters = Filters(top_k, top_p, random.choice([0.0, 0.001, 0.05, 0.5], rows))
    temperature = random.choice([0.1, 0.7, 1.0, 2.0], rows)
    return Rows(logits.bfloat16(), temperature, filters, random.random(rows))


@pytest.mark.parametrize("forbidden", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [1, 7, 64, 300, 1000, 32_000, 50_257])
def test_kernels_and_torch_sample_the_same(vocab: int, forbidden: float) -> None:
    rows = some_rows(100, vocab, forbidden)
    drawn, expected = by_kernels()(*rows), draw_filtered(*rows)
    # A draw, or a cut, may fall on the rounded boundary between two tokens.
    assert (drawn == expected).sum() >= 99


@pytest.mark.parametrize("cached_bytes", [1, 3 * 4 * 300, 1 << 20])
@pytest.mark.parametrize("vocab", [300, 32_000])
def test_token_of_row_does_not_depend_on_other_rows(
    vocab: int, cached_bytes: int, any_draw: DrawFiltered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(categorical, "_CACHED_BYTES", cached_bytes)
    rows = some_rows(40, vocab, forbidden=0.5)
    alone = [any_draw(*rows.of(np.array([i]))).item() for i in range(40)]
    assert any_draw(*rows).tolist() == alone


def test_16_bit_logits_and_float32_copies_sample_the_same(any_draw: DrawFiltered) -> None:
    rows = some_rows(200, 4000)
    copied = rows._replace(logits=rows.logits.float())
    assert torch.equal(any_draw(*rows), any_draw(*copied))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.5), (2, 0.5, 0.2)]
)
def test_equal_logits_are_all_kept(
    top_k: int, top_p: float, min_p: float, draw: DrawFiltered
) -> None:
    logits = torch.full((60, 300), -2.0)
    logits[:, [3, 70, 71, 299]] = 5.0
    filters = Filters(np.full(60, top_k), np.full(60, top_p), np.full(60, min_p))
    drawn = draw(logits, np.ones(60), filters, np.linspace(0, np.nextafter(1, 0), 60))
    assert set(drawn.tolist()) == {3, 70, 71, 299}


def test_rows_with_no_allowed_token_get_a_valid_token(
    any_draw: DrawFiltered,
) -> None:
    logits = torch.full((3, 300), -torch.inf)
    logits[1, 200], logits[2] = torch.nan, torch.nan
    filters = Filters(np.array([5, 5, 0]), np.array([0.9, 1.0, 0.9]), np.zeros(3))
    drawn = any_draw(logits, np.ones(3), filters, np.array([0.0, 0.5, np.nextafter(1, 0)]))
    assert drawn.min() >= 0
    assert drawn.max() < 300


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("offset", [-5.0, 0.0, 300.0])
def test_kernels_find_cutoff_in_large_vocabularies(scale: float, offset: float) -> None:
    logits = (scale * normal(6, 32_000) + offset).bfloat16()
    top_k, top_p = np.array([20, 0, 5000, 0, 32_000, 0]), np.array([0.9, 0.9, 1.0, 0.001, 0.5, 1.0])
    filters = Filters(top_k, top_p, np.zeros(6))
    rows = Rows(logits, np.ones(6), filters, np.array([0.1, 0.4, 0.6, 0.9, 0.3, 0.7]))
    drawn = by_kernels()(*rows)
    assert torch.equal(drawn, by_kernels()(*rows._replace(logits=logits.float())))
    # Whatever falls between equal logits of torch's has the same logit.
    expected = draw_filtered(*rows)
    assert (logits.gather(1, drawn[:, None]) - logits.gather(1, expected[:, None])).abs().max() == 0


@pytest.mark.parametrize("candidates", [(256, 4096), (4, 300)])
def test_flat_nucleus_wider_than_the_candidates_is_exact(
    candidates: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runner.filters._CANDIDATES", candidates)
    probabilities = torch.softmax(normal(3, VOCAB) * 0.03, dim=-1)
    top_p, top_k = np.array([0.8, 0.5, 0.9]), np.array([0, 700, 0])
    cut = cutoff(probabilities, Filters(top_k, top_p, np.array([0.0, 0.0, 0.5])))
    for row in range(3):
        ordered = np.sort(probabilities[row].double().numpy())[::-1]
        total = ordered[: top_k[row] or VOCAB].sum()
        count = int(np.searchsorted(np.cumsum(ordered), top_p[row] * total)) + 1
        assert (probabilities[row].double().numpy() >= cut[row]).sum() == count
