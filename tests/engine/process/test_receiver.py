"""When an engine's receiver thread reports that front ends route to it; peers are simulated."""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from engine.core.events import InboxItem, Welcomed
from engine.lockstep.grouping import GroupConnection
from engine.process.receiver import Receiver, build_reception
from engine.process.reception import Serve
from engine.shared.config import ClusterConfig, EngineConfig
from engine.shared.messages import (
    EngineSetup,
    FrontEndAddresses,
    FrontEndEntry,
    MemberMessage,
    Ready,
    RouteHello,
    RouteTaken,
    Welcome,
    encode,
)
from engine.shared.transport import Transport
from engine.shared.version import PROTOCOL_VERSION

INCARNATION = 77
SETUP = EngineSetup(num_kv_blocks=9, block_size=16, max_model_len=64, model_fingerprint="f")
GUARD = 60.0


class Discarded:
    """Takes what would be opened for outputs."""

    def connect_coordinator(self, address: str) -> None: ...

    def connect_front_end(self, index: int, address: str, protocol: int) -> None: ...

    def disconnect_front_end(self, index: int) -> None: ...


class World:
    """A coordinator and a front end, played, around one receiver."""

    def __init__(self, directory: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        cluster = ClusterConfig(
            coordinator=f"ipc://{directory}/coordinator", heartbeat_interval=0.2
        )
        self._addresses = FrontEndAddresses(
            f"ipc://{directory}/requests", f"ipc://{directory}/outputs"
        )
        self._publish = f"ipc://{directory}/publish"
        transport = Transport(cluster, context)
        self.registration = transport.bind(zmq.ROUTER, cluster.coordinator_address)
        self.requests = transport.bind(zmq.ROUTER, self._addresses.requests)
        self.orders = transport.bind(zmq.XPUB, self._publish)
        self.routed = threading.Event()
        self.inbox: SimpleQueue[InboxItem] = SimpleQueue()
        reception = build_reception(EngineConfig(cluster=cluster), INCARNATION, lockstep=False)
        self.receiver = Receiver(
            cluster.coordinator_address, INCARNATION, transport, context, reception=reception,
            inbox=self.inbox, outputs=Discarded(),  # type: ignore[arg-type]
            connection=GroupConnection(), on_routed=self.routed.set,
        )  # fmt: skip
        self.receiver.start()

    def receive(self, socket: "zmq.Socket[bytes]", of: object) -> tuple[bytes, object]:
        assert socket.poll(int(1000 * GUARD)), "nothing comes"
        sender, *_, body = socket.recv_multipart()
        return sender, msgspec.msgpack.decode(body, type=of)

    def welcome(self, front_ends: list[FrontEndEntry]) -> None:
        sender, _ = self.receive(self.registration, MemberMessage)
        reply = Welcome(
            epoch=1, index=0, wave=0, publish_address=self._publish, output_address="",
            front_ends=front_ends, protocol=PROTOCOL_VERSION,
        )  # fmt: skip
        self.registration.send_multipart([sender, encode(reply)])
        assert isinstance(self.inbox.get(timeout=GUARD), Welcomed)

    @property
    def front_end(self) -> FrontEndEntry:
        return FrontEndEntry(0, 5, self._addresses)

    def until_ready_is_reported(self) -> None:
        while not isinstance(self.receive(self.registration, MemberMessage)[1], Ready):
            pass


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = World(tmp_path, context)
    try:
        yield made
    finally:
        made.receiver.stop()
        for each in (made.registration, made.requests, made.orders):
            each.close(linger=0)
        context.destroy(linger=0)


def test_engine_is_ready_once_its_front_end_routes_to_it(world: World) -> None:
    world.welcome([world.front_end])
    world.receiver.submit(Serve(SETUP))
    world.until_ready_is_reported()
    asked, session = 0, 0
    while asked < 5:  # the coordinator knows, but the front end has not heard of it yet
        sender, greeting = world.receive(world.requests, RouteHello)
        assert isinstance(greeting, RouteHello)
        asked, session = asked + greeting.wants_reply, greeting.session
    assert not world.routed.is_set()
    world.requests.send_multipart([sender, encode(RouteTaken(session))])
    assert world.routed.wait(GUARD)


def test_engine_without_front_ends_is_ready_immediately(world: World) -> None:
    world.welcome([])
    assert not world.routed.is_set()
    world.receiver.submit(Serve(SETUP))
    assert world.routed.wait(GUARD)
