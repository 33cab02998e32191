"""The fault schedules find bugs: each of these mutants has one, and is detected.

Every mutant is a production class with one recovery rule broken; the original classes pass the same
schedules.
"""

from collections.abc import Collection, Sequence

import msgspec
import pytest

from coordinator.events import Action as CoordinatorAction
from coordinator.state import CoordinatorState
from engine.core.engine_core import EngineCore
from engine.core.events import CoreEvent, Drain, InboxItem
from engine.core.loop import EngineLoop
from engine.kv.tiers import Fetch, KvTiers
from engine.kv.transfer_messages import BlockFound, checksum
from engine.kv.transfer_port import BlockPort, _Running
from engine.process.reception import Action as ReceptionAction
from engine.process.reception import FrontEndLinks, Reception, SendHello
from engine.shared.messages import (
    AddRequest,
    EngineEntry,
    EngineStats,
    FrontEndEntry,
    KvBlocksQuery,
    KvSource,
)
from server.router.block_index import BlockIndex
from server.router.delivery import Delivery
from server.router.events import Action
from server.router.failover import Failover
from server.router.load import Loads
from server.router.members import EngineLost, Members
from server.router.request import Prefill, RoutedRequest
from server.router.route import Route
from tests.faults.parts import Parts
from tests.faults.run import run_seeds

ENOUGH = 600
"""Schedules within which each mutant must be found."""
FOUND_BY = {
    "OrdersOnce": 213, "TakesSuccessorsForThem": 73, "TakesWhatComes": 159, "WorksForTheDead": 88,
}  # fmt: skip
"""Schedules that find mutants which few schedules do: the search starts there. They change whenever
schedules are drawn differently."""


# -- the front end: requests ---------------------------------------------------------------------


class StartsOver(Delivery):
    """Moves a request without the tokens that the client has."""

    def renumber(self, request: RoutedRequest, now: float) -> None:
        super().renumber(request, now)
        request.output_token_ids = []


class ShowsThePrefill(Delivery):
    """Returns tokens sampled by a prefill engine as the answer."""

    def send(self, request: RoutedRequest, now: float) -> list[Action]:
        actions = super().send(request, now)
        request.prefill = Prefill.NONE
        return actions


class LosesThePrefilled(Delivery):
    """Does not continue a request after its prompt has been computed."""

    def take_prefilled(self) -> list[RoutedRequest]:
        super().take_prefilled()
        return []


class KeepsTheId(Delivery):
    """Resends a request under its old id, so that old outputs pass for new ones."""

    def renumber(self, request: RoutedRequest, now: float) -> None:
        old, self._next_id = self._next_id, request.id - 1
        try:
            super().renumber(request, now)
        finally:
            self._next_id = old


class MovesNothing(Failover):
    """Leaves requests on an engine that has gone."""

    def engine_lost(self, lost: EngineLost, now: float) -> list[Action]:
        return []


class NeverSuspects(Failover):
    """Tries a request on one engine after the other, regardless of how many it kills."""

    def __post_init__(self) -> None:
        self.max_resumes = 1000
        super().__post_init__()


class ConvictsWithoutTrial(Failover):
    """Fails all requests in flight on too many engines that died, innocent or not."""

    def _check_suspicion(self, request: RoutedRequest, now: float) -> list[Action] | None:
        if self.probation.is_suspect(request):
            return self._kills_engines(request)
        return None


class ForgetsWhoWaits(Failover):
    """Looks for an engine once, and not again when one joins."""

    def assign_waiting(self, now: float) -> list[Action]:
        return []


# -- the front end: engines ----------------------------------------------------------------------


class MissesNothing(Loads):
    """Does not notice a lost last message, in either direction."""

    def observe(self, route: Route, stats: EngineStats, now: float) -> bool:
        super().observe(route, stats, now)
        return False


class CountsTheLost(Loads):
    """Counts lost requests as load forever."""

    def forget_unreceived(self, route: Route) -> None:
        pass


class GivesUpForGood(Members):
    """Treats an engine that was unreachable once as dead."""

    def mark_unreachable(self, rank: int, incarnation: int) -> list[EngineLost]:
        return self.died(rank, incarnation)


class BelievesHalfOfIt(Members):
    """Treats an engine that is registering with a restarted coordinator as not ready."""

    def _as_known(self, entry: EngineEntry) -> EngineEntry:
        return entry


# -- engines, membership and the coordinator -----------------------------------------------------


class WorksForTheDead(EngineCore):
    """Continues requests of a front end that has gone, and answers its successor."""

    def front_end_left(self, index: int) -> None:
        self._front_ends.left(index)


class TriesInCompany(EngineCore):
    """Computes a suspect together with others."""

    def handle(self, message: CoreEvent) -> None:
        if isinstance(message, AddRequest):
            message = msgspec.structs.replace(message, exclusive_steps=0)
        super().handle(message)


class GreetsOnce(FrontEndLinks):
    """Does not repeat its hello."""

    def tick(self, rank: int, now: float) -> list[ReceptionAction]:
        return [each for each in super().tick(rank, now) if not isinstance(each, SendHello)]


class BelievesOldLists(Reception):
    """Keeps using the front ends of the first list."""

    def _listed(
        self, epoch: int, entries: list[FrontEndEntry], now: float
    ) -> list[ReceptionAction]:
        return super()._listed(epoch, entries, now) if self._following is None else []


class IgnoresDrain(EngineLoop):
    """Keeps running when asked to drain."""

    def run_once(self, items: Sequence[InboxItem]) -> None:
        super().run_once([item for item in items if not isinstance(item, Drain)])


class NeverTellsThatItIdles(EngineLoop):
    """Sends nothing while it has no work."""

    def run_once(self, items: Sequence[InboxItem]) -> None:
        self._next_stats_at = float("inf")
        super().run_once(items)
        self.wait = min(self.wait, 1.0)


class OrdersOnce(CoordinatorState):
    """Sends the list of front ends to engines only once."""

    def _repeat_order(self, now: float) -> list[CoordinatorAction]:
        return []


# -- the front end: what engines have cached -----------------------------------------------------


class AsksOnce(BlockIndex):
    """Assumes that its requests and their answers arrive."""

    def queries_due(
        self, routes: Collection[Route], now: float
    ) -> list[tuple[bytes, KvBlocksQuery]]:
        return super().queries_due(routes, 0.0)


class TakesSuccessorsForThem(BlockIndex):
    """Keeps what it knew of the previous process."""

    def queries_due(
        self, routes: Collection[Route], now: float
    ) -> list[tuple[bytes, KvBlocksQuery]]:
        for route in routes:
            if (held := self._engines.get(route.entry.rank)) is not None:
                held.engine = route.engine
        return super().queries_due(routes, now)


# -- the engine: KV blocks of others --------------------------------------------------------------


class ForgetsWhoWaitsForBlocks(BlockPort):
    """Does not report the end of pulls when a connection is lost."""

    def _drop_link(self, source: KvSource) -> None:
        self._links[source].pulls.clear()
        super()._drop_link(source)


class WaitsForTheSilent(BlockPort):
    """Waits forever for an engine that has vanished."""

    def _start_pulls(self) -> bool:
        goes_on = super()._start_pulls()
        for link in self._links.values():
            for running in link.pulls.values():
                running.pull.patience = running.pull.deadline = 1e9
        return goes_on


class TakesWhatComes(BlockPort):
    """Does not verify a block's checksum."""

    def _accept_block(self, running: _Running, found: BlockFound, content: bytes) -> None:
        if found.digest:
            digest = checksum(running.order.model + found.name, content)
            found = msgspec.structs.replace(found, digest=digest)
        super()._accept_block(running, found, content)


class KeepsWhatNobodyReads(KvTiers):
    """Counts blocks that were read, or came too late, as used memory forever."""

    def discard(self, fetch: Fetch) -> None:
        fetch.settled = True


MUTANTS = [
    Parts(delivery=StartsOver),
    Parts(delivery=KeepsTheId),
    Parts(delivery=ShowsThePrefill),
    Parts(delivery=LosesThePrefilled),
    Parts(failover=MovesNothing),
    Parts(failover=NeverSuspects),
    Parts(failover=ConvictsWithoutTrial),
    Parts(failover=ForgetsWhoWaits),
    Parts(index=AsksOnce),
    Parts(index=TakesSuccessorsForThem),
    Parts(loads=MissesNothing),
    Parts(loads=CountsTheLost),
    Parts(members=GivesUpForGood),
    Parts(members=BelievesHalfOfIt),
    Parts(port=ForgetsWhoWaitsForBlocks),
    Parts(port=WaitsForTheSilent),
    Parts(port=TakesWhatComes),
    Parts(tiers=KeepsWhatNobodyReads),
    Parts(core=WorksForTheDead),
    Parts(core=TriesInCompany),
    Parts(links=GreetsOnce),
    Parts(reception=BelievesOldLists),
    Parts(loop=IgnoresDrain),
    Parts(loop=NeverTellsThatItIdles),
    Parts(coordinator=OrdersOnce),
]


def named(parts: Parts) -> str:
    """Return the name of a mutant for a test's id."""
    production = Parts()
    fields: dict[str, type] = vars(parts)
    return next(c.__name__ for name, c in fields.items() if c is not getattr(production, name))


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=named)
def test_broken_recovery_is_detected(mutant: Parts) -> None:
    first = FOUND_BY.get(named(mutant), 0)
    is_found = any(run_seeds([(first + n) % ENOUGH], mutant) for n in range(ENOUGH))
    assert is_found, f"{ENOUGH} schedules did not find it"
