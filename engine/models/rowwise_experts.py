"""Small experts whose results for a token do not depend on the number of tokens.

The fastest method is used for each number of tokens, since all give the same bits: a few tokens go
through each chosen expert together, more through all experts in two products, many expert by
expert.
"""

from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.models.module import Module, Rows, weight_of
from engine.models.moe import Expert
from engine.models.products.dense import DenseLinear
from engine.models.products.row_blocks import RowBlocks, probe_rows, repeated

_WHOLE = 4
"""Products have a multiple of this many tokens."""
_MOST_TOGETHER = 64
"""Maximum tokens for running all experts on all of them."""
_SUM = 0
"""`embedding_bag`'s number for summation."""
_KEPT = 64
"""Number of cached index tensors: those of long prompts are large, and lengths vary."""


class RowwiseExperts(Module):
    """Experts in two matrices, in float32."""

    def __init__(self, gate_up: Tensor, down: Tensor, gated: Rows) -> None:
        """Initialize with gate_up [experts, 2 * inner, hidden], down [experts, inner, hidden]."""
        super().__init__()
        self._gated = gated
        self.gate_up_proj = DenseLinear(gate_up.flatten(0, 1), None)
        self.down_proj = weight_of(down)
        # Views of these weights.
        self._each = [
            Expert(DenseLinear(up, None), DenseLinear(back.T, None), gated)
            for up, back in zip(gate_up, down, strict=True)
        ]
        probe = probe_rows(gate_up.shape[2], gate_up.dtype)
        self._by_rows = [RowBlocks(expert, probe) for expert in self._each]
        takes_few = all(_WHOLE in expert.sizes for expert in self._by_rows)
        self._few = _WHOLE if takes_few else 0
        key = gate_up.shape, gated, torch.get_num_threads()
        if key not in _agreeing:
            _agreeing[key] = self._together_agrees(probe)
        self._together = _MOST_TOGETHER if _agreeing[key] else 0

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, as `Experts` does."""
        if len(x) <= self._few:
            made, index = self._few_tokens(x, chosen)
        elif len(x) <= self._together:
            made, index = self._all_experts(x, chosen)
        else:
            made, index = self._expert_by_expert(x, chosen)
        # One operation that sums in the order of the choices, instead of three.
        first = _firsts(*chosen.shape)
        return torch.embedding_bag(
            made, index, first, mode=_SUM, per_sample_weights=weights.flatten()
        )[0]

    def _few_tokens(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of results, and the row of each choice, [tokens * choices]."""
        whole = x if len(x) == _WHOLE else x.index_select(0, repeated(len(x), _WHOLE))
        choices = chosen.tolist()
        row_of: dict[int, int] = {}
        index = [
            row_of.setdefault(expert, _WHOLE * len(row_of)) + token
            for token, experts in enumerate(choices)
            for expert in experts
        ]
        return torch.cat([self._each[expert](whole) for expert in row_of]), torch.tensor(index)

    def _all_experts(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        rows = -(-len(x) // _WHOLE) * _WHOLE
        whole = x if rows == len(x) else x.index_select(0, repeated(len(x), rows))
        return self._made(whole).flatten(0, 1), (chosen * rows).add_(_column(len(x))).flatten()

    def _expert_by_expert(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        experts = chosen.flatten().numpy()
        order = experts.argsort(kind="stable")
        counts = np.bincount(experts, minlength=len(self._by_rows))
        padded = [each.padded(int(n)) for each, n in zip(self._by_rows, counts, strict=True)]
        # Offset of each expert's pairs between the sorted and the padded order.
        shift = np.cumsum(padded) - padded - (np.cumsum(counts) - counts)
        targets = np.arange(len(order)) + shift[experts[order]]
        index, tokens = np.empty_like(order), np.zeros(sum(padded), np.int64)
        index[order], tokens[targets] = targets, order // chosen.shape[1]
        rows = torch.split(x.index_select(0, torch.from_numpy(tokens)), padded)
        made = [each(part) for each, part in zip(self._by_rows, rows, strict=True) if len(part)]
        return torch.cat(made), torch.from_numpy(index)

    def _made(self, whole: Tensor) -> Tensor:
        """Return [experts, tokens, hidden]."""
        gate_up = self.gate_up_proj(whole).view(len(whole), len(self._each), -1)
        return torch.bmm(self._gated(gate_up).transpose(0, 1), self.down_proj)

    def _together_agrees(self, probe: Tensor) -> bool:
        """Return whether all experts at once give the same bits as each separately."""
        probe = probe[:_MOST_TOGETHER]
        one_by_one = torch.stack([expert(probe) for expert in self._by_rows])
        return all(
            torch.equal(self._made(probe[:rows].clone()), one_by_one[:, :rows])
            for rows in range(_WHOLE, len(probe) + 1, _WHOLE)
        )


_agreeing: dict[tuple[torch.Size, Rows, int], bool] = {}
"""Whether all experts at once agree, by shape, activation and number of threads."""


@lru_cache(maxsize=_KEPT)
def _firsts(tokens: int, choices: int) -> Tensor:
    return torch.arange(0, tokens * choices, choices)


@cache
def _column(rows: int) -> Tensor:
    return torch.arange(rows).unsqueeze(1)
