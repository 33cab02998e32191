"""One front end's view of the load per engine: a state machine without I/O.

Snapshots of the coordinator and the stats in engines' outputs are merged by version. Requests that
this front end and its neighbours have sent but an engine has not yet received are added exactly
once:

    load(engine) = load in its newest stats + (sent - received as of these stats)
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.shared.messages import EngineStats
from server.router.load_table import LoadTable, received_from
from server.router.route import MissingMessages, Route
from server.router.routing import EngineLoad


@dataclass(eq=False)
class Loads:
    """Counts messages to and from engines, and detects lost ones."""

    front_end: int
    incarnation: int
    grace: float
    """Seconds after which missing messages are considered lost."""
    table: LoadTable | None
    """Requests sent by neighbours; None without neighbours."""

    # -- events ----------------------------------------------------------------------------------

    def observe(self, route: Route, stats: EngineStats, now: float) -> bool:
        """Record stats from any source; older ones are ignored.

        Returns:
            Whether messages to or from the engine were lost: they were missing for longer than the
            grace period and still are.
        """
        if route.stats is not None and stats.version <= route.stats.version:
            return False
        route.stats = stats
        route.stats_at = now
        route.load = None
        return self._has_lost_messages(route, stats, now)

    def _has_lost_messages(self, route: Route, stats: EngineStats, now: float) -> bool:
        received = received_from(stats, self.front_end, self.incarnation)
        requests, outputs = (received.requests, received.outputs) if received else (0, 0)
        sent = route.sent
        if received is not None and requests > sent.requests:
            # Messages considered lost have arrived after all.
            sent = route.sent = sent._replace(
                requests=requests, prompt_tokens=received.prompt_tokens
            )
        missing = route.missing
        if (
            missing is not None
            and requests >= missing.requests
            and route.outputs >= missing.outputs
        ):
            missing = None
        if missing is None and (requests < sent.requests or outputs > route.outputs):
            missing = MissingMessages(now, sent.requests, outputs)
        route.missing = missing
        if missing is None or now - missing.since <= self.grace:
            return False
        route.missing = None
        return True

    def outputs_arrived(self, route: Route | None, stats: EngineStats) -> int:
        """Count a message with outputs and these stats.

        Returns:
            0 if it is the next one, a positive number if earlier messages were lost, and a negative
            one if it is a duplicate. Messages of unlisted engines always count as the next.
        """
        if route is None:
            return 0
        received = received_from(stats, self.front_end, self.incarnation)
        if received is None or received.outputs == 0:
            return 0  # the engine does not count them
        order = received.outputs - route.outputs - 1
        route.outputs = max(route.outputs, received.outputs)
        return order

    def sent(self, route: Route, prompt_tokens: int) -> None:
        """Count a request sent to an engine."""
        before = route.sent
        self._set_sent(route, before.requests + 1, before.prompt_tokens + prompt_tokens)

    def send_failed(self, route: Route, prompt_tokens: int) -> None:
        """Undo the count of a request that could not be sent."""
        before = route.sent
        self._set_sent(route, before.requests - 1, before.prompt_tokens - prompt_tokens)

    def forget_unreceived(self, route: Route) -> None:
        """Treat everything that an engine has not received by now as lost."""
        received = received_from(route.stats, self.front_end, self.incarnation)
        route.missing = None
        if received is not None:
            route.outputs = max(route.outputs, received.outputs)
        self._set_sent(
            route, received.requests if received else 0, received.prompt_tokens if received else 0
        )

    def _set_sent(self, route: Route, requests: int, prompt_tokens: int) -> None:
        before = route.sent
        route.sent = before._replace(requests=requests, prompt_tokens=prompt_tokens)
        route.load = None
        if self.table is not None:
            self.table.publish(route.entry.rank, route.sent)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def num_front_ends(self) -> int:
        """Number of front ends whose sends are counted, including this one."""
        return 1 if self.table is None else self.table.num_front_ends

    def of(self, routes: Iterable[Route]) -> list[EngineLoad]:
        """Return the load of each engine."""
        table = self.table
        loads = []
        for route in routes:
            if table is not None:  # other front ends' sends change without notice
                cells = table.cells(route.entry.rank)
                if cells != route.cells:
                    route.cells, route.load = cells, None
            load = route.load
            if load is None:
                load = route.load = self._load(route)
            loads.append(load)
        return loads

    def _load(self, route: Route) -> EngineLoad:
        stats, own = route.stats, route.sent
        senders = [(self.front_end, own)]
        if self.table is not None:
            senders += self.table.peers(route.cells)
        requests = tokens = 0
        for front_end, sent in senders:
            if sent.engine_incarnation != own.engine_incarnation:
                continue
            received = received_from(stats, front_end, sent.front_end_incarnation)
            if received is None:
                requests += sent.requests
                tokens += sent.prompt_tokens
            else:
                requests += max(0, sent.requests - received.requests)
                tokens += max(0, sent.prompt_tokens - received.prompt_tokens)
        if stats is None:
            return EngineLoad(route.entry.rank, requests, requests, tokens, 0.0)
        return EngineLoad(
            route.entry.rank,
            stats.running + stats.waiting + requests,
            stats.waiting,
            stats.queued_prefill_tokens + tokens,
            stats.kv_usage,
        )
