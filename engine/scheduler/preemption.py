"""Which running requests are preempted for waiting ones: more urgent ones, and other tenants'."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.scheduler.request import Request

MARGIN = 2
"""How many times as much as another tenant one has to hold to give way to it: recomputing a
preempted request has a cost, so small differences are left to even out."""


class Room(NamedTuple):
    """What is free, or will be once the plans in flight are done."""

    slots: int
    blocks: int
    headroom: int
    """Blocks that stay free while anything runs."""
    tokens: int
    """Token budget of a step: no room is made for requests that it cannot begin anyway."""


def choose_victims(
    waiting: Iterable[Request],
    running: list[Request],
    room: Room,
    blocks_needed: Callable[[Request], int],
) -> list[Request]:
    """Return the running requests to preempt so that more urgent ones can start, last first.

    Only requests of strictly lower priority (a larger number) give way, the lowest and latest
    first, so that equals never displace each other. No request is preempted for one that would
    still not fit.

    Args:
        waiting: in the order of admission.
        running: in order of precedence.
        room: what there is without any preemption.
        blocks_needed: free blocks that the admission of a request takes.
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


class Engine(NamedTuple):
    """What there is to share."""

    slots: int
    blocks: int


class _Holding:
    """What a tenant has of an engine, and which of its requests came last."""

    def __init__(self, running: list[Request]) -> None:
        self.running = running
        self.slots = len(running)
        self.blocks = sum([each.table.num_blocks for each in running])

    def part(self, of: Engine, slots: int = 0, blocks: int = 0) -> float:
        """Return the larger of the shares of slots and blocks, with this many more."""
        return max((self.slots + slots) / of.slots, (self.blocks + blocks) / of.blocks)


def choose_heaviest(
    waiting: Iterable[Request],
    running: list[Request],
    room: Room,
    blocks_needed: Callable[[Request], int],
    engine: Engine,
) -> list[Request]:
    """Return the running requests to preempt so that each tenant comes to its part, last first.

    The tenant that holds most gives way, with the request that came last, but only while it still
    holds `MARGIN` times what the other one gets: tenants that are about equal never displace each
    other. No request is preempted for one that would still not fit, or for a less urgent one.

    The arguments are those of `choose_victims`, and what there is in all.
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
        own = holdings.setdefault(request.tenant, _Holding([]))
        wanted = own.part(engine, 1, needed)
        given: list[Request] = []
        while slots < 0 or blocks < headroom:
            victim = _of_heaviest(holdings, request, wanted, engine)
            if victim is None:
                return victims
            given.append(victim)
            slots += 1
            blocks += victim.table.num_blocks
        victims += given
        own.slots += 1
        own.blocks += needed
    return victims


def _of_heaviest(
    holdings: dict[int, _Holding], request: Request, wanted: float, engine: Engine
) -> Request | None:
    """Take a request from the tenant that holds most, if it then still holds enough."""
    others = [
        each
        for tenant, each in holdings.items()
        if tenant != request.tenant
        and each.running
        and each.running[-1].priority >= request.priority
    ]
    if not others:
        return None
    heaviest = max(others, key=lambda each: each.part(engine))
    victim = heaviest.running[-1]
    size = victim.table.num_blocks
    if heaviest.part(engine, -1, -size) < MARGIN * wanted:
        return None
    heaviest.running.pop()
    heaviest.slots -= 1
    heaviest.blocks -= size
    return victim
