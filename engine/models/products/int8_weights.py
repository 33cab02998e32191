"""Products with 8-bit weights and floating-point activations, on processors that need them.

Where sums of products of two 8-bit integers overflow, activations would have to be rounded to 7
bits, which costs a model more than all rounding of its weights. For some rows torch multiplies
such weights as they are; for more it pays to convert some of them at a time to float32.
"""

import torch
from torch import Tensor

from engine.models.products.converted import converted_product

_FEW_ROWS, _FEW_ROWS_OF_LARGE = 16, 8
"""Up to so many rows torch's product takes less time than to convert the weights. It reads them
again for every four rows, which takes longer if they come from memory."""
_LARGE = 1 << 22
"""Weights from which on they do."""
_ALIGNED_INPUTS = 16
"""torch's product reads beyond weights whose inputs are no multiple of it (AVX2: of 8)."""


class Int8WeightLinear:
    """A matrix product with 8-bit weights; activations come and go in their own type."""

    __slots__ = ("_bias", "_few_rows", "_float_scales", "_scales", "_weight")

    def __init__(self, integers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Take a weight: integers int8 [out, in], scales float32 [out]."""
        self._weight = integers
        self._float_scales = scales
        self._scales = scales.bfloat16()
        self._bias = bias
        few_rows = _FEW_ROWS if integers.numel() < _LARGE else _FEW_ROWS_OF_LARGE
        self._few_rows = few_rows if integers.shape[1] % _ALIGNED_INPUTS == 0 else 0

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]; of few rows with an error of bfloat16."""
        if len(x) <= self._few_rows:
            inputs = x.to(torch.bfloat16).contiguous()
            product = torch._weight_int8pack_mm(inputs, self._weight, self._scales)
        else:
            product = converted_product(x, self._weight).mul_(self._float_scales)
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)
