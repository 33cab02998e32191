"""Products with 8-bit weights and floating-point activations, on processors that need them.

Where sums of products of two 8-bit integers overflow, activations would have to be rounded to 7
bits, which costs a model more than all rounding of its weights. For some rows torch multiplies
such weights as they are; for more it pays to convert some of them at a time to float32.
"""

import torch
from torch import Tensor

_FEW_ROWS, _FEW_ROWS_OF_LARGE = 16, 8
"""Up to so many rows torch's product takes less time than to convert the weights. It reads them
again for every four rows, which takes longer if they come from memory."""
_LARGE = 1 << 22
"""Weights from which on they do."""
_ALIGNED_INPUTS = 8
"""torch's product reads beyond weights whose inputs are no multiple of it."""
_AT_ONCE = 1 << 20
"""Maximum weights that are converted at once: 4 MB in float32."""
_MAX_OUTPUTS, _MIN_OUTPUTS = 512, 64


class Int8WeightLinear:
    """A matrix product with 8-bit weights; activations come and go in their own type."""

    __slots__ = ("_bias", "_few_rows", "_float_scales", "_outputs_at_once", "_scales", "_weight")

    def __init__(self, integers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Take a weight: integers int8 [out, in], scales float32 [out]."""
        self._weight = integers
        self._float_scales = scales
        self._scales = scales.bfloat16()
        self._bias = bias
        inputs = max(1, integers.shape[1])
        few_rows = _FEW_ROWS if integers.numel() < _LARGE else _FEW_ROWS_OF_LARGE
        self._few_rows = few_rows if inputs % _ALIGNED_INPUTS == 0 else 0
        self._outputs_at_once = min(_MAX_OUTPUTS, max(_MIN_OUTPUTS, _AT_ONCE // inputs))

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]; of few rows with an error of bfloat16."""
        if len(x) <= self._few_rows:
            inputs = x.to(torch.bfloat16).contiguous()
            product = torch._weight_int8pack_mm(inputs, self._weight, self._scales)
        else:
            product = self._converted(x.float())
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)

    def _converted(self, x: Tensor) -> Tensor:
        outputs, inputs = self._weight.shape
        product = x.new_empty(len(x), outputs)
        converted = x.new_empty(min(self._outputs_at_once, outputs), inputs)
        for first in range(0, outputs, self._outputs_at_once):
            part = self._weight[first : first + self._outputs_at_once]
            some = converted[: len(part)].copy_(part)
            torch.mm(x, some.T, out=product[:, first : first + len(part)])
        return product.mul_(self._float_scales)
