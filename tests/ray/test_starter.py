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
from server.fleet.child import Ended, Program
from server.fleet.ray.cluster import ActorLost, Group
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Exited, Line
from server.fleet.ray.needs import _torch
from server.fleet.ray.packing import Packing, RayNode, Resources
from server.fleet.ray.starter import Ranks, RayHolder, api_server_role
from tests.support.waiting import until_async

pytestmark = pytest.mark.ray

SAME = {"swell": SWELL_VERSION, "torch": _torch(), "relay": "server.fleet.ray.messages"}


class MadeUpActor:
    """An actor whose events the test puts in."""

    def __init__(self, cluster: "MadeUpCluster") -> None:
        self._cluster = cluster
        self.news: asyncio.Queue[list[ActorEvent] | ActorLost] = asyncio.Queue()
        self.told: list[str] = []
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
                told = await self.news.get()
                if isinstance(told, ActorLost):
                    raise told
                return msgspec.msgpack.encode(told)
        raise AssertionError(method)

    def tell(self, method: str) -> None:
        self.told.append(method)

    async def kill(self) -> None:
        self.is_killed = True
        self.news.put_nowait(ActorLost("killed", alone=True))


class MadeUpCluster:
    """Nodes of one place each; what is placed is counted."""

    def __init__(self, *names: str) -> None:
        self.free = {name: 1.0 for name in names}
        self.refusing: set[str] = set()
        """Nodes that say that they have room and take nothing."""
        self.groups: dict[int, str | None] = {}
        self._made = 0
        self.actors: list[MadeUpActor] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.installed: dict[str, str] = SAME
        self.start_error: OSError | None = None

    async def nodes(self) -> list[RayNode]:
        return [RayNode(name, name, {"CPU": 1.0}, {"CPU": n}) for name, n in self.free.items()]

    async def reserve(
        self, name: str, bundle: Resources, *, node: str | None, never: Collection[str]
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

    def start_actor(self, name: str, group: Group) -> MadeUpActor:
        self.actors.append(MadeUpActor(self))
        return self.actors[-1]

    def start_actor_on(self, name: str, node: str) -> MadeUpActor:
        assert node in self.free
        return self.start_actor(name, Group(0, {}))


class Place:
    """A cluster, one holder in it, and what it says."""

    def __init__(self, cluster: MadeUpCluster) -> None:
        self.cluster = cluster
        self.statuses: list[ChildStatus] = []
        self.lines: list[str] = []
        self.ranks = Ranks(
            cluster,  # type: ignore[arg-type]
            Packing("fill", {"CPU": 1.0}),
            environment={"HF_TOKEN": "x"},
            cluster_key=b"secret",
            planned={},
            existing={},
        )

    async def start(self) -> RayHolder:
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

    async def started(self) -> tuple[RayHolder, MadeUpActor]:
        before = len(self.cluster.actors)
        holder = await self.start()
        await until_async(
            lambda: any(actor.launch for actor in self.cluster.actors[before:]), "it is started"
        )
        return holder, self.cluster.actors[-1]

    def is_clean(self) -> bool:
        killed = all(actor.is_killed for actor in self.cluster.actors)
        return killed and not self.cluster.groups and not +self.ranks.held


def run(names: str, body: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place(MadeUpCluster(*names))
        await body(place)
        assert place.is_clean()

    asyncio.run(main())


def test_what_an_engine_says_is_passed_on_until_it_ends() -> None:
    async def body(place: Place) -> None:
        holder, actor = await place.started()
        assert actor.launch is not None
        assert (actor.launch.cluster_key, actor.launch.environment, actor.launch.node) == (
            b"secret",
            {"HF_TOKEN": "x"},
            "a",
        )
        actor.news.put_nowait([ChildProgress("loading"), Line("bad"), Line("one")])
        actor.news.put_nowait([ChildReady("serves"), ChildFailed("no files"), Exited(-9)])
        assert await holder.wait() == Ended(-9, "was ended by SIGKILL")
        assert (holder.node, list(holder.last_lines)) == ("a", ["bad", "one"])
        assert place.lines == ["bad", "one"]
        assert place.statuses[-3:] == [
            ChildProgress("loading"), ChildReady("serves"), ChildFailed("no files (on node a)")
        ]  # fmt: skip

    run("a", body)


def test_a_wait_for_room_is_told_and_given_up_without_a_trace() -> None:
    async def body(place: Place) -> None:
        place.cluster.free["a"] = 0.0
        holder = await place.start()
        await until_async(lambda: place.cluster.groups, "a pending group is demand")
        told = place.statuses[-1]
        assert isinstance(told, ChildProgress)
        assert told.phase == "waiting for 1 CPU: free are a 0 of 1 CPU"
        holder.terminate()
        holder.kill()
        assert (await holder.wait()).code == 0

    run("a", body)


def test_room_that_appears_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.LOOK_INTERVAL", 0.01)

    async def body(place: Place) -> None:
        place.cluster.free["a"] = 0.0
        holder = await place.start()
        await until_async(lambda: place.cluster.groups, "it waits")
        place.cluster.free["a"] = 1.0
        await until_async(lambda: place.cluster.actors, "it is placed")
        place.cluster.actors[0].news.put_nowait([Exited(0)])
        assert (await holder.wait()).code == 0

    run("a", body)


def test_a_node_that_does_not_take_a_rank_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.PLACE_WITHIN", 0.05)

    async def body(place: Place) -> None:
        place.cluster.refusing = {"a"}
        holder, actor = await place.started()
        assert holder.node == "b"
        actor.news.put_nowait([Exited(0)])
        await holder.wait()

    run("ab", body)


@pytest.mark.parametrize("alone", [True, False])
def test_a_lost_actor_says_whether_its_node_is_to_be_avoided(alone: bool) -> None:
    async def body(place: Place) -> None:
        holder, actor = await place.started()
        actor.news.put_nowait(ActorLost("socket closed", alone=alone))
        end = await holder.wait()
        assert end == Ended(None, "was lost with its actor on a: socket closed")
        again, actor = await place.started()
        assert again.node == ("a" if alone else "b")
        actor.news.put_nowait([Exited(0)])
        await again.wait()

    run("ab", body)


def test_another_version_is_refused_before_anything_is_started() -> None:
    async def body(place: Place) -> None:
        place.cluster.installed = {**SAME, "swell": "0.0.1"}
        holder = await place.start()
        assert (await holder.wait()).code == CANNOT_START
        told = place.statuses[-1]
        assert isinstance(told, ChildFailed)
        assert "swell 0.0.1 there" in told.reason
        assert place.cluster.actors[0].launch is None

    run("a", body)


def test_an_engine_that_cannot_be_started_there_is_an_end_like_others() -> None:
    async def body(place: Place) -> None:
        place.cluster.start_error = OSError("no memory")
        end = await (await place.start()).wait()
        assert end == Ended(1, "cannot be started on a: no memory")

    run("a", body)


def test_who_is_asked_to_end_before_the_engine_runs_never_starts_one() -> None:
    async def body(place: Place) -> None:
        place.cluster.may_answer.clear()
        holder = await place.start()
        await until_async(lambda: place.cluster.actors, "there is an actor")
        holder.terminate()
        assert (await holder.wait()).code == 0
        assert not holder.alive

    run("a", body)


def test_an_engine_drains_and_one_that_hangs_is_ended_with_its_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.KILL_WITHIN", 0.02)

    async def body(place: Place) -> None:
        holder, actor = await place.started()
        holder.terminate()
        assert (actor.told, holder.alive) == (["terminate"], True)
        holder.kill()
        assert (await holder.wait()).code is None
        assert actor.told == ["terminate", "kill"]

    run("a", body)


def test_an_api_server_waits_for_its_node_takes_no_room_and_drains_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.fleet.ray.starter.LOOK_INTERVAL", 0.01)

    async def body(place: Place) -> None:
        role = api_server_role(place.ranks, FrontEndConfig(), "b", 8001)
        holder = await role.start(place.program(role.name, role.module, role.launch(9)))
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
        assert (http.host, http.port, actor.launch.node, holder.node) == ("b", 8001, "b", "b")
        assert (actor.launch.incarnation, actor.launch.cluster_key) == (9, b"secret")
        holder.terminate()
        holder.terminate()
        assert actor.told == ["terminate"]
        actor.news.put_nowait([Exited(0)])
        assert (await holder.wait()).code == 0
        assert not place.cluster.groups

    run("a", body)


def test_an_api_server_whose_node_never_comes_gives_up_when_told() -> None:
    async def body(place: Place) -> None:
        role = api_server_role(place.ranks, FrontEndConfig(), "b", 8001)
        holder = await role.start(place.program(role.name, role.module, role.launch(9)))
        await until_async(lambda: place.statuses, "it waits")
        holder.terminate()
        holder.terminate()
        assert (await holder.wait()).code == 0

    run("a", body)
