"""The LM head uses more threads for many rows and generates the same tokens."""

import pytest
import torch

from engine.runner.head_threads import head_threads

LARGE, SMALL = 1 << 27, 1 << 20


@pytest.mark.parametrize(
    ("usual", "most", "multiplications", "expected"),
    [(1, 2, LARGE, 2), (1, 2, SMALL, 1), (1, 1, LARGE, 1), (3, 2, LARGE, 3)],
)
def test_only_large_products_get_more_threads(
    usual: int, most: int, multiplications: int, expected: int
) -> None:
    torch.set_num_threads(usual)
    with head_threads(most, multiplications):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == usual


def test_threads_are_as_before_after_a_failure() -> None:
    with pytest.raises(RuntimeError), head_threads(2, LARGE):
        raise RuntimeError
    assert torch.get_num_threads() == 1
