"""Finds attention variants that are bit-identical to computing each token alone.

The order in which torch's operators sum depends on shapes. It is undocumented and differs between
processors, so variants are compared on random numbers when a model is loaded.
"""

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.processor import has_matrix_unit
from engine.models.attention.key_widths import (
    PROBED_KEYS,
    STEP,
    TILE,
    KeyWidths,
    find_widths,
)
from engine.models.attention.plan import TOKENS_AT_ONCE, WHOLE_QUERIES

logger = logging.getLogger(__name__)

_KEYS_OF_ONE_PRODUCT = (64, 192, 576)
"""Key counts at which one product is compared; torch's operator processes 512 keys at a time."""
_VALUES_OF_ONE_PRODUCT = 1 << 18
"""Values compared per key count: if a matrix unit sums in another order, one of 2,000 to 100,000
values differs after rounding to 16 bits."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps queries [tokens, heads, head_dim], keys with values, and an additive mask to [tokens, heads
* head_dim]."""


class _Probe(NamedTuple):
    queries: Tensor
    kv: Tensor


@dataclass(eq=False)
class BitComparison:
    """Compares ways to compute attention for several tokens in one call, for one shape of heads."""

    by_token: Way
    """Tokens separately: KV [keys, parts, kv_heads, head_dim], mask [tokens, 1, 1, keys]."""
    in_one_product: Way
    """All queries in one product; mask [queries, keys]."""
    in_padded_rows: Way
    """The same number of queries per row: KV [rows, keys, ...], mask [rows, queries, keys]."""
    _: KW_ONLY
    num_heads: int
    kv_shape: tuple[int, ...]
    """Shape of one token's keys and values."""
    dtype: torch.dtype
    """In which they are compared."""

    def key_widths(self) -> KeyWidths | None:
        """Return the key counts for which products of several tokens give the bits of each alone.

        The products have any multiple of `WHOLE_QUERIES` queries. None if there are no such counts.
        """
        probe = self._probe(PROBED_KEYS)
        agrees = all(
            self._is_equal(probe, num_keys, count)
            for num_keys in (*range(STEP, TILE, STEP), TILE + STEP, PROBED_KEYS)
            for count in (WHOLE_QUERIES, STEP)
        )
        return find_widths(partial(self._each, probe)) if agrees else None

    def of_padded_rows(self, widths: KeyWidths) -> bool:
        """Return whether tokens in rows padded to one shape get the same bits as alone."""
        probe = self._probe(TILE)
        middle = widths.alike[len(widths.alike) // 2]
        agrees = all(
            self._is_equal_in_rows(probe, num_keys, count)
            for num_keys in {widths.alike[0], middle, TILE}
            for count in {WHOLE_QUERIES, min(STEP, num_keys)}
        )
        if not agrees:
            logger.debug("attention: short prompts are computed one by one")
        return agrees

    def of_one_product(self) -> bool:
        """Return whether `TOKENS_AT_ONCE` tokens in one product get the same bits as alone."""
        if self.dtype != torch.float32 and not has_matrix_unit():
            return False
        probes = -(-_VALUES_OF_ONE_PRODUCT // (TOKENS_AT_ONCE * self.num_heads * self.kv_shape[-1]))
        agrees = all(
            self._is_equal(self._probe(num_keys, seed), num_keys, TOKENS_AT_ONCE)
            for num_keys in _KEYS_OF_ONE_PRODUCT
            for seed in range(probes)
        )
        if not agrees:
            logger.debug("attention: tokens of a prompt are not computed in one product")
        return agrees

    def _probe(self, num_keys: int, seed: int = 0) -> _Probe:
        """Return queries, keys and values for `num_keys` tokens."""
        generator = torch.Generator().manual_seed(seed)
        shapes = (self.num_heads, self.kv_shape[-1]), self.kv_shape
        return _Probe(
            *(torch.randn(num_keys, *shape, generator=generator).to(self.dtype) for shape in shapes)
        )

    def _mask(self, positions: Tensor, num_keys: int) -> Tensor:
        mask = torch.zeros(len(positions), num_keys, dtype=self.dtype)
        return mask.masked_fill_(torch.arange(num_keys) > positions.unsqueeze(1), float("-inf"))

    def _each(self, probe: _Probe, positions: Tensor, num_keys: int) -> Tensor:
        mask = self._mask(positions, num_keys)[:, None, None]
        return self.by_token(probe.queries[positions], probe.kv[:num_keys], mask)

    def _is_equal(self, probe: _Probe, num_keys: int, count: int) -> bool:
        """Return whether the last tokens get the same bits together, separately and alone."""
        positions = torch.arange(num_keys - count, num_keys)
        mask = self._mask(positions, num_keys)
        one = self.in_one_product(probe.queries[positions], probe.kv[:num_keys], mask)
        single = self._each(probe, positions[:1], num_keys)
        return torch.equal(one, self._each(probe, positions, num_keys)) and torch.equal(
            one[:1], single
        )

    def _is_equal_in_rows(self, probe: _Probe, num_keys: int, count: int) -> bool:
        """Return whether tokens in three padded rows get the same bits as separately.

        The rows are at the start, middle and end; separately, tokens have more keys.
        """
        each = torch.arange(count)
        positions = torch.cat((each, num_keys // 2 + each // 2, num_keys - count + each))
        kv = probe.kv[:num_keys].expand(3, -1, -1, -1, -1)
        mask = self._mask(positions, num_keys).view(3, count, -1)
        shared = self.in_padded_rows(probe.queries[positions], kv, mask)
        return torch.equal(shared, self._each(probe, positions, TILE))
