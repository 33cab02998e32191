"""What one front end knows of the engines: a state machine without I/O.

The coordinator's snapshots and the stats that engines put on their own outputs are merged by
their stamps. What this front end and its neighbours have sent and an engine has not yet received
is added exactly once:

    load(engine) = what its newest stats show + (sent - received as of these stats)
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.messages import ClusterView, EngineEntry, EngineStats, Received
from engine.roster import Roster
from server.load_table import NOTHING, LoadTable, Sent
from server.routing import KV_PRESSURE_FROM, EngineLoad


@dataclass(frozen=True)
class EngineLost:
    """An engine process has gone, with everything that it was computing."""

    rank: int
    incarnation: int


@dataclass
class _Route:
    """One engine process: how to reach it and what has been sent there."""

    entry: EngineEntry
    identity: bytes | None = None
    stats: EngineStats | None = None
    stats_at: float = 0.0
    sent: Sent = NOTHING
    load: EngineLoad | None = None
    """Its load as of `stats` and `sent`, if it was asked for since they changed."""


class ClusterState:
    """Engines, their loads, the wave and the running flag as one front end sees them."""

    def __init__(
        self, front_end: int, incarnation: int, grace: float, table: LoadTable | None
    ) -> None:
        self.view: ClusterView | None = None
        self._front_end = front_end
        self._incarnation = incarnation
        self._table = table
        self._roster: Roster[EngineEntry] = Roster(grace)
        self._routes: dict[int, _Route] = {}
        self._departed: dict[int, _Route] = {}
        self._greetings: dict[tuple[int, int], bytes] = {}

    # -- events ----------------------------------------------------------------------------------

    def update_view(self, view: ClusterView, now: float) -> list[EngineLost]:
        """Take a snapshot of the coordinator; return the engines that have gone."""
        known = self.view
        if known is not None and view.epoch == known.epoch and view.version <= known.version:
            return []
        self.view = view
        listed = {entry.rank: entry for entry in view.engines}
        change = self._roster.update(view.epoch, listed, now)
        lost = self._drop(change.left)
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

    def _route_to(self, entry: EngineEntry) -> _Route:
        departed = self._departed.pop(entry.rank, None)
        if departed is not None and departed.entry.incarnation == entry.incarnation:
            # It was only silent: what was sent to it and its open route are still there.
            departed.entry = entry
            return departed
        for rank, incarnation in list(self._greetings):
            if rank == entry.rank and incarnation != entry.incarnation:
                del self._greetings[rank, incarnation]
        identity = self._greetings.get((entry.rank, entry.incarnation))
        return _Route(entry, identity, sent=Sent(self._incarnation, entry.incarnation, 0, 0))

    def tick(self, now: float) -> list[EngineLost]:
        """Return the engines that a restarted coordinator has not listed for too long."""
        return self._drop(self._roster.expire(now))

    def observe(self, stats: EngineStats, now: float) -> None:
        """Take stats from wherever they come; older ones than those known are ignored."""
        route = self._routes.get(stats.rank)
        if route is None or route.entry.incarnation != stats.incarnation:
            return
        if route.stats is None or stats.version > route.stats.version:
            route.stats = stats
            route.stats_at = now
            route.load = None

    def greeted(self, rank: int, incarnation: int, identity: bytes) -> bool:
        """An engine opened its request route to this front end.

        Returns whether the same process had done so before: then it had given this front end up
        for dead, and has dropped everything that it was sent.
        """
        again = (rank, incarnation) in self._greetings
        self._greetings[rank, incarnation] = identity
        route = self._routes.get(rank)
        if route is not None and route.entry.incarnation == incarnation:
            route.identity = identity
        return again

    def lost(self, rank: int, incarnation: int) -> list[EngineLost]:
        """An engine is known to be dead before the coordinator says so."""
        route = self._routes.get(rank)
        if route is None or route.entry.incarnation != incarnation:
            return []
        # Its entry stays in the roster until the coordinator removes or replaces it: it must not
        # come back as a newcomer with the next snapshot.
        del self._routes[rank]
        self._greetings.pop((rank, incarnation), None)
        return [EngineLost(rank, incarnation)]

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

    def _drop(self, ranks: list[int]) -> list[EngineLost]:
        lost = []
        for rank in ranks:
            route = self._routes.pop(rank, None)
            if route is not None:
                self._departed[rank] = route
                lost.append(EngineLost(rank, route.entry.incarnation))
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
        return all(_idle(route.stats) for route in self._routes.values())

    @property
    def ready(self) -> bool:
        """Whether at least one engine can take requests."""
        return any(_usable(route) for route in self._routes.values())

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence that every ready engine takes; None without one."""
        setups = [r.entry.setup for r in self._routes.values() if _usable(r)]
        return min((setup.max_model_len for setup in setups if setup), default=None)

    @property
    def num_slots(self) -> int:
        """Sequences that the engines can run at once."""
        return sum(_slots(route) for route in self._routes.values() if _usable(route))

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

    def loads(self, accept: Callable[[int], bool] = lambda rank: True) -> list[EngineLoad]:
        """Return the load of every engine that can take requests, sorted by rank."""
        # What others have sent changes without notice.
        cacheable = self._table is None
        loads = []
        for rank, route in sorted(self._routes.items()):
            if route.entry.ready and route.identity is not None and accept(rank):
                load = route.load if cacheable else None
                if load is None:
                    load = route.load = self._load(rank, route)
                loads.append(load)
        return loads

    def _load(self, rank: int, route: _Route) -> EngineLoad:
        stats = route.stats
        requests = tokens = 0
        senders = [(self._front_end, route.sent)]
        if self._table is not None:
            senders += self._table.peers(rank)
        for front_end, sent in senders:
            if sent.engine_incarnation != route.entry.incarnation:
                continue
            seen = _received(stats, front_end, sent.front_end_incarnation)
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


def _received(stats: EngineStats | None, front_end: int, incarnation: int) -> Received | None:
    """Return what an engine had received from a front-end process, if it had heard of it."""
    if stats is None:
        return None
    entries = stats.received
    # Most engines list the front ends by number; this is asked for every engine and request.
    if front_end < len(entries):
        entry = entries[front_end]
        if entry.front_end == front_end and entry.front_end_incarnation == incarnation:
            return entry
    for entry in entries:
        if entry.front_end == front_end and entry.front_end_incarnation == incarnation:
            return entry
    return None


def _usable(route: _Route) -> bool:
    halted = route.stats is not None and route.stats.halted
    return route.entry.ready and route.identity is not None and not halted


def _slots(route: _Route) -> int:
    setup, stats = route.entry.setup, route.stats
    configured = 0 if setup is None else setup.max_num_seqs
    if stats is None:
        return configured
    if stats.waiting and stats.kv_usage >= KV_PRESSURE_FROM:
        return stats.running  # memory is what limits it now
    return max(configured, stats.running)


def _idle(stats: EngineStats | None) -> bool:
    return stats is None or stats.running + stats.waiting == 0
