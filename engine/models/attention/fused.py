"""Paged attention on CPUs: a kernel for decodes, torch's operators for prompts."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.attention.interface import Attention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.plan import AttentionPlan
from engine.models.attention.rows import AttentionRows


class FusedPlan(msgspec.Struct, frozen=True):
    """Separate plans for decodes and for other rows."""

    decodes: Any
    """The kernel's plan; None without decodes."""
    others: AttentionPlan | None
    """Plan of the stock operators; None if all rows are decodes."""
    other_tokens: Tensor | None
    """[tokens] indices of the non-decode tokens; None if all rows are of one kind."""


class FusedAttention:
    """Attention for one shape of heads: decodes by a kernel, other rows by stock operators."""

    def __init__(self, stock: PagedAttention, decodes: Attention) -> None:
        self._stock = stock
        self._decodes = decodes

    def plan(self, rows: AttentionRows, window: int | None) -> FusedPlan:
        """Separate decodes from other rows; `window` limits how far back a token attends."""
        single = rows.counts == 1
        if not single.any():
            return FusedPlan(None, self._stock.plan(rows, window), None)
        if single.all():
            return FusedPlan(self._decodes.plan(rows, window), None, None)
        others = _some(rows, ~single)
        ends = np.cumsum(others.counts)
        begins = ends - others.counts
        within = np.arange(ends[-1]) - np.repeat(begins, others.counts)
        tokens = np.repeat(others.first_token, others.counts) + within
        rest = msgspec.structs.replace(others, first_token=begins)
        return FusedPlan(
            self._decodes.plan(_some(rows, single), window),
            self._stock.plan(rest, window),
            torch.from_numpy(tokens),
        )

    def attend(
        self, queries: Tensor, cache: Tensor, plan: FusedPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend as specified in `engine.models.attention.interface`."""
        if plan.decodes is None:
            assert plan.others is not None
            return self._stock.attend(queries, cache, plan.others, sinks)
        out = self._decodes.attend(queries, cache, plan.decodes, sinks)
        if plan.others is not None and plan.other_tokens is not None:
            some = queries.index_select(0, plan.other_tokens)
            out.index_copy_(
                0, plan.other_tokens, self._stock.attend(some, cache, plan.others, sinks)
            )
        return out


def _some(rows: AttentionRows, chosen: npt.NDArray[np.bool_]) -> AttentionRows:
    return msgspec.structs.replace(
        rows,
        starts=rows.starts[chosen],
        counts=rows.counts[chosen],
        first_token=rows.first_token[chosen],
        block_tables=rows.block_tables[chosen],
        other_tables=(),
    )
