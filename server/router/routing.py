"""Which engine a request goes to: pure policies behind one interface.

Load is counted in work, not in heads only: every request that runs, waits or is on its way
counts one, queued prefill tokens count in proportion, and requests that wait while the KV cache
is nearly full count more, because they will wait longer.

Front ends of one node see each other's sends; those of other nodes only show in the next stats.
If all of them chose the least loaded engine they would all choose the same one, so a front end with
such neighbours compares only some engines, drawn at random: the fewer, the more neighbours.
"""

import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.shared.plugins import load_plugin

logger = logging.getLogger(__name__)

PREFILL_TOKENS_PER_REQUEST = 512
"""Queued prompt tokens that weigh as much as one running request."""

KV_PRESSURE_FROM = 0.8
"""KV usage above which waiting requests weigh more."""

KV_PRESSURE_WEIGHT = 20.0
"""Weight of a waiting request at full KV usage is 1 + this * (1 - KV_PRESSURE_FROM)."""

AFFINITY_BLOCK = 32
"""Tokens per block of a prompt whose beginning is remembered."""

AFFINITY_BLOCKS = 64
"""Blocks of a prompt that are looked at."""

HASHED_BLOCKS = 4
"""Blocks that choose the engine of a prompt of which no beginning is remembered.

More than what all prompts of a chat template have in common, fewer than shared instructions have.
"""

AFFINITY_CAPACITY = 1 << 15
"""Beginnings that are remembered."""

AFFINITY_BAND = 0.25
"""Share by which the engine that holds a prefix may be busier than the least loaded."""

AFFINITY_SLACK = 2.0
"""Requests by which it may be busier in any case."""


CACHED_WEIGHT = 2.0
"""Queued tokens that weigh as much as a cached one of the request.

Once for what it saves now, and once for what computing it elsewhere would cost later: the copy
takes the place of another prompt's blocks.
"""


class EngineLoad(NamedTuple):
    """One engine that can take requests, with what is known to be there or on its way."""

    rank: int
    requests: int
    """Running, waiting, and sent but not yet received."""
    waiting: int
    prefill_tokens: int
    """Queued prompt tokens, and those of requests not yet received."""
    kv_usage: float
    cached_tokens: int = 0
    """Tokens of the request that it is known to have cached; 0 without an index of blocks."""


class Choice(NamedTuple):
    """The chosen engine and why, for the routing metric."""

    rank: int
    reason: str


class RoutingPolicy(Protocol):
    """Chooses among engines; keeps no count of its own."""

    def choose(
        self,
        loads: Sequence[EngineLoad],
        prompt_token_ids: Sequence[int] = (),
        unseen_front_ends: int = 0,
        *,
        cache_root: bytes = b"",
    ) -> Choice:
        """Return the engine for a request.

        Args:
            loads: of the engines that can take it; not empty, sorted by rank.
            unseen_front_ends: how many others route to the same engines without being seen to.
            cache_root: prompts with different ones share nothing, however alike they begin.
        """
        ...


def cost(load: EngineLoad) -> float:
    """Return an engine's load in requests."""
    pressure = max(0.0, load.kv_usage - KV_PRESSURE_FROM) * KV_PRESSURE_WEIGHT
    queued = load.prefill_tokens / PREFILL_TOKENS_PER_REQUEST
    return load.requests + queued + load.waiting * pressure


def with_cached(loads: Sequence[EngineLoad], cached: Mapping[int, int]) -> list[EngineLoad]:
    """Return the loads with the tokens of a request that engines have cached, by rank."""
    return [
        each._replace(cached_tokens=cached[each.rank]) if each.rank in cached else each
        for each in loads
    ]


def with_adapter(choice: Choice, loads: Sequence[EngineLoad], resident: Collection[int]) -> Choice:
    """Return the choice, or an engine that is no busier and has the adapter in a slot.

    Args:
        resident: ranks of engines that have it there.
    """
    costs = {load.rank: cost(load) for load in loads}
    if choice.rank in resident:
        return choice
    near = [rank for rank in costs if rank in resident and costs[rank] <= costs[choice.rank]]
    return Choice(min(near, key=costs.__getitem__), "adapter") if near else choice


class LeastLoaded:
    """The engine with the least work, of those compared; ties go round among the tied only."""

    def __init__(self, start: int = 0) -> None:
        self._turn = start
        self._random = random.Random(start)

    def choose(
        self,
        loads: Sequence[EngineLoad],
        prompt_token_ids: Sequence[int] = (),
        unseen_front_ends: int = 0,
        *,
        cache_root: bytes = b"",
    ) -> Choice:
        if unseen_front_ends:
            loads = self.some(loads, unseen_front_ends)
        costs = [cost(load) for load in loads]
        least = min(costs)
        tied = [load.rank for load, each in zip(loads, costs, strict=True) if each == least]
        if len(tied) == 1:
            return Choice(tied[0], "least_loaded")
        self._turn += 1
        return Choice(tied[self._turn % len(tied)], "tie")

    def some(self, loads: Sequence[EngineLoad], unseen: int) -> Sequence[EngineLoad]:
        """Return the loads to compare while this many other front ends choose unseen."""
        share = max(2, math.ceil(len(loads) / (1 + unseen)))
        return loads if share >= len(loads) else self._random.sample(loads, share)


class PowerOfTwo:
    """The less loaded of two engines drawn at random: little to compare where engines are many."""

    def __init__(self, start: int = 0) -> None:
        self._random = random.Random(start)

    def choose(self, loads: Sequence[EngineLoad], *_: object, **__: object) -> Choice:
        if len(loads) == 1:
            return Choice(loads[0].rank, "power_of_two")
        first, second = self._random.sample(loads, 2)
        return Choice((first if cost(first) <= cost(second) else second).rank, "power_of_two")


class RoundRobin:
    """One engine after the other, whatever their load."""

    def __init__(self, start: int = 0) -> None:
        self._last = start - 1

    def choose(self, loads: Sequence[EngineLoad], *_: object, **__: object) -> Choice:
        # By rank and not by place, so that engines that come and go do not shift the others' turn.
        after = [load.rank for load in loads if load.rank > self._last]
        self._last = after[0] if after else loads[0].rank
        return Choice(self._last, "round_robin")


class PrefixAffinity:
    """The engine that last got a prompt that begins alike, while it is not much busier than others.

    What an engine has cached is not known here; what it was sent last is a good guess. The
    beginnings of prompts are remembered by hash, the least recently used ones are forgotten.

    Front ends do not tell each other what they remember. They agree all the same: a beginning that
    is new to one of them goes by consistent hashing with bounded loads (Mirrokni, Thorup and
    Zadimoghaddam, 2018), to the first engine in an order of the beginning's own that is not much
    busier than others. Engines that come and go leave the order of all others as it is.
    """

    def __init__(self, start: int = 0, capacity: int = AFFINITY_CAPACITY) -> None:
        self._otherwise = LeastLoaded(start)
        self._capacity = capacity
        self._rank_of: OrderedDict[int, int] = OrderedDict()

    def choose(
        self,
        loads: Sequence[EngineLoad],
        prompt_token_ids: Sequence[int] = (),
        unseen_front_ends: int = 0,
        *,
        cache_root: bytes = b"",
    ) -> Choice:
        hashes = _prefix_hashes(prompt_token_ids, cache_root)
        if hashes:
            choice = self._preferred(loads, hashes) or _by_hash(loads, hashes)
        else:
            choice = self._otherwise.choose(loads, unseen_front_ends=unseen_front_ends)
        rank_of = self._rank_of
        for each in hashes:
            rank_of[each] = choice.rank
            rank_of.move_to_end(each)
        while len(rank_of) > self._capacity:
            rank_of.popitem(last=False)
        return choice

    def _preferred(self, loads: Sequence[EngineLoad], hashes: list[int]) -> Choice | None:
        for length in range(len(hashes), 0, -1):
            rank = self._rank_of.get(hashes[length - 1])
            if rank is None:
                continue
            load = next((load for load in loads if load.rank == rank), None)
            if load is None:
                continue
            bound = _bound(min(map(cost, loads)), length * AFFINITY_BLOCK)
            return Choice(rank, "prefix") if cost(load) <= bound else None
        return None


class PrefixAware:
    """The engine with the least work once it has the request, of which it has some cached.

    That is `cost`, in requests, less what the engine is known to have cached of the prompt: each
    such token counts as `CACHED_WEIGHT` queued ones. No engine is chosen that is busier than
    `PrefixAffinity` would let it be.

    A prompt of which no engine has anything goes by hash, as with `PrefixAffinity`: others that
    begin alike and come before it is computed follow it, from whichever front end.
    """

    def __init__(self, start: int = 0) -> None:
        self._least_loaded = LeastLoaded(start)

    def choose(
        self,
        loads: Sequence[EngineLoad],
        prompt_token_ids: Sequence[int] = (),
        unseen_front_ends: int = 0,
        *,
        cache_root: bytes = b"",
    ) -> Choice:
        if not any(load.cached_tokens for load in loads):
            hashes = _prefix_hashes(prompt_token_ids, cache_root)
            if hashes:
                return _by_hash(loads, hashes)
            return self._least_loaded.choose(loads, unseen_front_ends=unseen_front_ends)
        costs = {load.rank: cost(load) for load in loads}
        least = min(costs.values())
        near = [load for load in loads if costs[load.rank] <= _bound(least, load.cached_tokens)]
        if unseen_front_ends:
            max_cached = max(load.cached_tokens for load in near)
            holders = [load for load in near if load.cached_tokens == max_cached]
            some = self._least_loaded.some
            near = [*some(near, unseen_front_ends), *some(holders, unseen_front_ends)]
        weight = CACHED_WEIGHT / PREFILL_TOKENS_PER_REQUEST
        best = min(near, key=lambda load: costs[load.rank] - weight * load.cached_tokens)
        return Choice(best.rank, "cached" if best.cached_tokens else "least_loaded")


def _bound(least: float, cached_tokens: int) -> float:
    """Return the maximum cost at which an engine with these cached tokens is chosen.

    A cached token saves what it would add to the cost of the queue.

    Args:
        least: cost of the least loaded engine.
    """
    saved = cached_tokens / PREFILL_TOKENS_PER_REQUEST
    return least * (1 + AFFINITY_BAND) + AFFINITY_SLACK + saved


def _by_hash(loads: Sequence[EngineLoad], hashes: Sequence[int]) -> Choice:
    """Return what every front end would choose that sees the same loads (rendezvous hashing)."""
    key = hashes[min(len(hashes), HASHED_BLOCKS) - 1]
    bound = _bound(min(map(cost, loads)), len(hashes) * AFFINITY_BLOCK)
    near = (load.rank for load in loads if cost(load) <= bound)
    return Choice(max(near, key=lambda rank: hash((key, rank))), "prefix_hash")


def _prefix_hashes(token_ids: Sequence[int], cache_root: bytes) -> list[int]:
    """Return a hash of each beginning of a prompt, in whole blocks, the shortest first."""
    hashes = []
    last = int.from_bytes(cache_root)
    end = min(len(token_ids), AFFINITY_BLOCK * AFFINITY_BLOCKS)
    for at in range(0, end - AFFINITY_BLOCK + 1, AFFINITY_BLOCK):
        last = hash((last, *token_ids[at : at + AFFINITY_BLOCK]))
        hashes.append(last)
    return hashes


POLICIES: dict[str, Callable[[int], RoutingPolicy]] = {
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
    "prefix-affinity": PrefixAffinity,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
}
"""Every policy by the name under which it is configured; the argument is where to begin."""


def build_policy(name: str, start: int) -> RoutingPolicy:
    """Return a policy of ours or of a plugin, which begins at `start`.

    Raises:
        BadPlugin: it is a plugin's, and cannot be used.
    """
    if name in POLICIES:
        return POLICIES[name](start)

    def tried(policy: Callable[[int], RoutingPolicy]) -> RoutingPolicy:
        idle = [EngineLoad(0, 0, 0, 0, 0.0)]
        chosen = policy(start).choose(idle, (), 0, cache_root=b"")
        if chosen.rank != 0:
            raise ValueError(f"it chose engine {chosen.rank} of engine 0 alone")
        return _Foreign(name, policy(start), start)

    return load_plugin("swell.routing_policies", name, "--routing-policy", tried)


class _Foreign:
    """A plugin's policy; where it fails, the least loaded engine is chosen."""

    def __init__(self, name: str, policy: RoutingPolicy, start: int) -> None:
        self._name, self._policy = name, policy
        self._otherwise = LeastLoaded(start)
        self._has_failed = False

    def choose(
        self,
        loads: Sequence[EngineLoad],
        prompt_token_ids: Sequence[int] = (),
        unseen_front_ends: int = 0,
        *,
        cache_root: bytes = b"",
    ) -> Choice:
        try:
            choice = self._policy.choose(
                loads, prompt_token_ids, unseen_front_ends, cache_root=cache_root
            )
            if any(choice.rank == load.rank for load in loads):
                return choice
            error = f"there is no engine {choice.rank!r}"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "--routing-policy %s failed, so that the least loaded engine was taken; "
                "this is not logged again: %s",
                self._name,
                error,
            )
        return self._otherwise.choose(loads, unseen_front_ends=unseen_front_ends)
