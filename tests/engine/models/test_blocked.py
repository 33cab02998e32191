"""Products of 16-bit weights in blocks of outputs, on processors without 16-bit arithmetic."""

import pytest
import torch

from engine.models.products import blocked
from engine.models.products.blocked import BlockedLinear, fits_blocks
from engine.models.products.dense import DenseLinear, prepare_linear
from engine.models.products.row_blocks import RowBlocks, probe_rows

pytestmark = pytest.mark.usefixtures("inference")

TYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "biased", "alike"),  # every pair of values
    [
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
        (torch.float16, True, True),
        (torch.float16, False, False),
    ],
)
@pytest.mark.parametrize(("outputs", "width"), [(64, 8), (60, 640), (1100, 64), (66, 17000)])
def test_results_equal_float32_rounded_once(
    dtype: torch.dtype, biased: bool, alike: bool, outputs: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, width, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    product = BlockedLinear(weight, bias, alike=alike)
    for rows in (0, 1, 2, 3, 8, 9, 16, 65, 256, 300):
        x = (torch.randn(rows, width, generator=generator) / width**0.5).to(dtype)
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        result = product(x)
        assert result.dtype == dtype
        assert result.shape == exact.shape
        error = 2**-8 if bias is None or rows > 8 else 2**-6  # a bias is added to a rounded sum
        assert ((result.double() - exact).abs() <= exact.abs() * error + 0.01).all()
        assert torch.allclose(result.double(), exact, rtol=error, atol=0.02)


@pytest.mark.parametrize("most", [1, 700, 1 << 18])
def test_number_of_parts_does_not_change_sums_of_few_rows(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    weight, x = torch.randn(640, 96).bfloat16(), torch.randn(5, 96).bfloat16()
    whole = BlockedLinear(weight, None)(x)
    monkeypatch.setattr(blocked, "_MAX_EMBEDDINGS", most)
    blocked._max_bags.cache_clear()
    try:
        assert torch.equal(BlockedLinear(weight, None)(x), whole)
    finally:
        blocked._max_bags.cache_clear()


def test_a_row_does_not_depend_on_the_few_others_of_its_step() -> None:
    product, x = BlockedLinear(torch.randn(192, 500).bfloat16(), None), torch.randn(8, 500)
    together = product(x.bfloat16())
    for row in range(8):
        assert torch.equal(product(x[row : row + 1].bfloat16())[0], together[row])


def test_rows_are_blocked_if_few_are_computed_like_many() -> None:
    product = BlockedLinear(torch.randn(192, 512).bfloat16(), None, alike=True)
    x = probe_rows(512, torch.bfloat16)
    by_rows = RowBlocks(product, x)
    together = by_rows(x[:60])
    for rows in (1, 2, 5, 17):
        assert torch.equal(by_rows(x[:rows]), together[:rows])


@pytest.mark.parametrize("dtype", TYPES)
def test_embeddings_are_looked_up_in_the_blocks(dtype: torch.dtype) -> None:
    weight = torch.randn(200, 48).to(dtype)
    token_ids = torch.tensor([0, 63, 64, 199, 64])
    assert torch.equal(BlockedLinear(weight, None).rows(token_ids), weight[token_ids])


@pytest.mark.usefixtures("avx2_alone")
@pytest.mark.parametrize("dtype", TYPES)
def test_unpackable_weights_are_stored_in_blocks(dtype: torch.dtype) -> None:
    assert type(prepare_linear(torch.randn(640, 64).to(dtype))) is BlockedLinear
    assert type(prepare_linear(torch.randn(1000, 64).to(dtype))) is BlockedLinear


@pytest.mark.usefixtures("avx2_alone")
def test_weights_that_need_much_padding_are_not_blocked() -> None:
    assert not fits_blocks(torch.randn(65, 64).bfloat16())
    assert not fits_blocks(torch.randn(8, 64).bfloat16())


def test_blocks_need_a_library_with_fast_sums(avx2_alone: pytest.MonkeyPatch) -> None:
    avx2_alone.setattr(blocked, "_has_fast_sums", lambda: False)
    assert not fits_blocks(torch.randn(64, 64).bfloat16())


@pytest.mark.parametrize("failure", ["differs", "refuses"])
def test_sums_are_compared_with_a_product_before_they_are_used(
    avx2_alone: pytest.MonkeyPatch, failure: str
) -> None:
    def sums(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        if failure == "refuses":
            raise RuntimeError("embedding_bag has no kernel for this type")
        return x.new_zeros(len(x), len(blocks) * 64)

    avx2_alone.setattr(blocked, "_weighted_sums", sums)
    assert not fits_blocks(torch.randn(64, 64).bfloat16())


@pytest.mark.usefixtures("avx2_alone")
def test_float32_weights_stay_as_they_were() -> None:
    assert type(prepare_linear(torch.randn(640, 64))) is DenseLinear
