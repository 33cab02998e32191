"""What one front end knows of the engines: a state machine without I/O.

The coordinator's snapshots and the stats that engines put on their own outputs are merged by
their stamps. What this front end and its neighbours have sent and an engine has not yet received
is added exactly once:

    load(engine) = what its newest stats show + (sent - received as of these stats)
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.shared.messages import ClusterView, EngineEntry, EngineStats
from engine.shared.roster import Roster
from engine.shared.scope import EVERYTHING, Scope
from server.router.load_table import LoadTable, Sent, received_from
from server.router.route import (
    Behind,
    HeardHello,
    Route,
    alone_on,
    is_idle,
    is_open,
    is_usable,
    slots_of,
)
from server.router.routing import EngineLoad


@dataclass(frozen=True)
class EngineLost:
    """An engine process has gone, with everything that it was computing."""

    rank: int
    incarnation: int
    was_silent: bool = False
    """It was not heard for long before: it may be back some day, and its end was no crash that
    was seen."""
    alone: int = 0
    """Id of the request that it ran alone: its end was the doing of nobody else there."""


class ClusterState:
    """Engines, their loads, the wave and the running flag as one front end sees them."""

    def __init__(
        self,
        front_end: int,
        incarnation: int,
        grace: float,
        table: LoadTable | None,
        scope: Scope = EVERYTHING,
        num_ranks: int = 0,
    ) -> None:
        """Know nothing yet but that there shall be engines of ranks below `num_ranks`."""
        self.num_ranks = num_ranks
        """Ranks below this belong to engines that there are, were or shall be."""
        self.view: ClusterView | None = None
        """The newest snapshot, with the engines in scope."""
        self._scope = scope
        self._front_end = front_end
        self._incarnation = incarnation
        self._table = table
        self._roster: Roster[EngineEntry] = Roster(grace)
        self._routes: dict[int, Route] = {}
        self._departed: dict[int, Route] = {}
        self._route_hellos: dict[tuple[int, int], HeardHello] = {}
        self._grace = grace
        self._looked_at: float | None = None
        self._broken: set[tuple[int, int]] = set()

    # -- events ----------------------------------------------------------------------------------

    def update_view(self, view: ClusterView, now: float) -> list[EngineLost]:
        """Take a snapshot of the coordinator; return the engines that have gone."""
        known = self.view
        if known is not None and view.epoch == known.epoch and view.version <= known.version:
            return []
        ranks = [1 + entry.rank for entry in view.engines]
        self.num_ranks = max(self.num_ranks, *ranks, 0)
        scope = self._scope
        if scope != EVERYTHING:
            near = [each for each in view.engines if scope.contains(each.rank, each.host)]
            view = msgspec.structs.replace(view, engines=near)
        self.view = view
        listed = {entry.rank: entry for entry in view.engines}
        change = self._roster.update(view.epoch, listed, now)
        lost = self._drop(change.left, now)
        for rank in change.joined:
            self._routes[rank] = self._route_to(listed[rank])
        for entry in view.engines:
            route = self._routes.get(entry.rank)
            if route is None or route.entry.incarnation != entry.incarnation:
                continue
            route.entry = entry
            if entry.stats is not None:
                self.observe(entry.stats, now)
        return lost

    def _route_to(self, entry: EngineEntry) -> Route:
        departed = self._departed.pop(entry.rank, None)
        if departed is not None and departed.entry.incarnation == entry.incarnation:
            # It was only silent: what was sent to it and its open route are still there.
            departed.entry = entry
            return self._opened(departed)
        for rank, incarnation in list(self._route_hellos):
            if rank == entry.rank and incarnation != entry.incarnation:
                del self._route_hellos[rank, incarnation]
        route = Route(entry, sent=Sent(self._incarnation, entry.incarnation, 0, 0))
        return self._opened(route)

    def _opened(self, route: Route) -> Route:
        route_hello = self._route_hellos.get((route.entry.rank, route.entry.incarnation))
        if route_hello is not None:
            route.identity, route.heard_at = route_hello.identity, route_hello.at
        return route

    def tick(self, now: float) -> list[EngineLost]:
        """Return the engines that a restarted coordinator has not listed for too long."""
        return self._drop(self._roster.expire(now), now)

    def unheard(self, now: float) -> list[EngineLost]:
        """Return the engines that live, as the coordinator says, but are not heard here any more.

        They are out of reach until they say hello again. Has to be called at least every second.
        """
        late = self._looked_at is not None and now - self._looked_at > self._grace / 2
        self._looked_at = now
        silent = []
        for rank, route in self._routes.items():
            if late:  # this process itself was held up: what was said meanwhile is still unread
                route.heard_at = now
                route.behind = None
            elif route.identity is not None and now - route.heard_at > self._grace:
                silent.append((rank, route.entry.incarnation))
        return [
            EngineLost(lost.rank, lost.incarnation, was_silent=True, alone=lost.alone)
            for each in silent
            for lost in self.out_of_reach(*each)
        ]

    def observe(self, stats: EngineStats, now: float) -> None:
        """Take stats from wherever they come; older ones than those known are ignored."""
        route = self._routes.get(stats.rank)
        if route is None or route.entry.incarnation != stats.incarnation:
            return
        if route.stats is None or stats.version > route.stats.version:
            route.stats = stats
            route.stats_at = now
            route.load = None
            if self._is_behind(route, stats, now):
                self._broken.add((stats.rank, stats.incarnation))

    def take_broken(self) -> set[tuple[int, int]]:
        """Return (rank, incarnation) of the engines to or from which messages were lost.

        They had been missing for a grace when newer stats came, and were missing still.
        """
        broken, self._broken = self._broken, set()
        return broken

    def _is_behind(self, route: Route, stats: EngineStats, now: float) -> bool:
        seen = received_from(stats, self._front_end, self._incarnation)
        requests, outputs = (seen.requests, seen.outputs) if seen else (0, 0)
        if requests > route.sent.requests:  # what was thought lost has arrived after all
            route.sent = route.sent._replace(
                requests=requests, prompt_tokens=seen.prompt_tokens if seen else 0
            )
        behind = route.behind
        if behind is not None and requests >= behind.requests and route.outputs >= behind.outputs:
            behind = None
        if behind is None and (requests < route.sent.requests or outputs > route.outputs):
            behind = Behind(now, route.sent.requests, outputs)
        route.behind = behind
        if behind is None or now - behind.since <= self._grace:
            return False
        route.behind = None
        return True

    def outputs_arrived(self, stats: EngineStats) -> int:
        """A message with outputs arrived, with these stats.

        Returns:
            0 if it is the next one, a positive number if messages before it were lost, and a
            negative one if it is known already. Messages of engines that are not listed (yet, or
            any more) are always the next.
        """
        route = self._routes.get(stats.rank)
        seen = received_from(stats, self._front_end, self._incarnation)
        if route is None or route.entry.incarnation != stats.incarnation or seen is None:
            return 0
        if seen.outputs == 0:
            return 0  # an engine that does not count them
        order = seen.outputs - route.outputs - 1
        route.outputs = max(route.outputs, seen.outputs)
        return order

    def forget_unreceived(self, rank: int) -> None:
        """What an engine has not received by now is taken for lost."""
        route = self._routes.get(rank)
        if route is None:
            return
        seen = received_from(route.stats, self._front_end, self._incarnation)
        counts = (seen.requests, seen.prompt_tokens) if seen else (0, 0)
        route.sent = route.sent._replace(requests=counts[0], prompt_tokens=counts[1])
        route.load = None
        route.behind = None
        if seen is not None:
            route.outputs = max(route.outputs, seen.outputs)
        if self._table is not None:
            self._table.publish(rank, route.sent)

    def heard_hello(
        self, rank: int, incarnation: int, identity: bytes, session: int, now: float
    ) -> bool:
        """An engine's request route to this front end is open.

        Returns whether it is another connection of the same process than before: then that had
        given this front end up for dead, and has dropped everything that it was sent.
        """
        known = self._route_hellos.get((rank, incarnation))
        self._route_hellos[rank, incarnation] = HeardHello(identity, session, now)
        route = self._routes.get(rank)
        if route is not None and route.entry.incarnation == incarnation:
            route.identity = identity
            route.heard_at = now
        return known is not None and known.session != session

    def out_of_reach(self, rank: int, incarnation: int) -> list[EngineLost]:
        """An engine does not hear this front end, or is not heard, until it greets again."""
        route = self._routes.get(rank)
        if route is None or route.entry.incarnation != incarnation or route.identity is None:
            return []
        route.identity = None
        return [EngineLost(rank, incarnation, alone=alone_on(route))]

    def lost(self, rank: int, incarnation: int) -> list[EngineLost]:
        """An engine is known to be dead before the coordinator says so."""
        route = self._routes.get(rank)
        if route is None or route.entry.incarnation != incarnation:
            return []
        # Its entry stays in the roster until the coordinator removes or replaces it: it must not
        # come back as a newcomer with the next snapshot.
        del self._routes[rank]
        self._route_hellos.pop((rank, incarnation), None)
        return [EngineLost(rank, incarnation, alone=alone_on(route))]

    def sent(self, rank: int, prompt_tokens: int) -> None:
        """Count a request that was just sent to an engine."""
        route = self._routes[rank]
        before = route.sent
        route.sent = before._replace(
            requests=before.requests + 1, prompt_tokens=before.prompt_tokens + prompt_tokens
        )
        route.load = None
        if self._table is not None:
            self._table.publish(rank, route.sent)

    def _drop(self, ranks: list[int], now: float) -> list[EngineLost]:
        lost = []
        for rank in ranks:
            route = self._routes.pop(rank, None)
            if route is not None:
                self._departed[rank] = route
                was_silent = now - route.heard_at > self._grace / 2
                lost.append(EngineLost(rank, route.entry.incarnation, was_silent, alone_on(route)))
        return lost

    # -- questions -------------------------------------------------------------------------------

    @property
    def wave(self) -> int:
        return self.view.wave if self.view is not None else 0

    @property
    def paused(self) -> bool:
        """Whether all that is known here says that no engine is stepping."""
        if self.view is not None and self.view.running:
            return False
        return all(is_idle(route.stats) for route in self._routes.values())

    @property
    def ready(self) -> bool:
        """Whether at least one engine can run requests now."""
        return any(is_usable(route) for route in self._routes.values())

    @property
    def has_engines(self) -> bool:
        """Whether at least one engine is there, if only halted: it will run requests."""
        return any(is_open(route) for route in self._routes.values())

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence that every engine takes; None without one."""
        setups = [r.entry.setup for r in self._routes.values() if is_open(r)]
        return min((setup.max_model_len for setup in setups if setup), default=None)

    @property
    def unseen_front_ends(self) -> int:
        """How many others route to the same engines without sharing the table of sends."""
        if self.view is None or self._scope != EVERYTHING:
            return 0
        seen = 1 if self._table is None else self._table.num_front_ends
        return max(0, self.view.num_front_ends - seen)

    @property
    def num_slots(self) -> int:
        """Sequences that the engines can run at once, now or when they go on."""
        usable = [route for route in self._routes.values() if is_usable(route)]
        there = usable or [route for route in self._routes.values() if is_open(route)]
        return sum(slots_of(route) for route in there)

    def stats_age(self, now: float) -> dict[int, float]:
        """Seconds since the newest stats of each engine arrived here."""
        return {
            rank: now - route.stats_at
            for rank, route in self._routes.items()
            if route.stats is not None
        }

    def address_of(self, rank: int) -> tuple[int, bytes] | None:
        """Return (incarnation, socket identity) of an engine that can be reached."""
        route = self._routes.get(rank)
        if route is None or route.identity is None:
            return None
        return route.entry.incarnation, route.identity

    def routes_to(self, rank: int, incarnation: int) -> bool:
        """Whether an engine process can be sent requests."""
        route = self._routes.get(rank)
        return route is not None and route.entry.incarnation == incarnation and is_open(route)

    def greeted_from(self, rank: int, incarnation: int) -> bytes | None:
        """Return the socket identity that an engine's last hello came from, if any did."""
        route_hello = self._route_hellos.get((rank, incarnation))
        return None if route_hello is None else route_hello.identity

    def awake(self, rank: int) -> bool:
        """Whether an engine runs what it is sent: it is not halted."""
        route = self._routes.get(rank)
        return route is not None and is_usable(route)

    @property
    def handing_over(self) -> list[tuple[int, int]]:
        """Engines (rank, incarnation) that are halted and whose requests others are to take."""
        return [
            (rank, route.entry.incarnation)
            for rank, route in self._routes.items()
            if is_open(route) and route.stats is not None and route.stats.hands_over
        ]

    def loads(self, accept: Callable[[int], bool] = lambda rank: True) -> list[EngineLoad]:
        """Return the load of every engine that can take requests, sorted by rank."""
        # What others have sent changes without notice.
        cacheable = self._table is None
        loads = []
        for rank, route in sorted(self._routes.items()):
            if is_open(route) and accept(rank):
                load = route.load if cacheable else None
                if load is None:
                    load = route.load = self._load(rank, route)
                loads.append(load)
        return loads

    def _load(self, rank: int, route: Route) -> EngineLoad:
        stats = route.stats
        requests = tokens = 0
        senders = [(self._front_end, route.sent)]
        if self._table is not None:
            senders += self._table.peers(rank)
        for front_end, sent in senders:
            if sent.engine_incarnation != route.entry.incarnation:
                continue
            seen = received_from(stats, front_end, sent.front_end_incarnation)
            requests += max(0, sent.requests - (seen.requests if seen else 0))
            tokens += max(0, sent.prompt_tokens - (seen.prompt_tokens if seen else 0))
        if stats is None:
            return EngineLoad(rank, requests, requests, tokens, 0.0)
        return EngineLoad(
            rank,
            stats.running + stats.waiting + requests,
            stats.waiting,
            stats.queued_prefill_tokens + tokens,
            stats.kv_usage,
        )
