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
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.distributed.spec import GroupBroken
from engine.models.adapters import AdapterBank
from engine.models.layers import Rows
from engine.models.moe import run_experts, weighted_sum
from engine.models.parallel.tensors import part_of
from engine.models.products.dense import Linear


class ExpertsLost(GroupBroken):
    """Other engines have failed or left; the processes of this one are at the same point."""


class SendingRule(NamedTuple):
    """When all tokens go to all ranks in one message, instead of each to where it is needed."""

    few_tokens: int = 256
    """Tokens per rank up to which a message less is worth more than a shorter one."""
    max_needed: float = 0.7
    """Share of the tokens that a rank needs, on average, from which it may as well get all."""


def expert_share(num_experts: int, rank: int, size: int) -> range:
    """Return the experts of one rank: contiguous, and no rank has two more than another."""
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


class Exchange(Protocol):
    """What sparse layers need of a group; see `engine.distributed.group.Group`."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather_counts(self, count: int) -> list[int]:
        """Return every rank's number."""
        ...

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the number that each rank sent to this one."""
        ...

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks."""
        ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows that all ranks sent to this one."""
        ...


class MirrorGroup:
    """Stands for a group whose other ranks do the same as this one, to measure memory.

    What comes from them is made of what goes to them, and means nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather_counts(self, count: int) -> list[int]:
        """Return this rank's number for every rank."""
        return [count] * self.size

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Return what was sent: as much comes as goes."""
        return list(counts)

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


class ExpertGroup:
    """What the sparse layers of one engine share: the group, and how the step is laid out."""

    def __init__(
        self,
        num_experts: int,
        experts_per_token: int,
        device: torch.device,
        shards: Group | None = None,
    ) -> None:
        """Prepare; `shards` are the processes of this engine, if there are several."""
        self._num_experts = num_experts
        self._shards = shards
        self._loss: GroupBroken | None = None
        """Why this step has no group any more, where it is gone through to its end all the same."""
        self._device = device
        self._per_token = experts_per_token
        self._group: Exchange | None = None
        self.rule = SendingRule()
        """Has to be the same at all ranks."""
        self.rank_of = torch.empty(0, dtype=torch.int64)
        """[experts] int64: who holds each."""
        self.counts: list[int] = []
        """Tokens that each rank sends in this step."""

    def share(self, position: int, size: int) -> range:
        """Return the experts of this process of the engine at a place among `size` engines."""
        shard, shards = 0, 1
        if self._shards is not None:
            shard, shards = self._shards.rank, self._shards.size
        return expert_share(self._num_experts, position * shards + shard, size * shards)

    def own_tokens(self, bank: AdapterBank | None) -> "OwnTokens | None":
        """Return what has this process compute its part of the tokens; None if it has all."""
        return None if self._shards is None else OwnTokens(self, bank)

    def join(self, group: Exchange) -> None:
        """Hold all further collectives with this group."""
        self._group = group
        ranks = torch.empty(self._num_experts, dtype=torch.int64)
        for rank in range(group.size):
            share = expert_share(self._num_experts, rank, group.size)
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


class OwnTokens:
    """What a shard computes of a sparse layer: that of its part of the tokens.

    It gives zeros for the others, so that the sum over the shards has all.
    """

    def __init__(self, group: ExpertGroup, bank: AdapterBank | None) -> None:
        """Take the group; the bank is told which rows are computed."""
        self._group = group
        self._bank = bank

    def __call__(self, function: Rows, x: Tensor) -> Tensor:
        """Return what a function makes of this shard's rows of x [tokens, hidden]."""
        out = torch.zeros_like(x)
        if self._group.is_lost:
            return out
        part, bank = self._group.part(len(x)), self._bank
        adapted = None if bank is None else bank.current
        if bank is not None and adapted is not None:
            bank.current = adapted.select(torch.arange(part.start, part.stop, device=x.device))
        with self._group.going_on():
            out[part] = function(x[part])
        if bank is not None:
            bank.current = adapted
        return out


class _Arrived(NamedTuple):
    """Tokens of all ranks, in rank order."""

    x: Tensor
    """[tokens, hidden]"""
    chosen: Tensor
    """[tokens, experts_per_token]"""
    counts: Sequence[int]
    """Tokens from each rank."""


class SpreadExperts:
    """The experts of one layer, some of them here and the others at the group's other ranks."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group
        self._share = range(0)
        self._experts: list[Linear] = []

    @property
    def share(self) -> range:
        """Which experts are here."""
        return self._share

    def hold(self, share: range, load: Callable[[int], Linear]) -> None:
        """Drop the experts that are not in the share, then load those that are missing."""
        kept = {i: e for i, e in zip(self._share, self._experts, strict=True) if i in share}
        self._experts = []
        self._share = share
        self._experts = [kept.pop(i) if i in kept else load(i) for i in share]

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see `engine.models.moe.Experts`.

        Raises:
            GroupBroken: not all ranks came.
        """
        ranks = self._group.rank_of[chosen]
        if self._group.sends_everything:
            arrived = self._gather(x, chosen)
        else:
            arrived = self._send(x, chosen, ranks)
        mine = (arrived.chosen >= self._share.start) & (arrived.chosen < self._share.stop)
        rows = mine.nonzero()[:, 0]
        outputs = run_experts(
            arrived.x, rows, arrived.chosen[mine] - self._share.start, self._experts
        )
        returned = _sums(mine.sum(1), arrived.counts)
        expected = torch.bincount(ranks.flatten(), minlength=self._group.group.size).tolist()
        back = self._group.group.all_to_all(outputs, returned, expected)
        order = ranks.flatten().argsort(stable=True)
        by_choice = torch.empty_like(back).index_copy_(0, order, back)
        return weighted_sum(by_choice, weights).to(x.dtype)

    def _gather(self, x: Tensor, chosen: Tensor) -> _Arrived:
        """Get all tokens of all ranks."""
        counts = self._group.counts
        packed = self._group.group.all_gather(_pack(x, chosen), counts)
        return _Arrived(*_unpack(packed, x), counts)

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
