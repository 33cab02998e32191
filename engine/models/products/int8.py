"""Products in 8-bit integers on CPUs: weights scaled per output, activations per token.

Both are rounded to symmetric integers: weights once at load, activations at each call by each
token's maximum. So a token's result does not depend on its neighbours in the batch. oneDNN's
product takes unsigned activations: they are stored with a zero point added, which it subtracts
again. x86 processors without VNNI add pairs of 8-bit products in 16 bits, which overflow: there
activations stay floats (`Int8WeightLinear`).
"""

from functools import cache

import torch
from torch import Tensor

from engine.kernels.processor import has_16_bit_kernels
from engine.models.module import Module, Rows, weight_of
from engine.models.products.converted import converted_product
from engine.models.products.row_padding import pad_rows

_FEW_ROWS, _FEW_ROWS_OF_LARGE = 16, 8
"""Maximum rows for which torch's product is faster than converting the weights. It rereads them for
every four rows, which takes longer if they come from memory."""
_LARGE = 1 << 22
"""Minimum number of weights that do not fit the caches."""
_ALIGNED_INPUTS = 16
"""torch's product reads beyond weights whose inputs are not a multiple of this (AVX2: of 8)."""


class Int8WeightLinear(Module):
    """A matrix product with 8-bit weights and floating-point activations.

    For processors on which sums of 8-bit products overflow: rounding activations to 7 bits would
    cost more accuracy than all rounding of weights. For few rows torch multiplies the 8-bit weights
    directly; for more it pays to convert some of them at a time to float32.
    """

    weight: Tensor
    scales: Tensor
    _short_scales: Tensor

    def __init__(self, integers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Initialize from a weight: integers int8 [out, in], scales float32 [out]."""
        super().__init__()
        self.register_buffer("weight", integers)
        self.register_buffer("scales", scales)
        self.register_buffer("_short_scales", scales.bfloat16(), persistent=False)
        self.bias = None if bias is None else weight_of(bias)
        few_rows = _FEW_ROWS if integers.numel() < _LARGE else _FEW_ROWS_OF_LARGE
        self._few_rows = few_rows if integers.shape[1] % _ALIGNED_INPUTS == 0 else 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]; few rows with bfloat16 precision."""
        if len(x) <= self._few_rows:
            inputs = x.to(torch.bfloat16).contiguous()
            product = torch._weight_int8pack_mm(inputs, self.weight, self._short_scales)
        else:
            product = converted_product(x, self.weight).mul_(self.scales)
        return (product if self.bias is None else product.add_(self.bias)).to(x.dtype)


_LARGEST = 127
_ZERO_POINT = 128
"""Offset added to the integers of activations."""
_SMALLEST_RANGE = 1e-30
"""Rows with a smaller maximum are treated as zero."""
_NOT_ROUNDED = (None, 1.0, 0)
_PLAIN: tuple[str, list[float], str] = ("none", [], "")
"""Arguments of oneDNN's product: no bias, no output quantization, no post-operation."""
_TOLERANCE = 0.05
"""Maximum relative error of a correct product; rounding causes 0.01."""


@cache
def takes_8_bit_activations() -> bool:
    """Return whether sums of 8-bit products do not overflow on this processor.

    Raises:
        RuntimeError, AttributeError: this build of torch has no such product.
    """
    width = 64
    weight = torch.full((8, width), _LARGEST, dtype=torch.int8)
    largest = _LARGEST + _ZERO_POINT
    rows = torch.full((1, width), largest, dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = torch.ones(8), torch.zeros(8, dtype=torch.int64)
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        rows, 1.0, 0, packed, scales, zeros, *_NOT_ROUNDED, torch.float32, *_PLAIN
    )
    return bool((product == largest * _LARGEST * width).all())


class Int8Unsupported(ValueError):
    """This device or build has no 8-bit product."""


class Int8Linear(Module):
    """A matrix product with 8-bit weights; activations keep their dtype outside."""

    weight: Tensor
    scales: Tensor
    _zero_points: Tensor

    def __init__(
        self, integers: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Pack integers int8 [out, in] and scales float32 [out], for activations in `dtype`.

        Raises:
            RuntimeError, AttributeError: this build of torch has no such product.
        """
        super().__init__()
        self.register_buffer("weight", torch.ops.onednn.qlinear_prepack(integers, None))
        self._num_weights = integers.numel()
        self.register_buffer("scales", scales)
        zeros = torch.zeros(len(integers), dtype=torch.int64)
        self.register_buffer("_zero_points", zeros, persistent=False)
        self.bias = None if bias is None else weight_of(bias)
        is_bfloat16 = dtype == torch.bfloat16 and has_16_bit_kernels()
        self._result_type = torch.bfloat16 if is_bfloat16 else torch.float32
        self._product = torch.ops.onednn.qlinear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        largest = x.abs().amax(dim=-1, keepdim=True).float().clamp_min_(_SMALLEST_RANGE)
        shifted = x.to(torch.float32, copy=True).mul_(_LARGEST / largest).add_(_ZERO_POINT + 0.5)
        # Truncation after adding one half rounds to nearest.
        rows = pad_rows(shifted.to(torch.uint8), self._num_weights)
        product: Tensor = self._product(
            rows,
            1.0,
            _ZERO_POINT,
            self.weight,
            self.scales,
            self._zero_points,
            *_NOT_ROUNDED,
            self._result_type,
            *_PLAIN,
        )[: len(x)]
        product.mul_(largest.mul_(1.0 / _LARGEST))
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype)


_checked: set[tuple[torch.dtype, int, int]] = set()


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] as integers int8 [out, in] and scales float32 [out]."""
    scales = weight.abs().amax(dim=1).float().clamp_min_(_SMALLEST_RANGE) / _LARGEST
    return (weight / scales.unsqueeze(1)).round_().to(torch.int8), scales


def prepare_int8(weight: Tensor, bias: Tensor | None = None) -> Rows:
    """Return the product with quantized weights; each dtype and shape is tested once.

    Weights are dense [out, in]; the caller drops the original.

    Raises:
        Int8Unsupported: the weights are not on the CPU, or its product is missing or wrong.
    """
    if weight.device.type != "cpu":
        raise Int8Unsupported("--quantization int8 is for models on the CPU (--device cpu)")
    key = (weight.dtype, weight.shape[0], weight.shape[1])
    try:
        integers, scales = rounded(weight)
        linear: Rows
        if takes_8_bit_activations():
            linear = Int8Linear(integers, scales, bias, weight.dtype)
        else:
            linear = Int8WeightLinear(integers, scales, bias)
        if key not in _checked:
            _check(linear, weight, bias)
            _checked.add(key)
    except (AttributeError, RuntimeError) as error:
        raise Int8Unsupported(
            f"--quantization int8: this build of torch cannot do it here: {error}"
        ) from error
    return linear


def _check(linear: Rows, weight: Tensor, bias: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
    expected = x.float() @ weight.float().T
    if bias is not None:
        expected += bias.float()
    error = (linear(x).float() - expected).norm() / expected.norm().clamp_min(_SMALLEST_RANGE)
    if not bool(error <= _TOLERANCE):
        raise RuntimeError(f"a product of {list(weight.shape)} is off by {float(error):.2g}")
