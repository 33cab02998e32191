"""Engine processes, as listed by the coordinator and as heard by this front end.

A state machine without I/O. It reports engines that have left or are unreachable;
`server.router.failover` decides the consequences for requests.
"""

from dataclasses import dataclass

import msgspec

from engine.shared.messages import ClusterView, EngineEntry, RouteHello
from engine.shared.roster import Roster
from engine.shared.scope import EVERYTHING, Scope
from server.router.load_table import Sent
from server.router.route import Engine, LastHello, Route


@dataclass(frozen=True)
class EngineLost:
    """An engine process has ended, losing everything that it was computing, or is unreachable."""

    rank: int
    incarnation: int
    was_silent: bool = False
    """It was silent before; it may come back, and no crash was seen."""
    exclusive_request: int = 0
    """Id of the request that it ran alone, the only possible culprit; 0 if none."""

    @property
    def engine(self) -> Engine:
        return self.rank, self.incarnation


@dataclass(eq=False)
class Members:
    """Routes to all engines, and their changes."""

    incarnation: int
    grace: float
    """Seconds of silence after which an engine is unreachable, or gone if a restarted coordinator
    does not list it either."""
    scope: Scope = EVERYTHING
    """Engines that this front end may use."""
    num_ranks: int = 0
    """Ranks below this belong to engines that exist, existed or are expected."""

    def __post_init__(self) -> None:
        self.routes: dict[int, Route] = {}
        """Routes to the engines in scope, by rank, in ascending order."""
        self.view: ClusterView | None = None
        """The newest snapshot, restricted to engines in scope."""
        self._view_at = 0.0
        self.has_prefill_engines = False
        """Whether any known engine computes prompts for others."""
        self._roster: Roster[EngineEntry] = Roster(self.grace)
        self._departed: dict[int, Route] = {}
        self._hellos: dict[Engine, LastHello] = {}
        self._last_check_at: float | None = None

    # -- events ----------------------------------------------------------------------------------

    def is_newer(self, view: ClusterView) -> bool:
        """Return whether a snapshot is newer than the known one."""
        known = self.view
        return known is None or view.epoch != known.epoch or view.version > known.version

    def take_view(self, view: ClusterView, now: float) -> list[EngineLost]:
        """Apply a newer snapshot of the coordinator; return the engines that left."""
        self._check_stall(now)
        ranks = [1 + entry.rank for entry in view.engines]
        self.num_ranks = max(self.num_ranks, *ranks, 0)
        scope = self.scope
        in_scope = [each for each in view.engines if scope.contains(each.rank, each.host)]
        view = msgspec.structs.replace(view, engines=[self._as_known(each) for each in in_scope])
        self.view = view
        self._view_at = now
        listed = {entry.rank: entry for entry in view.engines}
        change = self._roster.update(view.epoch, listed, now)
        lost = self._drop(change.left, now)
        for rank in change.joined:
            self.routes[rank] = self._route_to(listed[rank])
        if change.joined:
            self.routes = dict(sorted(self.routes.items()))
        for entry in view.engines:
            if (route := self.find(entry.rank, entry.incarnation)) is not None:
                route.entry = entry
        # A restarted coordinator may list only some of the engines.
        setups = (route.entry.setup for route in self.routes.values())
        self.has_prefill_engines = any(
            setup is not None and setup.kv_role == "prefill" for setup in setups
        )
        return lost

    def _as_known(self, entry: EngineEntry) -> EngineEntry:
        """Return an engine's entry, or the previous one if the coordinator has just restarted.

        An engine registers with a restarted coordinator in two messages, and between them it is
        listed as not ready. An engine that was ready stays so until it drains or ends.
        """
        hello = self._hellos.get((entry.rank, entry.incarnation))
        if hello is not None and hello.drains:
            return _draining(entry)
        known = self.find(entry.rank, entry.incarnation)
        if known is None or entry.ready or entry.draining or not known.entry.ready:
            return entry
        return known.entry

    def _route_to(self, entry: EngineEntry) -> Route:
        route = self._departed.pop(entry.rank, None)
        if route is not None and route.entry.incarnation == entry.incarnation:
            # It was only silent: its counts and its open route are still valid.
            route.entry = entry
        else:
            for rank, incarnation in list(self._hellos):
                if rank == entry.rank and incarnation != entry.incarnation:
                    del self._hellos[rank, incarnation]
            route = Route(entry=entry, sent=Sent(self.incarnation, entry.incarnation, 0, 0))
        hello = self._hellos.get(route.engine)
        if hello is not None:
            route.identity, route.last_hello_at = hello.identity, hello.at
        return route

    def expire(self, now: float) -> list[EngineLost]:
        """Return engines that a restarted coordinator does not list and that are silent here."""
        self._check_stall(now)
        return self._drop(self._roster.expire(now), now)

    def _drop(self, ranks: list[int], now: float) -> list[EngineLost]:
        lost = []
        for rank in ranks:
            route = self.routes.pop(rank, None)
            if route is not None:
                self._departed[rank] = route
                was_silent = now - route.last_hello_at > self.grace / 2
                lost.append(EngineLost(*route.engine, was_silent, route.exclusive_request))
        return lost

    def find_silent(self, now: float) -> list[EngineLost]:
        """Return the engines that the coordinator considers alive but that are silent here.

        They are unreachable until their next hello. Must be called at least every second.
        """
        self._check_stall(now)
        silent = []
        for route in self.routes.values():
            if route.identity is not None and now - route.last_hello_at > self.grace:
                route.identity = None
                silent.append(EngineLost(*route.engine, True, route.exclusive_request))
        return silent

    def _check_stall(self, now: float) -> None:
        """Record that this process is running; after a stall, unread messages do not count as
        silence."""
        was_stalled = self._last_check_at is not None and now - self._last_check_at > self.grace / 2
        self._last_check_at = now
        for rank, route in self.routes.items() if was_stalled else ():
            route.last_hello_at = now
            route.missing = None
            self._roster.record_alive(rank, now)

    def hello_received(self, sender: bytes, hello: RouteHello, now: float) -> bool:
        """Record an engine's hello: its request route to this front end is open.

        Returns whether the same process has a new connection: it had considered this front end
        dead, and has dropped all its requests.
        """
        engine = (hello.rank, hello.incarnation)
        known = self._hellos.get(engine)
        drains = hello.drains or (known is not None and known.drains)
        self._hellos[engine] = LastHello(sender, hello.session, now, drains)
        route = self.find(*engine)
        if route is not None:
            route.identity = sender
            route.last_hello_at = now
            if drains:
                route.entry = _draining(route.entry)
            self._roster.record_alive(hello.rank, now)
        return known is not None and known.session != hello.session

    def mark_unreachable(self, rank: int, incarnation: int) -> list[EngineLost]:
        """Mark an engine as unreachable until its next hello."""
        route = self.find(rank, incarnation)
        if route is None or route.identity is None:
            return []
        route.identity = None
        return [EngineLost(rank, incarnation, exclusive_request=route.exclusive_request)]

    def died(self, rank: int, incarnation: int) -> list[EngineLost]:
        """Remove an engine that is known to be dead before the coordinator reports it."""
        route = self.find(rank, incarnation)
        if route is None:
            return []
        # Its entry stays in the roster until the coordinator removes or replaces it, so that the
        # next snapshot does not re-add it as new.
        del self.routes[rank]
        self._hellos.pop((rank, incarnation), None)
        return [EngineLost(rank, incarnation, exclusive_request=route.exclusive_request)]

    # -- queries ---------------------------------------------------------------------------------

    def find(self, rank: int, incarnation: int) -> Route | None:
        """Return the route to an engine process, or None."""
        route = self.routes.get(rank)
        return route if route is not None and route.entry.incarnation == incarnation else None

    def last_identity(self, engine: Engine) -> bytes | None:
        """Return the socket identity of an engine's last hello, or None."""
        hello = self._hellos.get(engine)
        return None if hello is None else hello.identity

    @property
    def ready(self) -> bool:
        """Whether at least one engine can run requests now."""
        return any(route.is_usable for route in self.routes.values())

    @property
    def has_engines(self) -> bool:
        """Whether there is at least one engine, even if halted."""
        return any(route.is_open for route in self.routes.values())

    @property
    def reaches_engines(self) -> bool:
        """Whether the coordinator has listed the engines, and all ready ones are reachable."""
        routes = self.routes.values()
        return self.view is not None and all(each.is_open for each in routes if each.entry.ready)

    @property
    def wave(self) -> int:
        return self.view.wave if self.view is not None else 0

    @property
    def paused(self) -> bool:
        """Whether no engine is stepping, as far as known."""
        if self.view is not None and self.view.running:
            return False
        stats = (route.stats for route in self.routes.values())
        return all(each is None or each.running + each.waiting == 0 for each in stats)

    @property
    def max_model_len(self) -> int | None:
        """Maximum sequence length that every engine supports; None without engines."""
        setups = [route.entry.setup for route in self.routes.values() if route.is_open]
        return min((setup.max_model_len for setup in setups if setup), default=None)

    @property
    def serves_images(self) -> bool:
        """Whether any connected engine accepts images."""
        return any(route.is_open and route.accepts_images for route in self.routes.values())

    @property
    def needs_original_images(self) -> bool:
        """Whether any connected engine resizes images itself."""
        setups = [route.entry.setup for route in self.routes.values() if route.is_open]
        return any(setup is not None and setup.whole_images for setup in setups)

    @property
    def num_slots(self) -> int:
        """Sequences that the engines can run at once, now or after they resume."""
        usable = [route for route in self.routes.values() if route.is_usable]
        counted = usable or [route for route in self.routes.values() if route.is_open]
        return sum(route.num_slots for route in counted)

    def view_age(self, now: float) -> float | None:
        """Return the seconds since the newest view arrived; None before the first."""
        return None if self.view is None else now - self._view_at

    def stats_age(self, now: float) -> dict[int, float]:
        """Return the seconds since the newest stats of each engine arrived."""
        return {
            rank: now - route.stats_at
            for rank, route in self.routes.items()
            if route.stats is not None
        }

    def unseen_front_ends(self, seen: int) -> int:
        """Return how many front ends, besides the `seen` ones, route to the same engines."""
        if self.view is None or self.scope != EVERYTHING:
            return 0
        return max(0, self.view.num_front_ends - seen)


def _draining(entry: EngineEntry) -> EngineEntry:
    return msgspec.structs.replace(entry, ready=False, draining=True)
