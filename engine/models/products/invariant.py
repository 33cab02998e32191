"""Products on CUDA devices whose rows get the same bits for any number of rows."""

import logging
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.module import Module, weight_of
from engine.models.spec import UnsupportedModel

logger = logging.getLogger(__name__)


class ProductTiles(NamedTuple):
    """Tile sizes and launch parameters of a program."""

    rows: int
    outputs: int
    inputs: int
    """Inputs multiplied at once; does not affect the summation order."""
    num_warps: int
    num_stages: int


SHAPES = (
    (64, ProductTiles(64, 32, 128, 4, 4)),
    (512, ProductTiles(64, 128, 64, 4, 4)),
    (sys.maxsize, ProductTiles(128, 256, 64, 8, 3)),
)
"""Tiles by maximum rows. For few rows, many programs read weights at memory bandwidth; for many,
large tiles reread them less often."""
Shapes = tuple[tuple[int, ProductTiles], ...]
_PROBED_ROWS = 200
_TOLERANCE = 0.01
"""Maximum difference between 16 and 32-bit products, relative to the norm."""


class InvariantLinear(Module):
    """A product with 16-bit weights as stored, [out, in]."""

    is_row_independent = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compile the kernel; many rows use larger tiles if these give the same bits.

        Raises:
            UnsupportedModel: the kernel cannot be compiled here or computes wrong results.
        """
        try:
            from engine.kernels.cuda.product import multiply
        except ImportError as error:
            raise UnsupportedModel(f"--batch-invariant: Triton is needed: {error}") from error
        super().__init__()
        self._multiply = multiply
        self.weight = weight_of(weight)
        self.bias = None if bias is None else weight_of(bias)
        key = (weight.device, weight.dtype, *weight.shape, bias is None)
        if key not in _agreeing:
            _agreeing[key] = self._find_agreeing()
        self._shapes = _agreeing[key]

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        return self._computed(x, None, self._tiles(len(x)))

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add the product to `sums`, in place, before rounding."""
        return self._computed(x, sums, self._tiles(len(x)))

    def _tiles(self, rows: int) -> ProductTiles:
        return next(tiles for max_rows, tiles in self._shapes if rows <= max_rows)

    def _computed(
        self,
        x: Tensor,
        sums: Tensor | None,
        tiles: ProductTiles,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        x = x.contiguous()
        rows, (outputs, inputs) = len(x), self.weight.shape
        out = x.new_empty(rows, outputs, dtype=dtype) if sums is None else sums
        if not rows:
            return out
        programs = -(-rows // tiles.rows) * -(-outputs // tiles.outputs)
        self._multiply[programs,](
            x,
            self.weight,
            out if self.bias is None else self.bias,
            out,
            out,
            rows,
            NUM_OUTPUTS=outputs,
            NUM_INPUTS=inputs,
            HAS_BIAS=self.bias is not None,
            HAS_SUMS=sums is not None,
            ROWS=tiles.rows,
            OUTPUTS=tiles.outputs,
            INPUTS=tiles.inputs,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        return out

    def _find_agreeing(self) -> Shapes:
        """Return the tiles that give the same bits as the first; compiles all of them."""
        device, inputs = self.weight.device, self.weight.shape[1]
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(_PROBED_ROWS, inputs, generator=generator, device=device)
        x = x.to(self.weight.dtype)
        plain = x.float() @ self.weight.float().T
        if self.bias is not None:
            plain += self.bias.float()
        agreeing: list[tuple[int, ProductTiles]] = []
        results: list[Tensor] = []
        for max_rows, tiles in SHAPES:
            # In float32, since rounding to 16 bits would hide most differences.
            product = self._computed(x, None, tiles, torch.float32)
            added = self._computed(x, plain.clone(), tiles)
            rounded = self._computed(x, None, tiles)
            for one, other in ((product, plain), (added, 2 * plain), (rounded, plain)):
                if not float((one.float() - other).norm()) <= _TOLERANCE * float(other.norm()):
                    raise UnsupportedModel("--batch-invariant: a kernel computes wrong products")
            results = results or [product, added]
            if all(map(torch.equal, results, (product, added))):
                agreeing.append((max_rows, tiles))
            else:
                logger.info("products of %s: %s give different bits", self.weight.shape, tiles)
        return (*agreeing[:-1], (sys.maxsize, agreeing[-1][1]))


_agreeing: dict[tuple[object, ...], Shapes] = {}
"""Agreeing tiles by device, dtype, shape and absence of a bias."""
