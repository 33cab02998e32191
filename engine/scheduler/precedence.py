"""Which of two requests goes first, and which running requests give way."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from engine.scheduler.fairness import Shares
from engine.scheduler.preemption import Engine, Room, choose_heaviest, choose_victims
from engine.scheduler.request import Request, precedence

_arrival = attrgetter("arrival")
_priority = attrgetter("priority")


class Precedence:
    """The order of requests: by priority, then between tenants, then by arrival.

    While blocks may run short, tenants that hold more of them than the average come after the
    others, so that it is they who are preempted. Without other tenants the order is that of
    priority and arrival alone.
    """

    def __init__(self, shares: Shares, engine: Engine, *, by_priority: bool) -> None:
        self._shares = shares
        self._engine = engine
        self._by_priority = by_priority
        self._heavy: set[int] = set()
        self._short = False

    def look(self, running: Iterable[Request], *, short: bool) -> None:
        """Note for a step which tenants hold much; `short`: blocks may run short in it."""
        self._heavy = set()
        self._short = short
        if not short or not self._shares.contended:
            return
        held: dict[int, int] = {}
        for request in running:
            held[request.tenant] = held.get(request.tenant, 0) + request.table.num_blocks
        average = sum(held.values()) / max(1, len(held))
        self._heavy = {tenant for tenant, blocks in held.items() if blocks > average}

    def standing(self, request: Request) -> tuple[int, bool, int]:
        """Return what running requests are ordered by: the largest is preempted first."""
        return request.priority, request.tenant in self._heavy, request.arrival

    def in_order(self, running: Iterable[Request]) -> list[Request]:
        """Return running requests, which are in order of admission, in that of `standing`.

        Without priorities the order only matters where somebody may have to give way: then whoever
        does must come after all that stay, since what is planned already cannot.
        """
        ordered = list(running)
        if not self._by_priority and not self._short:
            return ordered
        ordered.sort(key=_arrival)  # stable sorts by one field each cost less than one by three
        heavy = self._heavy
        if heavy:
            light = [each for each in ordered if each.tenant not in heavy]
            ordered = light + [each for each in ordered if each.tenant in heavy]
        if self._by_priority:
            ordered.sort(key=_priority)
        return ordered

    def sort_prefills(self, partials: list[Request]) -> None:
        """Order prefills that have begun: tenants that have had least first."""
        if len(partials) > 1 and self._shares.contended:
            served = self._shares.served
            partials.sort(key=lambda each: (each.priority, served(each.tenant), each.arrival))

    def before(self, waiting: Request, begun: Request) -> bool:
        """Whether a waiting request goes before the rest of a prefill that has begun."""
        if waiting.priority == begun.priority and waiting.tenant != begun.tenant:
            return self._shares.served(waiting.tenant) < self._shares.served(begun.tenant)
        return precedence(waiting) < precedence(begun)

    def victims(
        self,
        waiting: Iterable[Request],
        running: Iterable[Request],
        room: Room,
        blocks_needed: Callable[[Request], int],
        *,
        short: bool,
    ) -> list[Request]:
        """Return the running requests to preempt for waiting ones, last first.

        `short`: waiting requests have no slot, or were passed over.
        """
        unfair = short and self._shares.contended
        if not self._by_priority and not unfair:
            return []
        ordered = self.in_order(running)
        if self._by_priority:
            urgent = choose_victims(waiting, ordered, room, blocks_needed)
            if urgent or not unfair:
                return urgent
        return choose_heaviest(waiting, ordered, room, blocks_needed, self._engine)
