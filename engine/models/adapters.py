"""LoRA adapters of a decoder's products: low-rank A and B for each slot.

A product with adapters is y = x W + x A B, with A and B of each row's adapter; nothing is added for
rows without one. Few rows are multiplied with the matrices of all slots present in the step, and a
mask selects each row's own: two small products, however many adapters there are. Many rows are
gathered by slot, so that each is only multiplied with its own adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.module import Module, Rows
from engine.models.parallel.tensors import TensorSharding

NO_ADAPTER = -1

_MASKED_ROWS = 1024
"""Maximum rows times slots for multiplying all rows with all slots' matrices."""
_BLOCK_ROWS = 16
"""Rows per product when no row may depend on the others."""


class LowRank(NamedTuple):
    """The change of one matrix [outputs, inputs]: B A, with the adapter's scale folded into B."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""


AdapterWeights = Mapping[str, LowRank]
"""Keyed by the decoder's tensor names without `.weight`."""


class AdapterRows:
    """The adapter slot of each row of a step."""

    def __init__(self, slots: Tensor, present: Sequence[int], dtype: torch.dtype) -> None:
        """Initialize from slots [rows] int64 (`NO_ADAPTER` for none) and the sorted used slots."""
        self.slots = slots
        self.present = present
        self.first = present[0]
        self.end = present[-1] + 1
        self._dtype = dtype
        self._mask: Tensor | None = None
        self._by_slot: list[tuple[int, Tensor]] | None = None

    @staticmethod
    def of(
        slots: npt.NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> "AdapterRows | None":
        """Return the rows of these slots [rows]; None if no row has an adapter."""
        present = np.unique(slots[slots != NO_ADAPTER]).tolist()
        if not present:
            return None
        return AdapterRows(torch.from_numpy(slots).to(device), present, dtype)

    def __len__(self) -> int:
        return len(self.slots)

    def select(self, rows: Tensor) -> "AdapterRows":
        """Return some of the rows; the set of present slots is kept."""
        return AdapterRows(self.slots.index_select(0, rows), self.present, self._dtype)

    @property
    def mask(self) -> Tensor:
        """[rows, end - first, 1]: 1 where a row has a slot's adapter, else 0."""
        if self._mask is None:
            slots = torch.arange(self.first, self.end, device=self.slots.device)
            self._mask = (self.slots[:, None] == slots).to(self._dtype).unsqueeze(-1)
        return self._mask

    @property
    def by_slot(self) -> list[tuple[int, Tensor]]:
        """Each slot that occurs, with the indices of its rows."""
        if self._by_slot is None:
            found = ((slot, (self.slots == slot).nonzero().flatten()) for slot in self.present)
            self._by_slot = [(slot, rows) for slot, rows in found if len(rows)]
        return self._by_slot


class AdaptedLinear(Module):
    """A product or embedding with adapters: A and B of all slots.

    Its outputs can be those of several fused modules. The input of an embedding is token ids
    [rows], each of which selects a column of A.
    """

    a: Tensor | None
    """[slots, modules * rank, inputs]; allocated with the first adapter."""

    def __init__(
        self,
        bank: "AdapterBank",
        base: Rows,
        names: Sequence[str],
        widths: Sequence[int],
        *,
        is_embedding: bool,
    ) -> None:
        """Initialize from the product, and the names and widths of its output modules."""
        super().__init__()
        self._is_embedding = is_embedding
        self.base = base
        self.names = names
        self._bank = bank
        ends = np.cumsum([0, *widths]).tolist()
        self._slices = [slice(*each) for each in pairwise(ends)]
        self.register_buffer("a", None)
        self._b: list[Tensor] = []
        """[slots, rank, width] per module."""
        self.used: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out] with the adapters of `AdapterBank.current`."""
        y = self.base(x)
        rows = self._bank.current
        if rows is not None and self.a is not None and self.used:
            self._add(self.a, y, x, rows)
        return y

    def allocate(self, inputs: int) -> None:
        """Allocate A and B for all slots."""
        bank = self._bank
        rank, size = bank.rank, bank.num_slots
        self.a = bank.zeros(size, len(self.names) * rank, inputs)
        self._b = [bank.zeros(size, rank, part.stop - part.start) for part in self._slices]
        for name, matrix in zip(self.names, self._b, strict=True):
            self.register_buffer("b_" + name.rsplit(".", 1)[-1], matrix)

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Replace the adapter of a slot."""
        parts = [weights.get(name) for name in self.names]
        there = [part for part in parts if part is not None]
        if slot in self.used and self.a is not None:
            self.a[slot].zero_()
            for each in self._b:
                each[slot].zero_()
            self.used.discard(slot)
        if not there:
            return
        if self.a is None:
            self.allocate(there[0].a.shape[1])
        assert self.a is not None
        for index, part in enumerate(parts):
            if part is None:
                continue
            rank, first = len(part.a), index * self._bank.rank
            self.a[slot, first : first + rank].copy_(part.a)
            self._b[index][slot, :rank].copy_(part.b.T)
        self.used.add(slot)

    def _add(self, matrices: Tensor, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add to y [rows, outputs], in place, the adapters' products with x [rows, inputs]."""
        assert len(rows) == len(x), "rows of another step"
        count = rows.end - rows.first
        is_wide = count > 1 and len(x) * count > _MASKED_ROWS
        if self._is_embedding or self._bank.by_rows or is_wide:
            self._add_gathered(matrices, y, x, rows)
            return
        a = matrices[rows.first : rows.end]
        inner = F.linear(x, a.flatten(0, 1)).view(len(x), count, -1)
        inner = (inner * rows.mask).view(len(x), count, len(self._b), -1)
        for index, part in enumerate(self._slices):
            b = self._b[index][rows.first : rows.end].flatten(0, 1)
            y[:, part].addmm_(inner[:, :, index].reshape(len(x), -1), b)

    def _add_gathered(self, matrices: Tensor, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        product = _by_blocks if self._bank.by_rows else torch.matmul
        for slot, here in rows.by_slot:
            if slot not in self.used:
                continue
            some, a = x.index_select(0, here), matrices[slot].T
            inner = a.index_select(0, some) if self._is_embedding else product(some, a)
            for part, b, own in zip(
                self._slices, self._b, inner.chunk(len(self._b), dim=1), strict=True
            ):
                y[:, part].index_add_(0, here, product(own, b[slot]))


def _by_blocks(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix in products of one shape, as in `engine.models.products.row_blocks`."""
    padded = F.pad(x, (0, 0, 0, -len(x) % _BLOCK_ROWS))
    return torch.cat([block @ matrix for block in padded.view(-1, _BLOCK_ROWS, padded.shape[1])])[
        : len(x)
    ]


@dataclass(eq=False)
class AdapterBank:
    """A model's adapter slots, and the adapters of the rows being computed.

    The loader wraps the model's products; `current` must be set to the rows of each part of the
    model before it runs.
    """

    num_slots: int
    rank: int
    _: KW_ONLY
    dtype: torch.dtype
    device: torch.device
    sharding: TensorSharding | None = None
    """The part of each matrix held by this process."""
    by_rows: bool = False
    """Whether a row's result must not depend on other rows or the slot."""

    def __post_init__(self) -> None:
        self.current: AdapterRows | None = None
        """Adapters of the rows being computed; None if no row has one."""
        self._products: list[AdaptedLinear] = []
        self.head: AdaptedLinear | None = None
        self._experts: list[AdaptedLinear] = []
        self.adapts_experts = False

    def rows(self, slots: npt.NDArray[np.int64]) -> AdapterRows | None:
        """Return rows with the adapters of these slots; None if no row has one."""
        return AdapterRows.of(slots, self.device, self.dtype)

    def adapted(
        self,
        base: Rows,
        names: Sequence[str],
        widths: Sequence[int],
        *,
        inputs: int | None = None,
        of: Literal["layer", "expert", "head", "embedding"] = "layer",
    ) -> AdaptedLinear:
        """Return a product with adapters.

        Args:
            base: the product.
            names: modules that make up its outputs, by the decoder's names.
            widths: local outputs of each module.
            inputs: local inputs; None: allocate memory with the first adapter.
            of: kind of product.
        """
        adapted = AdaptedLinear(self, base, names, widths, is_embedding=of == "embedding")
        if inputs is not None:
            adapted.allocate(inputs)
        self._products.append(adapted)
        if of == "head":
            self.head = adapted
        elif of == "expert":
            self._experts.append(adapted)
        return adapted

    @torch.inference_mode()
    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Load an adapter into a slot, replacing any other; no step may be running.

        Args:
            weights: of the whole model; only this process's part is copied.
        """
        if self.sharding is not None:
            weights = {name: _part(self.sharding, name, pair) for name, pair in weights.items()}
        for product in self._products:
            product.write(slot, weights)
        self.adapts_experts = any(product.used for product in self._experts)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the compute dtype."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _part(sharding: TensorSharding, name: str, pair: LowRank) -> LowRank:
    """Return the part of a pair held by one rank of a tensor-parallel model."""
    module, weight = name.rsplit(".", 1)[-1], name + ".weight"
    if module == "embed_tokens":  # applied after the ranks' sum
        return pair
    if module in ("o_proj", "down_proj"):
        return LowRank(sharding.part(weight, pair.a), pair.b)
    return LowRank(pair.a, sharding.part(weight, pair.b))
