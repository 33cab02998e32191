"""A place on a Ray cluster from the wish for room to its end, with a cluster that is made up."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
import pytest

from engine.shared.config import EngineConfig, EngineLaunch
from engine.shared.lifeline import CANNOT_START
from engine.shared.messages import ChildFailed, ChildProgress, ChildReady, ChildStatus
from engine.shared.version import SWELL_VERSION
from server.config import FrontEndConfig
from server.fleet.child import Program, ProgramExit
from server.fleet.ray.cluster import ActorLost, Group
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Exited, Line
from server.fleet.ray.packing import Packing, RayNode, Resources
from server.fleet.ray.resources import _torch
from server.fleet.ray.starter import Ranks, RayHandle, api_server_role
from tests.support.waiting import until_async

pytestmark = pytest.mark.ray

SAME = {"swell": SWELL_VERSION, "torch": _torch(), "relay": "server.fleet.ray.messages"}


class FakeActor:
    """An actor whose events the test puts in."""

    def __init__(self, cluster: "FakeCluster") -> None:
        self._cluster = cluster
        self.events: asyncio.Queue[list[ActorEvent] | ActorLost] = asyncio.Queue()
        self.notified: list[str] = []
        self.is_killed = False
        self.launch: ActorLaunch | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        match method:
            case "installed":
                await self._cluster.may_answer.wait()
                return self._cluster.installed
            case "start":
                if self._cluster.start_error is not None:
                    raise self._cluster.start_error
                self.launch = msgspec.msgpack.decode(arguments[0], type=ActorLaunch)
                return None
            case "events":
                notified = await self.events.get()
                if isinstance(notified, ActorLost):
                    raise notified
                return msgspec.msgpack.encode(notified)
        raise AssertionError(method)

    def notify(self, method: str) -> None:
        self.notified.append(method)

    async def kill(self) -> None:
        self.is_killed = True
        self.events.put_nowait(ActorLost("killed", node_survived=True))


class FakeCluster:
    """Nodes of one place each; what is placed is counted."""

    def __init__(self, *names: str) -> None:
        self.free = {name: 1.0 for name in names}
        self.refusing: set[str] = set()
        """Nodes that say that they have room and take nothing."""
        self.groups: dict[int, str | None] = {}
        self._made = 0
        self.actors: list[FakeActor] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.installed: dict[str, str] = SAME
        self.start_error: OSError | None = None

    async def nodes(self) -> list[RayNode]:
        return [RayNode(name, name, {"CPU": 1.0}, {"CPU": n}) for name, n in self.free.items()]

    async def reserve(
        self, name: str, bundle: Resources, *, node: str | None, excluded: Collection[str]
    ) -> Group:
        self._made += 1
        number = self._made
        self.groups[number] = node
        return Group(number, bundle)

    async def placed_on(self, group: Group) -> str | None:
        node = self.groups[group.handle]
        if node is None:
            node = next((name for name, free in self.free.items() if free), None)
        return None if node in self.refusing else node

    async def release(self, group: Group) -> None:
        self.groups.pop(group.handle, None)

    def start_actor(self, name: str, group: Group) -> FakeActor:
        self.actors.append(FakeActor(self))
        return self.actors[-1]

    def start_actor_on(self, name: str, node: str) -> FakeActor:
        assert node in self.free
        return self.start_actor(name, Group(0, {}))


class Place:
    """A cluster, one program in it, and what it says."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.statuses: list[ChildStatus] = []
        self.lines: list[str] = []
        self.ranks = Ranks(
            cluster=cluster,  # type: ignore[arg-type]
            packing=Packing("fill", {"CPU": 1.0}),
            environment={"HF_TOKEN": "x"},
            cluster_key=b"secret",
            planned={},
            existing={},
        )

    async def start(self) -> RayHandle:
        launch = EngineLaunch(EngineConfig(), 7)
        return await self.ranks.start(self.program("engine 0", "engine", launch))

    def program(self, name: str, module: str, launch: Any) -> Program:
        return Program(
            name=name, module=module, launch=launch,
            on_status=self.statuses.append, on_line=self.show,
        )  # fmt: skip

    def show(self, line: str) -> None:
        self.lines.append(line)
        if line == "bad":
            raise OSError("nobody reads")

    async def started(self) -> tuple[RayHandle, FakeActor]:
        before = len(self.cluster.actors)
        handle = await self.start()
        await until_async(
            lambda: any(actor.launch for actor in self.cluster.actors[before:]), "it is started"
        )
        return handle, self.cluster.actors[-1]

    def is_clean(self) -> bool:
        killed = all(actor.is_killed for actor in self.cluster.actors)
        return killed and not self.cluster.groups and not +self.ranks.ranks_per_node


def run(names: str, body: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place(FakeCluster(*names))
        await body(place)
        assert place.is_clean()

    asyncio.run(main())


def test_engine_output_is_relayed_until_it_ends() -> None:
    async def body(place: Place) -> None:
        handle, actor = await place.started()
        assert actor.launch is not None
        assert (actor.launch.cluster_key, actor.launch.environment, actor.launch.node) == (
            b"secret",
            {"HF_TOKEN": "x"},
            "a",
        )
        actor.events.put_nowait([ChildProgress("loading"), Line("bad"), Line("one")])
        actor.events.put_nowait([ChildReady("serves"), ChildFailed("no files"), Exited(-9)])
        assert await handle.wait() == ProgramExit(-9, "was ended by SIGKILL")
        assert (handle.node, list(handle.last_lines)) == ("a", ["bad", "one"])
        assert place.lines == ["bad", "one"]
        assert place.statuses[-3:] == [
            ChildProgress("loading"), ChildReady("serves"), ChildFailed("no files (on node a)")
        ]  # fmt: skip

    run("a", body)


def test_wait_for_resources_is_reported_and_cancelled_cleanly() -> None:
    async def body(place: Place) -> None:
        place.cluster.free["a"] = 0.0
        handle = await place.start()
        await until_async(lambda: place.cluster.groups, "a pending group is demand")
        notified = place.statuses[-1]
        assert isinstance(notified, ChildProgress)
        assert notified.phase == "waiting for 1 CPU: free are a 0 of 1 CPU"
        handle.terminate()
        handle.kill()
        assert (await handle.wait()).code == 0

    run("a", body)


def test_resources_that_become_free_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.POLL_INTERVAL", 0.01)

    async def body(place: Place) -> None:
        place.cluster.free["a"] = 0.0
        handle = await place.start()
        await until_async(lambda: place.cluster.groups, "it waits")
        place.cluster.free["a"] = 1.0
        await until_async(lambda: place.cluster.actors, "it is placed")
        place.cluster.actors[0].events.put_nowait([Exited(0)])
        assert (await handle.wait()).code == 0

    run("a", body)


def test_node_that_cannot_run_a_rank_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.PLACEMENT_TIMEOUT", 0.05)

    async def body(place: Place) -> None:
        place.cluster.refusing = {"a"}
        handle, actor = await place.started()
        assert handle.node == "b"
        actor.events.put_nowait([Exited(0)])
        await handle.wait()

    run("ab", body)


@pytest.mark.parametrize("node_survived", [True, False])
def test_lost_actor_reports_whether_to_avoid_its_node(node_survived: bool) -> None:
    async def body(place: Place) -> None:
        handle, actor = await place.started()
        actor.events.put_nowait(ActorLost("socket closed", node_survived=node_survived))
        end = await handle.wait()
        assert end == ProgramExit(None, "was lost with its actor on a: socket closed")
        again, actor = await place.started()
        assert again.node == ("a" if node_survived else "b")
        actor.events.put_nowait([Exited(0)])
        await again.wait()

    run("ab", body)


def test_another_version_is_refused_before_anything_is_started() -> None:
    async def body(place: Place) -> None:
        place.cluster.installed = {**SAME, "swell": "0.0.1"}
        handle = await place.start()
        assert (await handle.wait()).code == CANNOT_START
        notified = place.statuses[-1]
        assert isinstance(notified, ChildFailed)
        assert "swell 0.0.1 there" in notified.reason
        assert place.cluster.actors[0].launch is None

    run("a", body)


def test_failed_actor_start_counts_as_exit() -> None:
    async def body(place: Place) -> None:
        place.cluster.start_error = OSError("no memory")
        end = await (await place.start()).wait()
        assert end == ProgramExit(1, "cannot be started on a: no memory")

    run("a", body)


def test_an_actor_that_is_stopped_early_never_starts_its_engine() -> None:
    async def body(place: Place) -> None:
        place.cluster.may_answer.clear()
        handle = await place.start()
        await until_async(lambda: place.cluster.actors, "there is an actor")
        handle.terminate()
        assert (await handle.wait()).code == 0
        assert not handle.alive

    run("a", body)


def test_an_engine_drains_and_one_that_hangs_is_ended_with_its_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.KILL_TIMEOUT", 0.02)

    async def body(place: Place) -> None:
        handle, actor = await place.started()
        handle.terminate()
        assert (actor.notified, handle.alive) == (["terminate"], True)
        handle.kill()
        assert (await handle.wait()).code is None
        assert actor.notified == ["terminate", "kill"]

    run("a", body)


def test_api_server_waits_for_its_node_uses_no_resources_and_drains_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.POLL_INTERVAL", 0.01)

    async def body(place: Place) -> None:
        role = api_server_role(place.ranks, FrontEndConfig(), "b", 8001)
        handle = await role.start(place.program(role.name, role.module, role.launch(9)))
        await until_async(
            lambda: ChildProgress("waiting for its node") in place.statuses, "it waits"
        )
        place.cluster.free["b"] = 0.0
        await until_async(
            lambda: any(actor.launch for actor in place.cluster.actors), "it is started"
        )
        actor = place.cluster.actors[0]
        assert actor.launch is not None
        assert actor.launch.api_server is not None
        http = actor.launch.api_server.http
        assert (http.host, http.port, actor.launch.node, handle.node) == ("b", 8001, "b", "b")
        assert (actor.launch.incarnation, actor.launch.cluster_key) == (9, b"secret")
        handle.terminate()
        handle.terminate()
        assert actor.notified == ["terminate"]
        actor.events.put_nowait([Exited(0)])
        assert (await handle.wait()).code == 0
        assert not place.cluster.groups

    run("a", body)


def test_an_api_server_whose_node_never_joins_stops_on_request() -> None:
    async def body(place: Place) -> None:
        role = api_server_role(place.ranks, FrontEndConfig(), "b", 8001)
        handle = await role.start(place.program(role.name, role.module, role.launch(9)))
        await until_async(lambda: place.statuses, "it waits")
        handle.terminate()
        handle.terminate()
        assert (await handle.wait()).code == 0

    run("a", body)
