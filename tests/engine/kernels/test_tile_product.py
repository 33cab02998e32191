"""Tile products, with a software matrix unit if the processor has none."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import products as compiled
from engine.kernels.cpu import tile_product
from engine.kernels.cpu.amx import TILE_ROWS, has_tiles, palette
from engine.kernels.cpu.compiling import Kernel, compiles_for
from engine.kernels.cpu.products import CompiledProduct, ProductKernel
from engine.kernels.cpu.results import Product
from engine.models.products.dense import PackedLinear
from tests.engine import matrix_unit
from tests.engine.fixtures import AsKind

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(not compiles_for("avx512bf16"), reason="needs AVX-512 for bfloat16"),
]

SHAPES = [(32, 32), (96, 320), (128, 544)]
"""Outputs and inputs."""
BLOCK = tile_product.BLOCK

Make = Callable[[Tensor, Tensor | None], CompiledProduct]


@pytest.fixture(scope="module")
def kernel() -> Iterator[ProductKernel]:
    with pytest.MonkeyPatch.context() as patching:
        if not has_tiles():
            matrix_unit.emulate(patching)
        compute = Kernel(tile_product._product, len(Product._fields))
        compute.compile_ahead()
        yield ProductKernel(
            compute,
            BLOCK,
            BLOCK,
            tile_product.GROUP,
            lambda rows: palette(min(rows, TILE_ROWS)).ctypes.data,
        )


@pytest.fixture
def make(kernel: ProductKernel, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that creates the product of a weight, packed as for AMX."""
    monkeypatch.setattr(torch.ops.mkldnn, "_nbytes", lambda packed: packed.nbytes)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", Tensor.data_ptr)

    def made(weight: Tensor, bias: Tensor | None) -> CompiledProduct:
        outputs, inputs = weight.shape
        blocks = weight.view(outputs // BLOCK, BLOCK, inputs // 2, 2)
        packed = blocks.transpose(1, 2).contiguous()
        return CompiledProduct(kernel, packed, outputs, inputs, bias)

    return made


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_differ_only_by_rounding(
    shape: tuple[int, int], has_bias: bool, make: Make
) -> None:
    weight = normal(*shape) * shape[1] ** -0.5
    bias = normal(shape[0]) if has_bias else None
    product = make(weight, bias)
    x, addends = normal(70, shape[1]), normal(70, shape[0])
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 49, 64, 70):
        assert torch.allclose(product(x[:rows]).double(), exact[:rows], rtol=2**-7, atol=2**-8)
        sums = product(x[:rows], addends[:rows]).double()
        added = exact[:rows] + addends[:rows].double()
        assert torch.allclose(sums, added, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_row_has_same_bits_in_batch_of_any_size(threads: int, make: Make) -> None:
    torch.set_num_threads(threads)
    product, x, addends = make(normal(96, 320), normal(96)), normal(100, 320), normal(100, 96)
    whole = product(x, addends)
    for first, end in ((0, 1), (99, 100), (7, 24), (60, 91), (0, 33), (40, 90)):
        part = slice(first, end)
        assert torch.equal(product(x[part], addends[part]), whole[part])


@pytest.mark.parametrize(
    ("kind", "faster_rows"), [("amx", 32), ("amd-avx512-bf16", 1000), ("avx512", 0)]
)
@pytest.mark.parametrize("by_rows", [False, True])
def test_kernel_is_used_up_to_measured_number_of_rows(
    kind: str, faster_rows: int, by_rows: bool, as_kind: AsKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of them if rows must be computed independently."""
    as_kind(kind)
    called: list[int] = []

    def product(x: Tensor, addends: Tensor | None = None) -> Tensor:
        called.append(len(x))
        return x.new_zeros(len(x), 64)

    monkeypatch.setattr(compiled, "compiled_product", lambda *_: product)
    weight = normal(64, 64)
    linear = PackedLinear(weight, None)
    linear.use_kernel(weight, by_rows=by_rows)
    for rows in (1, 32, 33, 400):
        linear(normal(rows, 64))
        linear.add_to(normal(rows, 64), normal(rows, 64))
    most = 1000 if by_rows else faster_rows
    assert called == [rows for rows in (1, 32, 33, 400) for _ in range(2) if rows <= most]
    assert linear.is_row_independent is (most == 1000)
