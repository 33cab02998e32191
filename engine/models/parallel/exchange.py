"""A stand-in for a group of processes that is not there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.distributed.group import Group


class MirrorGroup:
    """Stands for a group whose other ranks do the same as this one, to measure memory.

    It has what sparse layers need of `engine.distributed.group.Group`. What comes from the others
    is made of what goes to them, and means nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather_counts(self, count: int) -> list[int]:
        """Return this rank's number for every rank."""
        return [count] * self.size

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Return what was sent: as much comes as goes."""
        return list(counts)

    def all_gather_row(self, row: Sequence[int]) -> list[list[int]]:
        """Return this rank's row for every rank."""
        return [list(row)] * self.size

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows for every rank."""
        assert list(counts) == [len(rows)] * self.size
        return rows.repeat(self.size, *[1] * (rows.dim() - 1))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return as many rows as are expected, made of those that are sent."""
        assert sum(sent) == len(rows)
        if not len(rows):
            return rows.new_zeros(sum(received), *rows.shape[1:])
        return rows[torch.arange(sum(received), device=rows.device) % len(rows)]


Exchange = Group | MirrorGroup
"""Where sparse layers exchange tokens."""
