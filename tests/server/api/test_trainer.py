"""A trainer's requests against scripted engines."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.shared.messages import PUSHED, FleetRequest, UtilityResult, WeightsSource
from server.api.admin.schema import InitInfo, UpdateInfo
from server.api.admin.trainer import _Transfer
from server.errors import ApiError

OLD = WeightsSource("old", None, "1")
INIT = InitInfo(master_address="trainer", master_port=29500, rank_offset=1, world_size=4, timeout=1)
UPDATE = UpdateInfo(names=["w"], dtype_names=["float32"], shapes=[[2]], packed=False)


class Engines:
    """Engines 1, 3 and 4, which are connected to a trainer and record their calls."""

    def __init__(self, **failing: int) -> None:
        """Have one engine fail in the utility that is named."""
        self.weights = dict.fromkeys((1, 3, 4), OLD)
        self.kept = dict[int, WeightsSource]()
        self.updates = dict.fromkeys(self.weights, 2)
        self.phases = dict.fromkeys(self.weights, "joined")
        self.places = dict[int, int]()
        self.is_open = False
        self.orders: list[FleetRequest] = []
        self.calls: list[str] = []
        self._failing = failing

    def check_accepts_requests(self) -> None:
        pass

    async def order_fleet(self, request: FleetRequest) -> list[UtilityResult]:
        self.orders.append(request)
        return []

    async def call_utility(
        self, rank: int | None, name: str, arguments: dict[str, Any], within: float = 0
    ) -> list[UtilityResult]:
        await asyncio.sleep(0)
        self.calls.append(name)
        ranks = list(self.weights) if rank is None else [rank]
        return [self._called(each, name, dict(arguments)) for each in ranks]

    def _called(self, rank: int, name: str, arguments: dict[str, Any]) -> UtilityResult:
        if rank == self._failing.get(name):
            return UtilityResult(1, rank, error="it cannot")
        if name == "update_weights" and self.phases[rank] != "joined":
            return UtilityResult(1, rank, error="it has not joined a trainer")
        result: dict[str, Any] = {"is_open": self.is_open}
        match name:
            case "init_weight_transfer_engine":
                self.places[rank] = arguments["rank"]
            case "leave_weight_transfer":
                self.phases[rank] = "none"
            case "weight_transfer":
                lost = rank == self._failing.get("lose")
                result |= {"phase": "none" if lost else self.phases[rank], "error": "it has gone"}
            case "info":
                result |= {"weight_updates": self.updates[rank]}
            case "load_weights":
                assert arguments.pop("after") == self.updates[rank]
                before, source = self.weights[rank], WeightsSource(**arguments)
                self.kept[rank], self.weights[rank] = before, source
                self.updates[rank] += 1
                result |= {
                    "model": before.model, "revision": before.revision, "version": before.version
                }  # fmt: skip
        return UtilityResult(1, rank, result)

    @property
    def have_left(self) -> bool:
        return set(self.phases.values()) == {"none"}


def transfer(engines: Engines) -> _Transfer:
    client: Any = engines
    return _Transfer(client, "update_info")


def refused(call: Coroutine[Any, Any, object]) -> ApiError:
    with pytest.raises(ApiError) as error:
        asyncio.run(call)
    return error.value


def versions(engines: Engines) -> set[str]:
    return {source.version for source in engines.weights.values()}


def test_each_engine_has_a_rank_after_the_trainer() -> None:
    engines = Engines()
    asyncio.run(transfer(engines).join(INIT))
    assert engines.places == {1: 1, 3: 2, 4: 3}
    assert not engines.have_left


def test_too_small_world_is_refused_before_joining() -> None:
    engines = Engines()
    small = INIT.model_copy(update={"rank_offset": 2})
    assert "no room for 3 engines from rank 2 on" in str(refused(transfer(engines).join(small)))
    assert engines.calls == ["info"]


@pytest.mark.parametrize("failing", ["init_weight_transfer_engine", "lose"])
def test_all_engines_leave_if_one_cannot_join_trainer(failing: str) -> None:
    engines = Engines(**{failing: 3})
    error = refused(transfer(engines).join(INIT))
    assert (error.status, error.param) == (400, "update_info")
    assert "engine 3" in str(error)
    assert engines.have_left


@pytest.mark.parametrize("failing", ["update_weights", "lose"])
def test_all_engines_leave_if_one_receives_incomplete_weights(failing: str) -> None:
    engines = Engines(**{failing: 4})
    error = refused(transfer(engines).receive(UPDATE))
    assert error.status == 400
    assert engines.have_left
    assert versions(engines) == {"1"}


def test_engine_that_joined_later_has_no_trainer() -> None:
    engines = Engines()
    engines.phases[3] = "none"
    error = refused(transfer(engines).receive(UPDATE))
    assert (error.status, error.code) == (409, "no_trainer")
    assert engines.have_left


def test_packed_tensors_are_refused() -> None:
    packed = UPDATE.model_copy(update={"packed": True})
    assert "packed" in str(refused(transfer(Engines()).receive(packed)))


@pytest.mark.parametrize("is_open", [False, True])
def test_partial_updates_are_distinguished_from_complete_ones(is_open: bool) -> None:
    engines = Engines()
    engines.is_open = is_open
    assert asyncio.run(transfer(engines).receive(UPDATE)) == is_open
    assert versions(engines) == {"1"}


@pytest.mark.parametrize(("named", "version"), [("400", "400"), (None, "update-3")])
def test_all_engines_switch_to_received_weights_and_free_previous(
    named: str | None, version: str
) -> None:
    engines = Engines()
    asyncio.run(transfer(engines).finish(named))
    assert versions(engines) == {version}
    assert [request.weights for request in engines.orders] == [WeightsSource(PUSHED, None, version)]
    assert engines.calls[-1] == "settle_weights"
    assert not engines.have_left


def test_all_engines_revert_if_one_cannot_load() -> None:
    engines = Engines(load_weights=4)
    error = refused(transfer(engines).finish("400"))
    assert "engine 4: it cannot" in str(error)
    assert versions(engines) == {"1"}
    assert engines.have_left
