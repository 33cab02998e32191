"""Interchangeable key counts."""

import numpy as np
import pytest

from engine.models.attention.key_widths import FINE_STEP, TILE, KeyWidths

WIDTHS = range(FINE_STEP, TILE + 1, FINE_STEP)


@pytest.mark.parametrize(
    "alike",
    [list(WIDTHS), [TILE], [width for width in WIDTHS if not 208 <= width <= 368], [16, 64, TILE]],
)
def test_width_range_agrees_if_each_width_does(alike: list[int]) -> None:
    widths = KeyWidths(alike)
    all_widths = np.arange(FINE_STEP, 3 * TILE, FINE_STEP)
    each = widths.are_alike(all_widths)
    for first, fewest in enumerate(all_widths):
        tail = all_widths[first:]
        expected = np.logical_and.accumulate(each[first:])
        found = widths.same_order_between(np.full_like(tail, fewest), tail)
        assert (found == expected).all()
