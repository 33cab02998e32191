"""POST /admin/weights against scripted engines."""

import asyncio
from typing import Any

import pytest

from engine.shared.messages import (
    ClusterView,
    EngineEntry,
    FleetRequest,
    UtilityResult,
    WeightsSource,
)
from server.api.admin.weights import Update
from server.errors import ApiError
from server.router.generation_client import NoEngineAvailable

OLD, NEW = WeightsSource("old", None, "1"), WeightsSource("new", "main", "2")


class Engines:
    """Three engines that record their calls."""

    def __init__(self, failing: int | None = None, dying: int | None = None) -> None:
        self.weights = dict.fromkeys(range(3), OLD)
        self.updates = dict.fromkeys(range(3), 0)
        self.calls: list[tuple[int, str]] = []
        self.orders: list[FleetRequest] = []
        self.least_serving = 3
        self._failing = failing
        self._dying = dying
        self._halted: set[int] = set()
        entries = [EngineEntry(rank, 1, True, "", 0, None, None) for rank in range(3)]
        self.view = ClusterView(1, 1, 0, True, entries, 1)

    def check_accepts_requests(self) -> None:
        pass

    async def order_fleet(self, request: FleetRequest) -> list[UtilityResult]:
        self.orders.append(request)
        return []

    async def call_utility(
        self, rank: int | None, name: str, arguments: dict[str, Any], within: float = 0
    ) -> list[UtilityResult]:
        await asyncio.sleep(0)
        ranks = range(3) if rank is None else [rank]
        return [self._called(each, name, dict(arguments)) for each in ranks]

    def _called(self, rank: int, name: str, arguments: dict[str, Any]) -> UtilityResult:
        self.calls.append((rank, name))
        match name:
            case "info":
                paused = rank in self._halted
                return UtilityResult(
                    1, rank,
                    {
                        "is_paused": paused, "is_sleeping": False, "running": 0, "waiting": 0,
                        "weight_updates": self.updates[rank],
                    },
                )  # fmt: skip
            case "pause":
                self._halted.add(rank)
                self.least_serving = min(self.least_serving, 3 - len(self._halted))
            case "resume":
                self._halted.discard(rank)
            case "load_weights":
                if rank == self._failing:
                    return UtilityResult(1, rank, error="no such tensor")
                if rank == self._dying:
                    return UtilityResult(1, rank, error="engine 1 died before it answered")
                if arguments.pop("after") != self.updates[rank]:
                    return UtilityResult(1, rank, error="its weights were replaced meanwhile")
                before = self.weights[rank]
                self.weights[rank] = WeightsSource(**arguments)
                self.updates[rank] += 1
                return UtilityResult(
                    1, rank,
                    {"model": before.model, "revision": before.revision, "version": before.version},
                )  # fmt: skip
        return UtilityResult(1, rank, {})


def update(engines: Engines, *, rolling: bool) -> list[int]:
    client: Any = engines
    return asyncio.run(Update(client, NEW, "model").run(rolling=rolling))


@pytest.mark.parametrize("rolling", [True, False])
def test_current_and_future_engines_get_the_weights(rolling: bool) -> None:
    engines = Engines()
    assert update(engines, rolling=rolling) == [0, 1, 2]
    assert set(engines.weights.values()) == {NEW}
    assert [request.weights for request in engines.orders] == [NEW]
    assert engines.least_serving == (2 if rolling else 3)


@pytest.mark.parametrize("rolling", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_failure_of_one_engine_leaves_all_unchanged(rolling: bool, rank: int) -> None:
    engines = Engines(failing=rank)
    with pytest.raises(ApiError, match="no such tensor") as refused:
        update(engines, rolling=rolling)
    assert (refused.value.status, refused.value.param) == (400, "model")
    assert set(engines.weights.values()) == {OLD}
    assert engines.orders == []
    halted = [name for each, name in engines.calls if name in ("pause", "resume")]
    assert halted.count("pause") == halted.count("resume")


def test_engine_death_during_update_does_not_fail_update() -> None:
    engines = Engines(dying=1)
    with pytest.raises(ApiError) as refused:
        update(engines, rolling=True)
    assert refused.value.status == 503
    assert set(engines.weights.values()) == {OLD}


@pytest.mark.parametrize("rolling", [True, False])
def test_concurrent_updates_leave_all_engines_in_agreement(
    rolling: bool,
) -> None:
    engines = Engines()
    client: Any = engines
    other = WeightsSource("other", None, "3")

    async def both() -> list[object]:
        updates = [Update(client, source, "model").run(rolling=rolling) for source in (NEW, other)]
        return list(await asyncio.gather(*updates, return_exceptions=True))

    failed = [each for each in asyncio.run(both()) if isinstance(each, ApiError)]
    assert failed
    assert {each.status for each in failed} == {409}
    assert len(set(engines.weights.values())) == 1


def test_rejected_weight_order_is_reverted_everywhere() -> None:
    engines = Engines()

    async def silent(request: FleetRequest) -> list[UtilityResult]:
        raise NoEngineAvailable("the coordinator has not taken the order")

    engines.order_fleet = silent  # type: ignore[method-assign]
    with pytest.raises(NoEngineAvailable):
        update(engines, rolling=True)
    assert set(engines.weights.values()) == {OLD}
