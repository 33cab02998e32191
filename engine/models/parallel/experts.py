"""Spreads the experts of a model's sparse layers over the engines of a group.

Each engine routes its own tokens. They are sent to the engines that hold their experts, and each
expert's outputs are sent back, to be weighted and summed in the order of the token's choices: as on
one engine with all experts, whatever the size of the group.

All engines take part in each layer, whether they have tokens or not. If engines are
tensor-parallel, each of their processes holds its own experts and sends a part of the engine's
tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.distributed.group import Group
from engine.distributed.spec import GroupBroken
from engine.models.adapters import AdapterBank
from engine.models.module import Module, Rows
from engine.models.moe import run_experts, weighted_sum
from engine.models.parallel.balance import ExpertBalance, Placement, expert_share
from engine.models.parallel.tensors import part_of


class ExpertsLost(GroupBroken):
    """Other engines have failed or left; all processes of this engine are in a consistent state."""


class MirrorGroup:
    """Simulates a group whose other ranks behave like this one, for memory measurement.

    Implements what sparse layers need of `engine.distributed.group.Group`. Received data is derived
    from sent data and is meaningless.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather_counts(self, count: int) -> list[int]:
        """Return this rank's count for every rank."""
        return [count] * self.size

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the sent counts as the received ones."""
        return list(counts)

    def all_gather_row(self, row: Sequence[int]) -> list[list[int]]:
        """Return this rank's row for every rank."""
        return [list(row)] * self.size

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows for every rank."""
        assert list(counts) == [len(rows)] * self.size
        return rows.repeat(self.size, *[1] * (rows.dim() - 1))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the expected number of rows, repeating those sent."""
        assert sum(sent) == len(rows)
        if not len(rows):
            return rows.new_zeros(sum(received), *rows.shape[1:])
        return rows[torch.arange(sum(received), device=rows.device) % len(rows)]


Exchange = Group | MirrorGroup
"""The group over which sparse layers exchange tokens."""


class SendingRule(NamedTuple):
    """When to send all tokens to all ranks in one message, instead of each only where needed."""

    few_tokens: int = 256
    """Maximum tokens per rank for which saving a message beats sending less."""
    max_needed: float = 0.7
    """Minimum expected share of tokens needed by a rank for which it receives all."""


@dataclass(eq=False)
class ExpertGroup:
    """State shared by an engine's sparse layers: the group, and the layout of the step."""

    num_experts: int
    experts_per_token: int
    device: torch.device
    shards: Group | None = None
    """The processes of this engine, if there are several."""
    balance: ExpertBalance | None = None
    """Decides the placement; without it each rank has an equal share of the experts."""

    def __post_init__(self) -> None:
        self._measures = False
        self._rank, self._size = 0, 1
        self._routes: dict[int, _Routes] = {}
        """Of balanced layers, computed on demand."""
        self._failure: GroupBroken | None = None
        """The group's failure, while this step is completed regardless."""
        self._group: Exchange | None = None
        self.rule = SendingRule()
        """Must be the same on all ranks."""
        self.rank_of = torch.empty(0, dtype=torch.int64)
        """[copies] int64: rank of each copy; without a balance there is one copy of each expert."""
        self.counts: list[int] = []
        """Tokens that each rank sends in this step."""

    def prepare(self, position: int, size: int) -> None:
        """Set this engine's position among `size` engines, on which `local_copies` depends."""
        shard, shards = 0, 1
        if self.shards is not None:
            shard, shards = self.shards.rank, self.shards.size
        self._rank, self._size = position * shards + shard, size * shards

    def local_copies(self, layer: int) -> tuple[int, Sequence[int]]:
        """Return a layer's first local copy number and the experts of its local copies.

        Copies are numbered by rank.
        """
        balance = self.balance
        copies = self.num_experts if balance is None else balance.num_copies
        share = expert_share(copies, self._rank, self._size)
        if balance is None:
            return share.start, share
        return share.start, balance.placement(layer)[self._rank]

    def copies(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the copies that receive tokens with these chosen experts.

        Copies of an expert are used round robin, starting at a different one on each rank.

        Args:
            chosen: [tokens, experts_per_token]
        """
        if self.balance is None:
            return chosen
        if self._measures:
            self.balance.count(layer, chosen)
        if layer not in self._routes:
            placement = self.balance.placement(layer)
            self._routes[layer] = _routes(placement, self.num_experts, self.device)
        table, numbers = self._routes[layer]
        turns = torch.arange(len(chosen), device=chosen.device).unsqueeze(1) + self._rank
        turns = turns % numbers[chosen]
        return table[chosen].gather(2, turns.unsqueeze(2)).squeeze(2)

    def count_computed(self, layer: int, rows: int) -> None:
        """Count the rows that this rank computes in a layer, if load is measured."""
        if self.balance is not None and self._measures:
            self.balance.count_computed(layer, rows)

    def compute_own_tokens(self, function: Rows, x: Tensor, bank: AdapterBank | None) -> Tensor:
        """Apply a function to this process's part of x [tokens, hidden].

        Other rows are zero, so that the sum over the shards is complete. `bank.current` is set to
        the computed rows meanwhile.
        """
        if self.shards is None:
            return function(x)
        out = torch.zeros_like(x)
        if self._failure is not None:  # the step is completed regardless
            return out
        part = self.part(len(x))
        adapted = None if bank is None else bank.current
        if bank is not None and adapted is not None:
            bank.current = adapted.select(torch.arange(part.start, part.stop, device=x.device))
        with self._completing_step():
            out[part] = function(x[part])
        if bank is not None:
            bank.current = adapted
        return out

    def join(self, group: Exchange) -> None:
        """Use this group for all further collectives."""
        self._group = group
        self._measures = self.balance is not None and not isinstance(group, MirrorGroup)
        copies = self.num_experts if self.balance is None else self.balance.num_copies
        ranks = torch.empty(copies, dtype=torch.int64)
        self._routes = {}
        for rank in range(group.size):
            share = expert_share(copies, rank, group.size)
            ranks[share.start : share.stop] = rank
        self.rank_of = ranks.to(self.device)

    def leave(self) -> None:
        """Leave the group until the next `join`."""
        self._group = None

    @property
    def group(self) -> Exchange:
        """The group.

        Raises:
            GroupBroken: there is none.
        """
        if self._group is None:
            raise GroupBroken("the engine has not joined a group yet")
        return self._group

    def begin_step(self, num_tokens: int) -> bool:
        """Exchange how many tokens each rank sends; return whether there are any.

        Raises:
            GroupBroken: a rank is missing. With shards, `end_step` raises it instead.
        """
        local_tokens = self.part(num_tokens)
        self.counts = []
        with self._completing_step():
            self.counts = self.group.all_gather_counts(local_tokens.stop - local_tokens.start)
        return any(self.counts)

    def next_change(self) -> int | None:
        """Return the layer whose experts must be replaced in this step, the same on all ranks.

        Raises:
            GroupBroken: a rank is missing, as in `begin_step`.
        """
        balance = self.balance
        if balance is None or not self._measures or not any(self.counts):
            return None
        layer = None
        with self._completing_step():
            if balance.is_due():
                balance.update(self.group.all_gather_row(balance.row()))
            layer = balance.next_layer()
        if layer is not None:
            self._routes.pop(layer, None)
        return layer

    def part(self, num_tokens: int) -> slice:
        """Return the slice of the engine's tokens that this process sends."""
        if self.shards is None:
            return slice(0, num_tokens)
        return part_of(num_tokens, self.shards.rank, self.shards.size)

    @contextmanager
    def _completing_step(self) -> Iterator[None]:
        """Record a failure of the group instead of abandoning this engine's shards.

        They wait for this process in the sums of later layers: some may be past the collective that
        failed here.
        """
        try:
            yield
        except GroupBroken as error:
            if self.shards is None:
                raise
            self._failure = error

    def end_step(self) -> None:
        """Synchronize the shards' outcome of a step.

        Raises:
            ExpertsLost: the group failed on one of them; the step's results are invalid.
            GroupBroken: one of the shards has failed.
        """
        failure, self._failure = self._failure, None
        if self.shards is None or (self._group is self.shards and failure is None):
            return
        failures = self.shards.all_gather_counts(failure is not None)
        if any(failures):
            raise ExpertsLost(
                str(failure or f"process {failures.index(1)} of the engine lost the group")
            )

    @property
    def sends_all_tokens(self) -> bool:
        """Whether every rank receives all tokens in one message, without exchanging counts."""
        if max(self.counts) <= self.rule.few_tokens:
            return True
        return 1 - (1 - 1 / self.group.size) ** self.experts_per_token >= self.rule.max_needed


class _Routes(NamedTuple):
    """The copies of a layer's experts."""

    table: Tensor
    """[experts, maximum copies] int64: copies of each expert; the rest is padding."""
    numbers: Tensor
    """[experts] int64: number of copies."""


def _routes(placement: Placement, num_experts: int, device: torch.device) -> _Routes:
    copies: list[list[int]] = [[] for _ in range(num_experts)]
    number = 0
    for held in placement:
        for expert in held:
            copies[expert].append(number)
            number += 1
    numbers = [len(each) for each in copies]
    table = [each + [0] * (max(numbers) - len(each)) for each in copies]
    return _Routes(
        torch.tensor(table, dtype=torch.int64, device=device),
        torch.tensor(numbers, dtype=torch.int64, device=device),
    )


class DistributedExperts(Module):
    """The experts of one layer, some local and the others on the group's other ranks."""

    def __init__(self, group: ExpertGroup, layer: int = 0) -> None:
        super().__init__()
        self._group = group
        self._layer = layer
        self._first = 0
        """Number of the first local copy."""
        self.share: Sequence[int] = range(0)
        """The local experts."""
        self.experts = nn.ModuleList()
        """In the order of `share`."""
        self._load: Callable[[int], nn.Module]

    def set_local_experts(
        self, first: int, share: Sequence[int], load: Callable[[int], nn.Module]
    ) -> None:
        """Drop the experts that are not in the share, then load missing ones.

        `first` is the number of the first local copy; see `ExpertGroup.local_copies`.
        """
        retained = {i: e for i, e in zip(self.share, self.experts, strict=True) if i in share}
        self.experts = nn.ModuleList()
        self._first, self.share, self._load = first, share, load
        self.experts = nn.ModuleList(retained.pop(i) if i in retained else load(i) for i in share)

    def change(self) -> None:
        """Apply the group's current placement."""
        self.set_local_experts(*self._group.local_copies(self._layer), self._load)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see `engine.models.moe.Experts`.

        Raises:
            GroupBroken: a rank is missing.
        """
        chosen = self._group.copies(self._layer, chosen)
        ranks = self._group.rank_of[chosen]
        if self._group.sends_all_tokens:
            counts = self._group.counts
            packed = self._group.group.all_gather(_pack(x, chosen), counts)
        else:
            packed, counts = self._send(x, chosen, ranks)
        arrived, copies = _unpack(packed, x)
        local_rows = (copies >= self._first) & (copies < self._first + len(self.share))
        rows = local_rows.nonzero()[:, 0]
        self._group.count_computed(self._layer, len(rows))
        outputs = run_experts(arrived, rows, copies[local_rows] - self._first, list(self.experts))
        returned = _sums(local_rows.sum(1), counts)
        expected = torch.bincount(ranks.flatten(), minlength=self._group.group.size).tolist()
        back = self._group.group.all_to_all(outputs, returned, expected)
        order = ranks.flatten().argsort(stable=True)
        by_choice = torch.empty_like(back).index_copy_(0, order, back)
        return weighted_sum(by_choice, weights).to(x.dtype)

    def _send(self, x: Tensor, chosen: Tensor, ranks: Tensor) -> tuple[Tensor, list[int]]:
        """Exchange tokens so that each rank receives those with chosen experts there.

        Returns all ranks' packed tokens, in rank order, and the number from each rank.
        """
        group = self._group.group
        needed = torch.zeros(group.size, len(x), dtype=torch.bool, device=x.device)
        needed.T.scatter_(1, ranks, True)
        tokens = needed.nonzero()[:, 1]
        sent: list[int] = needed.sum(1).tolist()
        received = group.all_to_all_counts(sent)
        packed = _pack(x.index_select(0, tokens), chosen.index_select(0, tokens))
        return group.all_to_all(packed, sent, received), received


def _pack(x: Tensor, chosen: Tensor) -> Tensor:
    """Return one row of bytes per token, to send both in one message."""
    choices = chosen.to(torch.int32)
    return torch.cat((x.contiguous().view(torch.uint8), choices.view(torch.uint8)), dim=1)


def _unpack(packed: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_pack` packed; x has the dtype and width of `like`."""
    width = like.shape[1] * like.dtype.itemsize
    x, choices = packed[:, :width].contiguous(), packed[:, width:].contiguous()
    return x.view(like.dtype), choices.view(torch.int32).to(torch.int64)


def _sums(values: Tensor, lengths: Sequence[int]) -> list[int]:
    """Return the sums of consecutive parts of a vector with these lengths."""
    parts: list[int] = [0, *values.cumsum(0).tolist()]
    sums, first = [], 0
    for length in lengths:
        sums.append(parts[first + length] - parts[first])
        first += length
    return sums
