"""Placement of API servers as engines join and leave nodes, without processes."""

import asyncio

import pytest

from server.fleet.keeper import MAX_BACKOFF, Role, StartupFailed
from server.fleet.scaling import (
    IDLE_NODE_TIMEOUT,
    REPLACEMENT_DIVISOR,
    EngineScaler,
    NodeApiServers,
)
from tests.support.waiting import until_async


class FakeHandle:
    def __init__(self, node: str) -> None:
        self.node = node


class FakeKeeper:
    """Records kept and retired slots."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.retired: list[str] = []
        self.may_retire = asyncio.Event()
        self.refuses: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def keep(self, role: Role) -> None:
        self.kept.append(role.name)
        role.keep_task = asyncio.create_task(self._keep_running(role))
        self._tasks.append(role.keep_task)

    async def close(self) -> None:
        """Cancel all tasks and retrieve their exceptions, which asyncio would log otherwise."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_running(self, role: Role) -> None:
        if role.name in self.refuses:
            raise StartupFailed(f"{role.name}: taken")
        await asyncio.Event().wait()

    async def retire(self, role: Role, within: float) -> None:
        assert within == 3.0
        await self.may_retire.wait()
        self.retired.append(role.name)


class Scene:
    """Engines on nodes, and the slots kept for them."""

    def __init__(self) -> None:
        self.keeper = FakeKeeper()
        self.engines: dict[int, Role] = {}
        self.servers = NodeApiServers(
            self.keeper,  # type: ignore[arg-type]
            self.engines,
            lambda node: None if node == "head" else place(node),
            drain_within=3.0,
        )

    def put(self, *nodes: str) -> None:
        """Run one engine on each of these nodes, and no others."""
        self.engines.clear()
        for rank, node in enumerate(nodes):
            role = place(f"engine {rank}")
            role.handle = FakeHandle(node)  # type: ignore[assignment]
            self.engines[rank] = role


def place(name: str) -> Role:
    return Role(name=name, module="", launch=lambda _: None)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_each_node_with_engines_except_supervisor_gets_an_api_server(scene: Scene) -> None:
    scene.put("head", "a", "a", "b", "")
    scene.servers.update(0.0)
    scene.servers.update(1.0)
    assert sorted(scene.keeper.kept) == ["a", "b"]
    await scene.keeper.close()


async def test_api_server_stays_while_an_engine_restarts(scene: Scene) -> None:
    scene.put("a")
    scene.servers.update(0.0)
    scene.put("")
    scene.servers.update(IDLE_NODE_TIMEOUT)
    scene.put("a")
    scene.servers.update(IDLE_NODE_TIMEOUT + 1)
    scene.put()
    scene.keeper.may_retire.set()
    scene.servers.update(2 * IDLE_NODE_TIMEOUT)
    await asyncio.sleep(0)
    assert scene.keeper.retired == []
    scene.servers.update(2 * IDLE_NODE_TIMEOUT + 2)
    await until_async(lambda: not scene.servers.roles, "it leaves")
    assert scene.keeper.retired == ["a"]
    await scene.keeper.close()


async def test_engines_returning_during_drain_get_new_api_server(scene: Scene) -> None:
    scene.put("a")
    scene.servers.update(0.0)
    scene.put()
    scene.servers.update(IDLE_NODE_TIMEOUT + 1)
    scene.put("a")
    scene.servers.update(IDLE_NODE_TIMEOUT + 2)
    assert scene.keeper.kept == ["a"]
    scene.keeper.may_retire.set()
    await until_async(lambda: not scene.servers.roles, "it leaves")
    scene.servers.update(IDLE_NODE_TIMEOUT + 3)
    assert scene.keeper.kept == ["a", "a"]
    await scene.keeper.close()


async def test_api_server_that_cannot_start_is_retried_later(scene: Scene) -> None:
    scene.keeper.refuses = {"a"}
    scene.put("a", "b")
    scene.servers.update(0.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scene.servers.update(1.0)
    assert set(scene.servers.roles) == {"b"}
    scene.servers.update(MAX_BACKOFF)
    assert scene.keeper.kept.count("a") == 1
    scene.servers.update(MAX_BACKOFF + 1)
    assert scene.keeper.kept.count("a") == 2
    await scene.keeper.close()


class Replacing:
    """A keeper that records how many engines are down at once."""

    def __init__(self, engines: dict[int, Role], fails: str = "") -> None:
        self.engines = engines
        self.most_away = 0
        self.retired: list[str] = []
        self._size = len(engines)
        self._away: set[str] = set()
        self._fails = fails

    def keep(self, role: Role) -> None:
        pass

    async def retire(self, role: Role, within: float) -> None:
        self.retired.append(role.name)
        self._away.add(role.name)
        self.most_away = max(self.most_away, len(self._away))
        await asyncio.sleep(0)

    async def until_ready(self, roles: list[Role], *others: object) -> None:
        await asyncio.sleep(0)
        for role in roles:
            if role.name == self._fails:
                raise StartupFailed(f"{role.name}: taken")
            self._away.discard(role.name)


def scaler_of(size: int, fails: str = "") -> tuple[EngineScaler, Replacing]:
    engines = {rank: place(f"engine {rank}") for rank in range(size)}
    keeper = Replacing(engines, fails)
    scaler = EngineScaler(
        keeper,  # type: ignore[arg-type]
        engines,
        lambda rank: place(f"engine {rank}"),
        retire_within=1.0,
        start_within=1.0,
    )
    return scaler, keeper


async def replace_all(scaler: EngineScaler) -> None:
    running = asyncio.create_task(scaler.run())
    scaler.assign(scaler.status.data_parallel_size, restart=True)
    await until_async(lambda: not scaler.status.busy, "it is over")
    running.cancel()


@pytest.mark.parametrize(
    ("size", "away"),
    [
        (2, 1),
        (REPLACEMENT_DIVISOR, 1),
        (2 * REPLACEMENT_DIVISOR, 2),
        (5 * REPLACEMENT_DIVISOR + 3, 5),
    ],
)
async def test_a_sixteenth_of_the_engines_is_replaced_at_a_time(size: int, away: int) -> None:
    scaler, keeper = scaler_of(size)
    await replace_all(scaler)
    assert keeper.most_away == away
    assert sorted(keeper.retired) == sorted(f"engine {rank}" for rank in range(size))
    assert sorted(scaler.engines) == list(range(size))
    assert scaler.status.error is None


async def test_replacement_stops_if_first_successor_cannot_start() -> None:
    scaler, keeper = scaler_of(4 * REPLACEMENT_DIVISOR, fails="engine 0")
    await replace_all(scaler)
    assert set(keeper.retired) == {"engine 0"}
    assert "taken" in str(scaler.status.error)
