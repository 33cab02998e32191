"""Chooses running requests to preempt for waiting ones: by priority, and between tenants."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.scheduler.request import Request

MARGIN = 2
"""Factor by which a tenant must hold more than another to be preempted for it: recomputing a
preempted request has a cost, so small differences are left to even out."""


class FreeCapacity(NamedTuple):
    """Free capacity, including what is freed once the plans in flight are done."""

    slots: int
    blocks: int
    headroom: int
    """Blocks that must stay free while anything runs."""
    tokens: int
    """Token budget of a step; no room is made for requests that could not start in it."""


def choose_victims(
    waiting: Iterable[Request],
    running: list[Request],
    room: FreeCapacity,
    blocks_needed: Callable[[Request], int],
) -> list[Request]:
    """Return the running requests to preempt so that more urgent ones can start.

    Only requests of strictly lower priority (a larger number) are preempted, lowest priority and
    latest arrival first, so equals never displace each other. None is preempted for a request that
    would still not fit.

    Args:
        waiting: in order of admission.
        running: in order of precedence.
        room: capacity without any preemption.
        blocks_needed: returns the free blocks that admitting a request takes.
    """
    victims: list[Request] = []
    slots, blocks, _, tokens = room
    candidates = list(running)
    for request in waiting:
        if tokens <= 0 or not candidates or candidates[-1].priority <= request.priority:
            break
        slots -= 1
        blocks -= blocks_needed(request)
        tokens -= request.queued_tokens
        lower = [each for each in candidates if each.priority > request.priority]
        headroom = room.headroom if len(lower) < len(candidates) else 0
        if blocks + sum(each.table.num_blocks for each in lower) < headroom:
            break
        while lower and (slots < 0 or blocks < room.headroom):
            lower.pop()
            victim = candidates.pop()
            victims.append(victim)
            slots += 1
            blocks += victim.table.num_blocks
    return victims


class Capacity(NamedTuple):
    """Total capacity of an engine."""

    slots: int
    blocks: int


class _Holding:
    """Slots and blocks of a tenant, and its running requests in order of preemption."""

    def __init__(self, running: list[Request]) -> None:
        self.running = running
        self.slots = len(running)
        self.blocks = sum([each.table.num_blocks for each in running])

    def share(self, capacity: Capacity, slots: int = 0, blocks: int = 0) -> float:
        """Return the larger of its shares of slots and of blocks, with these many more."""
        return max((self.slots + slots) / capacity.slots, (self.blocks + blocks) / capacity.blocks)


def choose_heaviest(
    waiting: Iterable[Request],
    running: list[Request],
    room: FreeCapacity,
    blocks_needed: Callable[[Request], int],
    capacity: Capacity,
) -> list[Request]:
    """Return the running requests to preempt so that each tenant gets its share.

    The tenant with the largest share is preempted, last request first, but only while it still
    holds `MARGIN` times what the other one gets, so tenants of about equal shares never displace
    each other. None is preempted for a request that would still not fit, or for a less urgent one.

    The arguments are those of `choose_victims`, and the total capacity.
    """
    by_tenant: defaultdict[int, list[Request]] = defaultdict(list)
    for request in running:
        by_tenant[request.tenant].append(request)
    holdings = {tenant: _Holding(requests) for tenant, requests in by_tenant.items()}
    victims: list[Request] = []
    slots, blocks, headroom, tokens = room
    for request in waiting:
        if tokens <= 0:
            break
        needed = blocks_needed(request)
        slots -= 1
        blocks -= needed
        tokens -= request.queued_tokens
        holding = holdings.setdefault(request.tenant, _Holding([]))
        share = holding.share(capacity, 1, needed)
        chosen: list[Request] = []
        while slots < 0 or blocks < headroom:
            victim = _of_heaviest(holdings, request, share, capacity)
            if victim is None:
                return victims
            chosen.append(victim)
            slots += 1
            blocks += victim.table.num_blocks
        victims += chosen
        holding.slots += 1
        holding.blocks += needed
    return victims


def _of_heaviest(
    holdings: dict[int, _Holding], request: Request, share: float, capacity: Capacity
) -> Request | None:
    """Remove and return a request of the largest tenant, if that still holds enough afterwards."""
    others = [
        each
        for tenant, each in holdings.items()
        if tenant != request.tenant
        and each.running
        and each.running[-1].priority >= request.priority
    ]
    if not others:
        return None
    heaviest = max(others, key=lambda each: each.share(capacity))
    victim = heaviest.running[-1]
    size = victim.table.num_blocks
    if heaviest.share(capacity, -1, -size) < MARGIN * share:
        return None
    heaviest.running.pop()
    heaviest.slots -= 1
    heaviest.blocks -= size
    return victim
