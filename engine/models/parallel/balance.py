"""Assigns experts, and redundant copies of them, to ranks by measured load.

A rank with frequently chosen experts keeps all others waiting. So these experts get more than one
copy, and copies are distributed so that all ranks have about the same load. The first half of this
file is pure functions; the second keeps their state between steps.
"""

import heapq
import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Placement = list[list[int]]
"""The experts of each rank, in ascending order without duplicates."""

_LEAST_GAIN = 0.02
"""Minimum saving, as a share of the busiest rank's load, that justifies loading experts again."""


def expert_share(num_experts: int, rank: int, size: int) -> range:
    """Return the experts of one rank: contiguous, with sizes that differ by at most one."""
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


def copies_in_group(num_experts: int, num_redundant: int, size: int) -> int:
    """Return how many copies of experts `size` ranks hold: at most one of each per rank."""
    return min(num_experts + num_redundant, num_experts * size)


def first_placement(num_experts: int, num_copies: int, size: int) -> Placement:
    """Return the placement before any measurement; second copies follow the last expert."""
    shares = [expert_share(num_copies, rank, size) for rank in range(size)]
    return [sorted(copy % num_experts for copy in share) for share in shares]


def rank_loads(tokens: Sequence[int], placement: Placement) -> list[float]:
    """Return the tokens that each rank computes; an expert's are divided among its copies.

    Args:
        tokens: per expert.
    """
    copies = [0] * len(tokens)
    for held in placement:
        for expert in held:
            copies[expert] += 1
    return [sum(tokens[expert] / copies[expert] for expert in held) for held in placement]


def arrange(tokens: Sequence[int], before: Placement) -> Placement:
    """Return a placement with the same number of copies per rank and a lower maximum load.

    Heavy experts get more copies; then copies are placed one by one, heaviest first, on the least
    loaded rank. Returns `before` if the gain is negligible; otherwise unchanged copies stay in
    place.

    Args:
        tokens: measured, per expert.
    """
    placed = _pack(tokens, _copies_of_each(tokens, before), before)
    fullest = max(rank_loads(tokens, before))
    if max(rank_loads(tokens, placed)) >= fullest * (1 - _LEAST_GAIN):
        return before
    return _renumbered(placed, before)


def _copies_of_each(tokens: Sequence[int], before: Placement) -> list[int]:
    """Return the copies per expert: each further copy goes to the highest load per copy."""
    size = len(before)
    copies = [1] * len(tokens)
    heap = [(-float(count), expert) for expert, count in enumerate(tokens)]
    heapq.heapify(heap)
    remaining = sum(map(len, before)) - len(tokens)
    while remaining and heap:
        expert = heapq.heappop(heap)[1]
        if copies[expert] == size:
            continue
        copies[expert] += 1
        remaining -= 1
        heapq.heappush(heap, (-tokens[expert] / copies[expert], expert))
    return copies


def _pack(tokens: Sequence[int], copies: Sequence[int], before: Placement) -> Placement:
    """Return the ranks of all copies; among equal loads, prefer ranks that have the expert."""
    room = [len(held) for held in before]
    placed: list[set[int]] = [set() for _ in before]
    loads = [0.0] * len(before)
    weight = [count / number for count, number in zip(tokens, copies, strict=True)]
    for expert in sorted(range(len(tokens)), key=lambda each: (-weight[each], each)):
        for _ in range(copies[expert]):
            free = [
                (loads[rank], expert not in before[rank], rank)
                for rank, held in enumerate(placed)
                if len(held) < room[rank] and expert not in held
            ]
            rank = min(free)[2] if free else _make_room(expert, placed, room, loads, weight)
            placed[rank].add(expert)
            loads[rank] += weight[expert]
    return [sorted(held) for held in placed]


def _make_room(
    expert: int,
    placed: list[set[int]],
    room: Sequence[int],
    loads: list[float],
    weight: Sequence[float],
) -> int:
    """Move another expert from a rank that lacks this one to a rank with room; return the former.

    Only ranks that already have the expert have room. There is always a move: a full rank has more
    other experts than one with room, since capacities differ by at most one.
    """
    moves = [
        (max(loads[giver] - weight[other] + weight[expert], loads[taker] + weight[other]), *rest)
        for giver, gives in enumerate(placed)
        if expert not in gives
        for taker, takes in enumerate(placed)
        if len(takes) < room[taker]
        for other in gives - takes
        for rest in ((giver, taker, other),)
    ]
    _, giver, taker, other = min(moves)
    placed[giver].remove(other)
    placed[taker].add(other)
    loads[giver] -= weight[other]
    loads[taker] += weight[other]
    return giver


def _renumbered(placed: Placement, before: Placement) -> Placement:
    """Return the placement with ranks permuted to reduce loading."""
    kept = sorted(
        (-len(set(held) & set(had)), number, rank)
        for number, held in enumerate(placed)
        for rank, had in enumerate(before)
        if len(held) == len(had)
    )
    numbers: dict[int, int] = {}
    for _, number, rank in kept:
        if number not in numbers and rank not in numbers.values():
            numbers[number] = rank
    return [placed[number] for number in sorted(numbers, key=lambda each: numbers[each])]


class ExpertBalance:
    """Measures the experts' load and decides their placement, identically on all ranks.

    It outlives the weights: a model dropped during sleep is reloaded with the same placement.
    Layers are numbered as in the model; those without experts have no load.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_redundant: int,
        interval: int,
        device: torch.device,
    ) -> None:
        """Rebalance every `interval` steps; `reset` must be called before use."""
        self.imbalance: float | None = None
        """Load of the busiest rank relative to the mean; None before the first measurement."""
        self.moved_layers = 0
        """Number of times that a layer's experts were redistributed."""
        self._num_experts = num_experts
        self._num_redundant = num_redundant
        self._interval = interval
        self._placements: list[Placement] = [[] for _ in range(num_layers)]
        self._size = 0
        self._tokens = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._computed = [0] * num_layers
        self._steps = 0
        self._pending: deque[tuple[int, Placement]] = deque()

    @property
    def num_copies(self) -> int:
        """Copies held by all ranks together, per layer."""
        return copies_in_group(self._num_experts, self._num_redundant, self._size)

    def reset(self, size: int) -> None:
        """Reset for `size` ranks, some of which may be new."""
        self._size = size
        first = first_placement(self._num_experts, self.num_copies, size)
        self._placements = [first] * len(self._placements)
        self._pending.clear()
        self.imbalance = None
        self._begin()

    def placement(self, layer: int) -> Placement:
        """Return the experts of each rank for a layer."""
        return self._placements[layer]

    def count(self, layer: int, chosen: Tensor) -> None:
        """Count tokens sent from this rank by the experts they have chosen."""
        flat = chosen.flatten()
        self._tokens[layer].index_add_(0, flat, torch.ones_like(flat))

    def count_computed(self, layer: int, rows: int) -> None:
        """Count the rows computed by this rank."""
        self._computed[layer] += rows

    def is_due(self) -> bool:
        """Count a step of the group; return whether ranks exchange their loads now."""
        if self._size == 1 or self._pending:
            return False
        self._steps += 1
        return self._steps >= self._interval

    def row(self) -> list[int]:
        """Return this rank's loads for the exchange."""
        tokens: list[int] = self._tokens.flatten().cpu().tolist()
        return [*tokens, *self._computed]

    def update(self, rows: Sequence[Sequence[int]]) -> None:
        """Process the loads of all ranks, by rank, and decide the changes."""
        num_layers, num_experts = self._tokens.shape
        first = num_layers * num_experts
        computed = [row[first:] for row in rows]
        max_load = sum(max(of_layer) for of_layer in zip(*computed, strict=True))
        mean = sum(map(sum, computed)) / len(rows)
        if mean:
            self.imbalance = max_load / mean
        tokens = [sum(each) for each in zip(*(row[:first] for row in rows), strict=True)]
        for layer, before in enumerate(self._placements):
            of_layer = tokens[layer * num_experts : (layer + 1) * num_experts]
            after = arrange(of_layer, before)
            if after != before:
                self._pending.append((layer, after))
        logger.info(
            "expert load over %d steps: the busiest process computed %.2f times the mean; "
            "experts move in %d layers",
            self._steps,
            self.imbalance or 1.0,
            len(self._pending),
        )
        self._begin()

    def next_layer(self) -> int | None:
        """Apply the next pending layer's placement; return the layer, or None."""
        if not self._pending:
            return None
        layer, self._placements[layer] = self._pending.popleft()
        self.moved_layers += 1
        if not self._pending:  # counts since then mix both placements
            self._begin()
        return layer

    def _begin(self) -> None:
        self._tokens.zero_()
        self._computed = [0] * len(self._computed)
        self._steps = 0
