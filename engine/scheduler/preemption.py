"""Which running requests give way to waiting ones of higher priority."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.scheduler.request import Request


class Room(NamedTuple):
    """What is free, or will be as soon as the plans in flight are done."""

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
    first, so that equals never displace each other. Nobody is preempted for a request that would
    not fit even then.

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
        if blocks + sum(len(each.table.block_ids) for each in lower) < headroom:
            break
        while lower and (slots < 0 or blocks < room.headroom):
            lower.pop()
            victim = candidates.pop()
            victims.append(victim)
            slots += 1
            blocks += len(victim.table.block_ids)
    return victims
