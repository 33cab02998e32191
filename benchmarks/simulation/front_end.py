"""A front end that chooses engines, and nothing else: production's members, loads and policies."""

from collections.abc import Sequence

from engine.shared.messages import ClusterView, EngineStats, RouteHello
from server.router.load import Loads
from server.router.load_table import LoadTable
from server.router.members import Members
from server.router.routing import RoutingPolicy


class BalancingFrontEnd:
    """One front end, numbered `index`, of incarnation `index` + 1.

    Args:
        grace: seconds for which engines that are not listed or not heard are kept.
        table: what neighbours have sent; None without neighbours.
    """

    def __init__(
        self, index: int, policy: RoutingPolicy, grace: float, table: LoadTable | None = None
    ) -> None:
        self._members = Members(index + 1, grace)
        self._loads = Loads(index, index + 1, grace, table)
        self._policy = policy

    def open_route(self, rank: int, incarnation: int) -> None:
        """An engine can be reached."""
        self._members.heard(b"route", RouteHello(rank, incarnation, 1), 0.0)

    def take_view(self, view: ClusterView, now: float) -> None:
        """Take a view of the coordinator, with the stats in it."""
        if self._members.is_news(view):
            self._members.take_view(view, now)
            for entry in view.engines:
                if entry.stats is not None:
                    self.observe(entry.stats, now)

    def observe(self, stats: EngineStats, now: float) -> None:
        """Take an engine's stats."""
        route = self._members.find(stats.rank, stats.incarnation)
        if route is not None:
            self._loads.observe(route, stats, now)

    def send(self, prompt_token_ids: Sequence[int], num_tokens: int) -> int:
        """Choose an engine for a prompt, count it as sent there, and return its rank."""
        routes = self._members.routes
        unseen = self._members.unseen_front_ends(self._loads.num_front_ends)
        loads = self._loads.of(routes.values())
        rank = self._policy.choose(loads, prompt_token_ids, unseen).rank
        self._loads.sent(routes[rank], num_tokens)
        return rank
