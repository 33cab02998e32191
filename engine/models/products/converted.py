"""Products of 16-bit weights in float32, for processors without 16-bit float arithmetic.

Where oneDNN has no 16-bit product either (x86 with only AVX2), torch's own is many times slower
than float32. Converting some outputs' weights at a time, into a buffer that stays in the caches,
costs little compared with the product and almost no memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.processor import float32_is_faster
from engine.models.module import Module, weight_of

_FEW_ROWS = 2
"""Maximum rows for which using the weights directly is faster than converting them."""
_MAX_WEIGHTS = 1 << 20
"""Maximum weights converted at once: 4 MB in float32."""
_MAX_OUTPUTS, _MIN_OUTPUTS = 512, 64


class ConvertedLinear(Module):
    """A matrix product whose 16-bit weights are converted on use."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Initialize from a dense [out, in] weight of 16-bit floats, stored unchanged."""
        super().__init__()
        self.weight = weight_of(weight)
        self.bias = None if bias is None else weight_of(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        if len(x) <= _FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        product = converted_product(x, self.weight)
        if self.bias is not None:
            product += self.bias
        return product.to(x.dtype)


def converted_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of rows [rows, in] and a weight [out, in] of any dtype, in float32.

    Converts only some outputs' weights to float32 at a time.
    """
    num_outputs, width = weight.shape
    at_once = min(_MAX_OUTPUTS, max(_MIN_OUTPUTS, _MAX_WEIGHTS // max(1, width)))
    inputs = x.float()
    product = inputs.new_empty(len(x), num_outputs)
    converted = inputs.new_empty(min(at_once, num_outputs), width)
    for first in range(0, num_outputs, at_once):
        part = weight[first : first + at_once]
        some = converted[: len(part)].copy_(part)
        torch.mm(inputs, some.T, out=product[:, first : first + len(part)])
    return product


def is_worth_converting(weight: Tensor) -> bool:
    """Return whether products of these weights, which cannot be packed, are faster in float32."""
    return weight.device.type == "cpu" and weight.dtype.itemsize == 2 and float32_is_faster()
