"""Where API servers are kept as engines come to nodes and leave them, without processes."""

import asyncio

import pytest

from server.fleet.keeper import MAX_BACKOFF, Role, StartupFailed
from server.fleet.scaling import LEAVE_AFTER, NodeApiServers
from tests.support.waiting import until_async


class MadeUpHolder:
    def __init__(self, node: str) -> None:
        self.node = node


class MadeUpKeeper:
    """Notes what is filled and retired."""

    def __init__(self) -> None:
        self.filled: list[str] = []
        self.retired: list[str] = []
        self.may_retire = asyncio.Event()
        self.refuses: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def fill(self, role: Role) -> None:
        self.filled.append(role.name)
        role.keeping = asyncio.create_task(self._keep(role))
        self._tasks.append(role.keeping)

    async def close(self) -> None:
        """End all that is kept; how a task failed has to be asked for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, role: Role) -> None:
        if role.name in self.refuses:
            raise StartupFailed(f"{role.name}: taken")
        await asyncio.Event().wait()

    async def retire(self, role: Role, within: float) -> None:
        assert within == 3.0
        await self.may_retire.wait()
        self.retired.append(role.name)


class Scene:
    """Engines on nodes, and the places that are kept for them."""

    def __init__(self) -> None:
        self.keeper = MadeUpKeeper()
        self.engines: dict[int, Role] = {}
        self.servers = NodeApiServers(
            self.keeper,  # type: ignore[arg-type]
            self.engines,
            lambda node: None if node == "head" else place(node),
            drain_within=3.0,
        )

    def put(self, *nodes: str) -> None:
        """Have an engine on each of these nodes, and no other."""
        self.engines.clear()
        for rank, node in enumerate(nodes):
            role = place(f"engine {rank}")
            role.holder = MadeUpHolder(node)  # type: ignore[assignment]
            self.engines[rank] = role


def place(name: str) -> Role:
    return Role(name=name, module="", launch=lambda _: None)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_each_node_with_engines_gets_one_except_the_supervisors(scene: Scene) -> None:
    scene.put("head", "a", "a", "b", "")
    scene.servers.look(0.0)
    scene.servers.look(1.0)
    assert sorted(scene.keeper.filled) == ["a", "b"]
    await scene.keeper.close()


async def test_a_node_keeps_it_while_an_engine_is_only_started_again(scene: Scene) -> None:
    scene.put("a")
    scene.servers.look(0.0)
    scene.put("")
    scene.servers.look(LEAVE_AFTER)
    scene.put("a")
    scene.servers.look(LEAVE_AFTER + 1)
    scene.put()
    scene.keeper.may_retire.set()
    scene.servers.look(2 * LEAVE_AFTER)
    await asyncio.sleep(0)
    assert scene.keeper.retired == []
    scene.servers.look(2 * LEAVE_AFTER + 2)
    await until_async(lambda: not scene.servers.roles, "it leaves")
    assert scene.keeper.retired == ["a"]
    await scene.keeper.close()


async def test_engines_that_come_back_while_it_drains_get_another_one(scene: Scene) -> None:
    scene.put("a")
    scene.servers.look(0.0)
    scene.put()
    scene.servers.look(LEAVE_AFTER + 1)
    scene.put("a")
    scene.servers.look(LEAVE_AFTER + 2)
    assert scene.keeper.filled == ["a"]
    scene.keeper.may_retire.set()
    await until_async(lambda: not scene.servers.roles, "it leaves")
    scene.servers.look(LEAVE_AFTER + 3)
    assert scene.keeper.filled == ["a", "a"]
    await scene.keeper.close()


async def test_one_that_cannot_start_is_tried_again_later(scene: Scene) -> None:
    scene.keeper.refuses = {"a"}
    scene.put("a", "b")
    scene.servers.look(0.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scene.servers.look(1.0)
    assert set(scene.servers.roles) == {"b"}
    scene.servers.look(MAX_BACKOFF)
    assert scene.keeper.filled.count("a") == 1
    scene.servers.look(MAX_BACKOFF + 1)
    assert scene.keeper.filled.count("a") == 2
    await scene.keeper.close()
