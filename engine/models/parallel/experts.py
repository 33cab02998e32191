"""The experts of a model's sparse layers spread over the engines of a group.

Each engine routes its own tokens. They travel to the engines that hold their experts, and what
each expert makes of them travels back, to be weighted and added at home in the order of the
token's choices: as on one engine that holds all experts, whatever the size of the group.

In each layer all engines take part, whether they have tokens or not. Where engines are cut over
several processes each of these has its own part of the experts, and sends a part of the tokens that
all of them have.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """Other engines have failed or left; the processes of this one are at the same point."""


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


class SendingRule(NamedTuple):
    """When all tokens go to all ranks in one message, instead of each to where it is needed."""

    few_tokens: int = 256
    """Tokens per rank up to which a message less is worth more than a shorter one."""
    max_needed: float = 0.7
    """Share of the tokens that a rank needs, on average, from which it may as well get all."""


class ExpertGroup:
    """What the sparse layers of one engine share: the group, and how the step is laid out."""

    def __init__(
        self,
        num_experts: int,
        experts_per_token: int,
        device: torch.device,
        shards: Group | None = None,
        balance: ExpertBalance | None = None,
    ) -> None:
        """Prepare; `shards` are the processes of this engine, if there are several.

        `balance` says who holds what; without it each rank has its share of the experts.
        """
        self._num_experts = num_experts
        self.balance = balance
        self._measures = False
        self._rank, self._size = 0, 1
        self._routes: dict[int, _Routes] = {}
        """Of layers that are balanced, as they are needed."""
        self._shards = shards
        self._loss: GroupBroken | None = None
        """Why this step has no group any more, where it is gone through to its end all the same."""
        self._device = device
        self._per_token = experts_per_token
        self._group: Exchange | None = None
        self.rule = SendingRule()
        """Has to be the same at all ranks."""
        self.rank_of = torch.empty(0, dtype=torch.int64)
        """[copies] int64: who holds each; without a balance there is one copy of each expert."""
        self.counts: list[int] = []
        """Tokens that each rank sends in this step."""

    def prepare(self, position: int, size: int) -> None:
        """Be at a place among `size` engines, for `held`."""
        shard, shards = 0, 1
        if self._shards is not None:
            shard, shards = self._shards.rank, self._shards.size
        self._rank, self._size = position * shards + shard, size * shards

    def held(self, layer: int) -> tuple[int, Sequence[int]]:
        """Return which copies of a layer's experts are here: the first one's number, the experts.

        Copies are numbered by rank.
        """
        balance = self.balance
        copies = self._num_experts if balance is None else balance.num_copies
        share = expert_share(copies, self._rank, self._size)
        if balance is None:
            return share.start, share
        return share.start, balance.placement(layer)[self._rank]

    def copies(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the copies to which tokens go that have chosen these experts.

        Copies of one expert take turns; ranks begin at different ones.

        Args:
            chosen: [tokens, experts_per_token]
        """
        if self.balance is None:
            return chosen
        if self._measures:
            self.balance.count(layer, chosen)
        if layer not in self._routes:
            placement = self.balance.placement(layer)
            self._routes[layer] = _routes(placement, self._num_experts, self._device)
        table, numbers = self._routes[layer]
        turns = torch.arange(len(chosen), device=chosen.device).unsqueeze(1) + self._rank
        turns = turns % numbers[chosen]
        return table[chosen].gather(2, turns.unsqueeze(2)).squeeze(2)

    def count_computed(self, layer: int, rows: int) -> None:
        """Count what this rank computes of a layer, if that is measured."""
        if self.balance is not None and self._measures:
            self.balance.count_computed(layer, rows)

    def own_tokens(self, function: Rows, x: Tensor, bank: AdapterBank | None) -> Tensor:
        """Return what a function makes of this process's part of x [tokens, hidden].

        It gives zeros for the others, so that the sum over the shards has all; the bank is told
        which rows are computed.
        """
        if self._shards is None:
            return function(x)
        out = torch.zeros_like(x)
        if self.is_lost:
            return out
        part = self.part(len(x))
        adapted = None if bank is None else bank.current
        if bank is not None and adapted is not None:
            bank.current = adapted.select(torch.arange(part.start, part.stop, device=x.device))
        with self.going_on():
            out[part] = function(x[part])
        if bank is not None:
            bank.current = adapted
        return out

    def join(self, group: Exchange) -> None:
        """Hold all further collectives with this group."""
        self._group = group
        self._measures = self.balance is not None and not isinstance(group, MirrorGroup)
        copies = self._num_experts if self.balance is None else self.balance.num_copies
        ranks = torch.empty(copies, dtype=torch.int64)
        self._routes = {}
        for rank in range(group.size):
            share = expert_share(copies, rank, group.size)
            ranks[share.start : share.stop] = rank
        self.rank_of = ranks.to(self._device)

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
            raise GroupBroken("the engine is in no group yet")
        return self._group

    def begin_step(self, num_tokens: int) -> bool:
        """Exchange how many tokens each rank sends; return whether any has some.

        Raises:
            GroupBroken: not all ranks came. With shards that is for `end_step` to say.
        """
        own = self.part(num_tokens)
        self.counts = []
        with self.going_on():
            self.counts = self.group.all_gather_counts(own.stop - own.start)
        return any(self.counts)

    def next_change(self) -> int | None:
        """Return a layer whose experts this rank has to hold anew in this step, as all others do.

        Raises:
            GroupBroken: not all ranks came, as in `begin_step`.
        """
        balance = self.balance
        if balance is None or not self._measures or not any(self.counts):
            return None
        layer = None
        with self.going_on():
            if balance.is_due():
                balance.take(self.group.all_gather_row(balance.row()))
            layer = balance.next_layer()
        if layer is not None:
            self._routes.pop(layer, None)
        return layer

    def part(self, num_tokens: int) -> slice:
        """Return which of the engine's tokens this process sends."""
        if self._shards is None:
            return slice(0, num_tokens)
        return part_of(num_tokens, self._shards.rank, self._shards.size)

    @property
    def is_lost(self) -> bool:
        """Whether the group has failed in this step, which is gone through to its end."""
        return self._loss is not None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Note that the group has failed, instead of leaving this engine's shards alone.

        They wait for this process in the sums of the layers that follow: some may have come past
        the collective that failed here.
        """
        try:
            yield
        except GroupBroken as error:
            if self._shards is None:
                raise
            self._loss = error

    def end_step(self) -> None:
        """Bring the shards to the same end of a step.

        Raises:
            ExpertsLost: the group failed at one of them; what was computed means nothing.
            GroupBroken: one of the shards has failed.
        """
        loss, self._loss = self._loss, None
        if self._shards is None or (self._group is self._shards and loss is None):
            return
        lost = self._shards.all_gather_counts(loss is not None)
        if any(lost):
            raise ExpertsLost(str(loss or f"process {lost.index(1)} of the engine lost the group"))

    @property
    def sends_everything(self) -> bool:
        """Whether every rank gets all tokens in one message, and none says first how many."""
        if max(self.counts) <= self.rule.few_tokens:
            return True
        return 1 - (1 - 1 / self.group.size) ** self._per_token >= self.rule.max_needed


class _Routes(NamedTuple):
    """Where the copies of a layer's experts are."""

    table: Tensor
    """[experts, most copies of one] int64: the copies of each; the rest means nothing."""
    numbers: Tensor
    """[experts] int64: how many each has."""


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


class _Arrived(NamedTuple):
    """Tokens of all ranks, in rank order."""

    x: Tensor
    """[tokens, hidden]"""
    chosen: Tensor
    """[tokens, experts_per_token]: copies of experts."""
    counts: Sequence[int]
    """Tokens from each rank."""


class SpreadExperts(Module):
    """The experts of one layer, some of them here and the others at the group's other ranks."""

    def __init__(self, group: ExpertGroup, layer: int = 0) -> None:
        super().__init__()
        self._group = group
        self._layer = layer
        self._first = 0
        """Number of the first copy here."""
        self.share: Sequence[int] = range(0)
        """Which experts are here."""
        self.experts = nn.ModuleList()
        """In the order of the share."""
        self._load: Callable[[int], nn.Module]

    def hold(self, first: int, share: Sequence[int], load: Callable[[int], nn.Module]) -> None:
        """Drop the experts that are not in the share, then load those that are missing.

        `first` is the number of the first copy here; see `ExpertGroup.held`.
        """
        kept = {i: e for i, e in zip(self.share, self.experts, strict=True) if i in share}
        self.experts = nn.ModuleList()
        self._first, self.share, self._load = first, share, load
        self.experts = nn.ModuleList(kept.pop(i) if i in kept else load(i) for i in share)

    def change(self) -> None:
        """Hold what the group's balance says now."""
        self.hold(*self._group.held(self._layer), self._load)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see `engine.models.moe.Experts`.

        Raises:
            GroupBroken: not all ranks came.
        """
        chosen = self._group.copies(self._layer, chosen)
        ranks = self._group.rank_of[chosen]
        if self._group.sends_everything:
            packed = self._group.group.all_gather(_pack(x, chosen), self._group.counts)
            arrived = _Arrived(*_unpack(packed, x), self._group.counts)
        else:
            arrived = self._send(x, chosen, ranks)
        end = self._first + len(self.share)
        mine = (arrived.chosen >= self._first) & (arrived.chosen < end)
        rows = mine.nonzero()[:, 0]
        self._group.count_computed(self._layer, len(rows))
        outputs = run_experts(
            arrived.x, rows, arrived.chosen[mine] - self._first, list(self.experts)
        )
        returned = _sums(mine.sum(1), arrived.counts)
        expected = torch.bincount(ranks.flatten(), minlength=self._group.group.size).tolist()
        back = self._group.group.all_to_all(outputs, returned, expected)
        order = ranks.flatten().argsort(stable=True)
        by_choice = torch.empty_like(back).index_copy_(0, order, back)
        return weighted_sum(by_choice, weights).to(x.dtype)

    def _send(self, x: Tensor, chosen: Tensor, ranks: Tensor) -> _Arrived:
        """Get the tokens that have chosen an expert here."""
        group = self._group.group
        needed = torch.zeros(group.size, len(x), dtype=torch.bool, device=x.device)
        needed.T.scatter_(1, ranks, True)
        tokens = needed.nonzero()[:, 1]
        sent: list[int] = needed.sum(1).tolist()
        received = group.all_to_all_counts(sent)
        packed = _pack(x.index_select(0, tokens), chosen.index_select(0, tokens))
        return _Arrived(*_unpack(group.all_to_all(packed, sent, received), x), received)


def _pack(x: Tensor, chosen: Tensor) -> Tensor:
    """Return one row of bytes per token, so that it travels in one message."""
    choices = chosen.to(torch.int32)
    return torch.cat((x.contiguous().view(torch.uint8), choices.view(torch.uint8)), dim=1)


def _unpack(packed: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_pack` packed; x has the type and width of `like`."""
    width = like.shape[1] * like.dtype.itemsize
    x, choices = packed[:, :width].contiguous(), packed[:, width:].contiguous()
    return x.view(like.dtype), choices.view(torch.int32).to(torch.int64)


def _sums(values: Tensor, lengths: Sequence[int]) -> list[int]:
    """Return the sum of each of the parts, of these lengths, of a vector."""
    parts: list[int] = [0, *values.cumsum(0).tolist()]
    sums, first = [], 0
    for length in lengths:
        sums.append(parts[first + length] - parts[first])
        first += length
    return sums
