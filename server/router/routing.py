"""Routing policies: pure functions of load behind one interface.

Load is weighted: every request that runs, waits or is in transit counts as one, queued prefill
tokens count in proportion, and waiting requests count more while the KV cache is nearly full, since
they will wait longer.

Front ends of one node see each other's sends; those of other nodes show only in later stats. If all
of them chose the least loaded engine, they would all choose the same one, so a front end with such
peers compares only a random sample of engines: the more peers, the smaller.
"""

import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

PREFILL_TOKENS_PER_REQUEST = 512
"""Queued prompt tokens that weigh as much as one running request."""

KV_PRESSURE_FROM = 0.8
"""KV usage above which waiting requests weigh more."""

KV_PRESSURE_WEIGHT = 20.0
"""Weight of a waiting request at full KV usage is 1 + this * (1 - KV_PRESSURE_FROM)."""

AFFINITY_BLOCK = 32
"""Tokens per block of remembered prompt prefixes."""

AFFINITY_BLOCKS = 64
"""Maximum blocks considered per prompt."""

HASHED_BLOCKS = 4
"""Blocks hashed to choose an engine for a prompt without remembered prefix.

More than the part that all prompts of a chat template share, fewer than shared instructions.
"""

AFFINITY_CAPACITY = 1 << 15
"""Maximum prefixes remembered."""

AFFINITY_BAND = 0.25
"""Fraction by which the engine with a prefix can be busier than the least loaded one."""

AFFINITY_SLACK = 2.0
"""Number of requests by which it can be busier in any case."""


CACHED_WEIGHT = 2.0
"""Queued tokens that weigh as much as a cached token of the request.

One for the saving now, and one for the later cost of computing it elsewhere, where the copy
displaces another prompt's blocks.
"""


class EngineLoad(NamedTuple):
    """Load of an engine that can take requests, including requests in transit."""

    rank: int
    requests: int
    """Running, waiting, and sent but not yet received."""
    waiting: int
    prefill_tokens: int
    """Queued prompt tokens, including requests not yet received."""
    kv_usage: float
    """Share of KV blocks in use in the last stats, without requests in transit."""
    cached_tokens: int = 0
    """Cached tokens of the request; 0 without a block index."""


class Choice(NamedTuple):
    """The chosen engine, and the reason for the routing metric."""

    rank: int
    reason: str


class RoutingPolicy(Protocol):
    """Chooses among engines, without tracking load itself."""

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
            loads: engines that can take it; not empty, sorted by rank.
            unseen_front_ends: number of other front ends on the same engines whose sends are
                invisible.
            cache_root: prompts with different roots share no cache, even if they begin alike.
        """
        ...


def cost(load: EngineLoad) -> float:
    """Return an engine's load in requests."""
    pressure = max(0.0, load.kv_usage - KV_PRESSURE_FROM) * KV_PRESSURE_WEIGHT
    queued = load.prefill_tokens / PREFILL_TOKENS_PER_REQUEST
    return load.requests + queued + load.waiting * pressure


def with_cached(loads: Sequence[EngineLoad], cached: Mapping[int, int]) -> list[EngineLoad]:
    """Return the loads with `cached_tokens` set from `cached`, by rank."""
    return [
        each._replace(cached_tokens=cached[each.rank]) if each.rank in cached else each
        for each in loads
    ]


def with_adapter(choice: Choice, loads: Sequence[EngineLoad], resident: Collection[int]) -> Choice:
    """Return the choice, or an engine that is no busier and has the adapter in a slot.

    Args:
        resident: ranks of engines that have it in a slot.
    """
    costs = {load.rank: cost(load) for load in loads}
    if choice.rank in resident:
        return choice
    near = [rank for rank in costs if rank in resident and costs[rank] <= costs[choice.rank]]
    return Choice(min(near, key=costs.__getitem__), "adapter") if near else choice


class LeastLoaded:
    """The compared engine with the least load; ties rotate among the tied engines."""

    def __init__(self, start: int = 0) -> None:
        self._rotation = start
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
            loads = self.sample(loads, unseen_front_ends)
        costs = [cost(load) for load in loads]
        least = min(costs)
        tied = [load.rank for load, each in zip(loads, costs, strict=True) if each == least]
        if len(tied) == 1:
            return Choice(tied[0], "least_loaded")
        self._rotation += 1
        return Choice(tied[self._rotation % len(tied)], "tie")

    def sample(self, loads: Sequence[EngineLoad], unseen: int) -> Sequence[EngineLoad]:
        """Return a random sample of loads to compare with this many unseen front ends."""
        share = max(2, math.ceil(len(loads) / (1 + unseen)))
        return loads if share >= len(loads) else self._random.sample(loads, share)


class PowerOfTwo:
    """The less loaded of two random engines: cheap with many engines."""

    def __init__(self, start: int = 0) -> None:
        self._random = random.Random(start)

    def choose(self, loads: Sequence[EngineLoad], *_: object, **__: object) -> Choice:
        if len(loads) == 1:
            return Choice(loads[0].rank, "power_of_two")
        first, second = self._random.sample(loads, 2)
        return Choice((first if cost(first) <= cost(second) else second).rank, "power_of_two")


class RoundRobin:
    """Engines in turn, regardless of load."""

    def __init__(self, start: int = 0) -> None:
        self._last = start - 1

    def choose(self, loads: Sequence[EngineLoad], *_: object, **__: object) -> Choice:
        # By rank instead of index, so that engines joining or leaving do not shift the order.
        after = [load.rank for load in loads if load.rank > self._last]
        self._last = after[0] if after else loads[0].rank
        return Choice(self._last, "round_robin")


class PrefixAffinity:
    """The engine last sent a prompt with the same prefix, unless it is much busier than others.

    Engines' caches are not known here; the last engine is a good guess. Prefixes are remembered by
    hash, with LRU eviction.

    Front ends do not share what they remember, but still agree: a new prefix is placed by
    consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), on the first
    engine in the prefix's own order that is not much busier than others. Engines that join or leave
    do not change the relative order of the others.
    """

    def __init__(self, start: int = 0, capacity: int = AFFINITY_CAPACITY) -> None:
        self._fallback = LeastLoaded(start)
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
            choice = self._fallback.choose(loads, unseen_front_ends=unseen_front_ends)
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
    """The engine with the least load after discounting its cached tokens of the request.

    That is `cost`, in requests, minus the prompt tokens known to be cached: each counts as
    `CACHED_WEIGHT` queued tokens. An engine busier than `PrefixAffinity` would allow is never
    chosen.

    A prompt that no engine has cached is placed by hash, as in `PrefixAffinity`, so prompts with
    the same prefix that arrive before it is computed follow it, from any front end.
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
            sample = self._least_loaded.sample
            near = [*sample(near, unseen_front_ends), *sample(holders, unseen_front_ends)]
        weight = CACHED_WEIGHT / PREFILL_TOKENS_PER_REQUEST
        best = min(near, key=lambda load: costs[load.rank] - weight * load.cached_tokens)
        return Choice(best.rank, "cached" if best.cached_tokens else "least_loaded")


def _bound(least: float, cached_tokens: int) -> float:
    """Return the maximum cost at which an engine with these cached tokens can be chosen."""
    saved = cached_tokens / PREFILL_TOKENS_PER_REQUEST
    return least * (1 + AFFINITY_BAND) + AFFINITY_SLACK + saved


def _by_hash(loads: Sequence[EngineLoad], hashes: Sequence[int]) -> Choice:
    """Return the choice that all front ends with the same loads make (rendezvous hashing)."""
    key = hashes[min(len(hashes), HASHED_BLOCKS) - 1]
    bound = _bound(min(map(cost, loads)), len(hashes) * AFFINITY_BLOCK)
    near = (load.rank for load in loads if cost(load) <= bound)
    return Choice(max(near, key=lambda rank: hash((key, rank))), "prefix_hash")


def _prefix_hashes(token_ids: Sequence[int], cache_root: bytes) -> list[int]:
    """Return a hash per prefix of a prompt, in whole blocks, shortest first."""
    hashes = []
    last = int.from_bytes(cache_root)
    end = min(len(token_ids), AFFINITY_BLOCK * AFFINITY_BLOCKS)
    for at in range(0, end - AFFINITY_BLOCK + 1, AFFINITY_BLOCK):
        last = hash((last, *token_ids[at : at + AFFINITY_BLOCK]))
        hashes.append(last)
    return hashes


class BuiltIn(NamedTuple):
    """A built-in policy."""

    build: Callable[[int], RoutingPolicy]
    """Builds it, given the start of its rotation."""
    help: str
    """Its part of the help of `--routing-policy`."""


POLICIES = {
    "least-loaded": BuiltIn(LeastLoaded, "the one with the least work"),
    "prefix-aware": BuiltIn(
        PrefixAware,
        "the one with the least work including the request, minus its cached prefix: engines "
        "report which KV blocks they hold",
    ),
    "prefix-affinity": BuiltIn(
        PrefixAffinity,
        "the one that got a prompt with the same beginning, unless it is much busier (for a new "
        "beginning all front ends choose the same engine)",
    ),
    "power-of-two": BuiltIn(PowerOfTwo, "the less loaded of two drawn at random"),
    "round-robin": BuiltIn(RoundRobin, "each in turn"),
}
"""Built-in policies by name; the choices of `--routing-policy`."""


def build_policy(name: str, start: int) -> RoutingPolicy:
    """Build a built-in policy, or a plugin's.

    Raises:
        BadPlugin: the policy's plugin cannot be used.
    """
    if name in POLICIES:
        return POLICIES[name].build(start)
    from engine.shared.plugins import load_plugin  # slow to import; every command imports this

    def checked(policy: Callable[[int], RoutingPolicy]) -> RoutingPolicy:
        idle = [EngineLoad(0, 0, 0, 0, 0.0)]
        chosen = policy(start).choose(idle, (), 0, cache_root=b"")
        if chosen.rank != 0:
            raise ValueError(f"it chose engine {chosen.rank}, but there is only engine 0")
        return _PluginPolicy(name, policy(start), start)

    return load_plugin("swell.routing_policies", name, "--routing-policy", checked)


class _PluginPolicy:
    """A plugin's policy; if it fails, the least loaded engine is chosen."""

    def __init__(self, name: str, policy: RoutingPolicy, start: int) -> None:
        self._name, self._policy = name, policy
        self._fallback = LeastLoaded(start)
        self._has_failed = False

    def choose(self, loads: Sequence[EngineLoad], *inputs: Any, **named: Any) -> Choice:
        try:
            choice = self._policy.choose(loads, *inputs, **named)
            if any(choice.rank == load.rank for load in loads):
                return choice
            error = f"there is no engine {choice.rank!r}"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "--routing-policy %s failed, so the least loaded engine was chosen; "
                "this is not logged again: %s",
                self._name,
                error,
            )
        return self._fallback.choose(loads, *inputs, **named)
