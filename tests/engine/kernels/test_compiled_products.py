"""Products by Swell's kernels on processors that support them, and by others elsewhere."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import products as compiled
from engine.kernels.cpu import tile_product
from engine.kernels.cpu.amx import has_tiles
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.products import (
    CompiledProduct,
    ProductKernel,
    compiled_product,
    product_kernel,
)
from engine.kernels.processor import Kind, has_16_bit_kernels, kind
from engine.models.loading.products import ProductLoader
from engine.models.module import Rows, add_to
from engine.models.products.dense import PackedLinear, prepare_linear
from engine.models.products.row_blocks import RowBlocks, is_row_independent, probe_rows

pytestmark = pytest.mark.usefixtures("inference")

SHAPES = [(1152, 896), (128, 320), (32, 32), (64, 4864), (64, 34), (48, 40)]
"""Outputs and inputs; the last ones are not multiples of a block."""
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 100]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def weight_of(outputs: int, inputs: int) -> Tensor:
    weight: Tensor = normal(outputs, inputs) * inputs**-0.5
    return weight


def by_rows(weight: Tensor, bias: Tensor | None) -> Rows:
    """Return a batch-invariant product, which computes each row independently."""
    product = prepare_linear(weight, bias, by_rows=True, by_kernels=True)
    if is_row_independent(product):
        return product
    return RowBlocks(product, probe_rows(weight.shape[1], torch.bfloat16))


def by_kernel(product: Rows) -> bool:
    return isinstance(product, PackedLinear) and product._compiled is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_products_differ_only_by_rounding(
    shape: tuple[int, int], has_bias: bool, one_by_one: bool
) -> None:
    weight = weight_of(*shape)
    bias = normal(shape[0]) if has_bias else None
    x, addends = normal(100, shape[1]), normal(100, shape[0])
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    product = prepare_linear(weight, bias, by_rows=one_by_one, by_kernels=True)
    for rows in ROWS:
        assert torch.allclose(product(x[:rows]).double(), exact[:rows], rtol=2**-7, atol=2**-8)
        sums = add_to(addends[:rows].clone(), product, x[:rows]).double()
        added = exact[:rows] + addends[:rows].double()
        assert torch.allclose(sums, added, rtol=2**-7, atol=2**-6), "rounded once or twice"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_row_has_same_bits_in_batch_of_any_size(shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    product = by_rows(weight_of(*shape), normal(shape[0]))
    x, addends = normal(300, shape[1]), normal(300, shape[0])
    whole = product(x)
    sums = add_to(addends.clone(), product, x)
    for first, end in ((0, 1), (299, 300), (7, 24), (100, 131), (0, 33), (40, 90), (3, 260)):
        part = slice(first, end)
        assert torch.equal(product(x[part]), whole[part])
        assert torch.equal(add_to(addends[part].clone(), product, x[part]), sums[part])


def test_threads_do_not_change_a_bit() -> None:
    product = by_rows(weight_of(128, 320), None)
    x = normal(80, 320)
    results = []
    for threads in (1, 2, 3, 7, 16):
        torch.set_num_threads(threads)
        results.append((product(x), product(x[:5])))
    for many, few in results:
        assert torch.equal(many, results[0][0])
        assert torch.equal(few, many[:5])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(value: float) -> None:
    product = by_rows(weight_of(128, 320), None)
    x = normal(40, 320)
    broken = x.clone()
    broken[20, 100] = value
    result, clean = product(broken), product(x)
    assert not result[20].isfinite().any()
    clean[20] = result[20]
    assert torch.equal(result.nan_to_num(), clean.nan_to_num())


def test_rows_can_be_non_contiguous() -> None:
    product = prepare_linear(weight_of(128, 320), None, by_kernels=True)
    x = normal(10, 640)
    assert torch.equal(product(x[:, 320:]), product(x[:, 320:].clone()))
    assert torch.equal(product(x[::2, :320]), product(x[::2, :320].clone()))
    assert product(x[:0, :320]).shape == (0, 128)


def test_onednn_products_are_unaffected_by_tile_configuration() -> None:
    """Both configure the tiles of a thread."""
    weight, x = weight_of(128, 320), normal(200, 320)
    plain = prepare_linear(weight.clone())
    before = plain(x)
    product = prepare_linear(weight, by_kernels=True)
    for rows in ROWS:
        product(x[:rows])
        assert torch.equal(plain(x), before)


def test_kernel_is_used_if_processor_has_its_features() -> None:
    kernels = {Kind.AMX: has_tiles(), Kind.AMD_AVX512_BF16: has_pairs()}
    assert (product_kernel() is not None) == kernels.get(kind(), False)
    product = prepare_linear(weight_of(128, 320), by_kernels=True)
    assert by_kernel(product) == (product_kernel() is not None)
    assert not by_kernel(prepare_linear(weight_of(128, 320)))
    assert not by_kernel(prepare_linear(weight_of(128, 320).float(), by_kernels=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_of_a_device_are_not_computed_by_kernels_of_its_cpu(device: str) -> None:
    no_checkpoint: Any = None
    products = ProductLoader(
        no_checkpoint,
        torch.bfloat16,
        torch.device(device),
        quantization=None,
        is_row_independent=False,
        bank=None,
        by_kernels=True,
    )
    assert products.by_kernels == (device == "cpu" and product_kernel() is not None)


def test_products_without_kernel_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "product_kernel", lambda: None)
    product = prepare_linear(weight_of(128, 320), by_kernels=True)
    assert not by_kernel(product)
    assert product(normal(3, 320)).shape == (3, 128)


@pytest.mark.skipif(not has_16_bit_kernels(), reason="oneDNN packs no bfloat16 without AVX-512")
def test_a_kernel_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(_product: CompiledProduct, x: Tensor, _addends: Tensor | None = None) -> Tensor:
        return torch.zeros(len(x), 128, dtype=x.dtype)

    other = ProductKernel(tile_product.product, 32, 32, 32, lambda _: 0)
    monkeypatch.setattr(compiled, "_agreed", {})
    monkeypatch.setattr(compiled, "product_kernel", lambda: other)
    monkeypatch.setattr(CompiledProduct, "__call__", wrong)
    weight = weight_of(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    with caplog.at_level(logging.WARNING):
        assert compiled_product(packed, weight, None) is None
    assert "products with [128, 64] are torch's own: " in caplog.text
    caplog.clear()
    assert compiled_product(packed, weight, None) is None
    assert not caplog.text, "it is said once"
