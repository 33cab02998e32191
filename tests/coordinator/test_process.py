"""The coordinator process over real sockets."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection, create_server

import msgspec
import psutil
import pytest
import zmq

from coordinator.process import socket_addresses
from engine.shared.config import ClusterConfig
from engine.shared.messages import (
    ClusterView,
    CoordinatorReply,
    EngineStats,
    FrontEndAddresses,
    FrontEnds,
    GroupOrder,
    Hello,
    Message,
    Refused,
    StartDpWave,
    ViewChange,
    WakeUp,
    Welcome,
    encode,
)
from engine.shared.transport import Transport
from engine.shared.version import PROTOCOL_VERSION
from tests.support.commands import SWELL, run_swell
from tests.support.http import fetch
from tests.support.ports import free_ports, port_of_a_coordinator
from tests.support.waiting import PATIENCE, until

TIMEOUT_MS = int(1000 * PATIENCE)


class Peer:
    """Sockets of one member, played by the test."""

    def __init__(
        self, directory: Path, context: "zmq.Context[zmq.Socket[bytes]]", name: bytes = b"me"
    ) -> None:
        self.transport = Transport(ClusterConfig(), context)
        self.address = f"ipc://{directory}/coordinator"
        self.registration = self.transport.connect(zmq.DEALER, self.address, identity=name)

    def subscribe(self, address: str) -> "zmq.Socket[bytes]":
        socket = self.transport.connect(zmq.XSUB, address)
        socket.send(b"\x01")
        return socket

    def request(self, message: Message) -> object:
        self.registration.send(encode(message))
        return receive(self.registration, CoordinatorReply)


def receive(socket: "zmq.Socket[bytes]", kind: object) -> object:
    assert socket.poll(TIMEOUT_MS), "nothing came"
    return msgspec.msgpack.decode(socket.recv(), type=kind)


def next_order(socket: "zmq.Socket[bytes]", repeated: object) -> object:
    """Return the next order other than `repeated`: who the front ends are is said once a while."""
    while (order := receive(socket, GroupOrder)) == repeated:
        pass
    return order


@pytest.fixture
def peer(tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> Iterator[Peer]:
    process = subprocess.Popen(
        [SWELL, "coordinator", "--coordinator", f"ipc://{tmp_path}/coordinator"],
        stderr=subprocess.PIPE,
    )
    try:
        yield Peer(tmp_path, context)
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors, errors.decode()


def test_stats_reach_front_ends_and_notices_reach_engines(peer: Peer) -> None:
    welcome = peer.request(Hello("engine", 0, 10, "h", 1, protocol=PROTOCOL_VERSION))
    assert isinstance(welcome, Welcome)
    front = peer.subscribe(socket_addresses(peer.address)[0])
    back = peer.subscribe(welcome.publish_address)
    assert receive(back, GroupOrder) == FrontEnds(welcome.epoch, [])
    receive(front, ClusterView)
    front.send(encode(WakeUp(0, 0, 0)))
    assert next_order(back, FrontEnds(welcome.epoch, [])) == StartDpWave(0, 0)
    output = peer.transport.connect(zmq.PUSH, welcome.output_address)
    output.send(
        encode(
            EngineStats(
                rank=0, incarnation=10, version=1, wave=0, step=1, waiting=2, running=3,
                kv_usage=0.5, queued_prefill_tokens=7,
            )
        )
    )  # fmt: skip
    while True:
        view = receive(front, ClusterView)
        assert isinstance(view, ClusterView)
        if view.running:
            break
    stats = view.engines[0].stats
    assert stats is not None
    assert (stats.waiting, stats.running, stats.queued_prefill_tokens) == (2, 3, 7)


def test_changes_are_published_and_new_subscribers_get_a_full_view(peer: Peer) -> None:
    addresses = FrontEndAddresses("ipc://r", "ipc://o")
    peer.request(
        Hello(
            "front_end", 0, 50, "h", 2, {}, addresses, protocol=PROTOCOL_VERSION,
            takes_changes=True,
        )
    )  # fmt: skip
    front = peer.subscribe(socket_addresses(peer.address)[0])
    assert isinstance(receive(front, ClusterView | ViewChange), ClusterView)
    peer.request(Hello("engine", 0, 10, "h", 1, protocol=PROTOCOL_VERSION))
    change = receive(front, ClusterView | ViewChange)
    assert isinstance(change, ViewChange)
    assert [each.rank for each in change.view.engines] == [0]
    front.send(b"\x01")
    while isinstance(whole := receive(front, ClusterView | ViewChange), ViewChange):
        pass
    assert isinstance(whole, ClusterView)
    assert [each.rank for each in whole.engines] == [0]
    assert whole.version > change.view.version


def test_malformed_messages_on_every_socket_are_harmless(peer: Peer) -> None:
    front_address, output_address, back_address = socket_addresses(peer.address)
    front, back = peer.subscribe(front_address), peer.subscribe(back_address)
    output = peer.transport.connect(zmq.PUSH, output_address)
    for junk in (b"", b"\xff" * 100, b"\x93\xa3Foo", encode(StartDpWave(1, 2))):
        for socket in (front, back, output, peer.registration):
            socket.send(junk)
    assert isinstance(
        peer.request(Hello("engine", 0, 10, "h", 1, protocol=PROTOCOL_VERSION)), Welcome
    )


def test_port_in_use_is_named() -> None:
    with create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_swell("coordinator", "--coordinator", address, "--insecure-cluster")
    assert done.returncode
    assert f"cannot listen on tcp://{address}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def flood(address: tuple[str, int], most: int) -> int:
    """Announce a message without end on a connection that has no key; return the bytes it took."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    chunk, sent = bytes(1 << 16), 0
    with create_connection(address, timeout=PATIENCE) as connection:
        connection.sendall(greeting + b"\x06" + (1 << 30).to_bytes(8))
        connection.settimeout(1.0)
        with contextlib.suppress(OSError):
            while sent < most:
                sent += connection.send(chunk)
    return sent


def test_a_peer_without_the_key_cannot_fill_the_coordinator(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret of these tests, long enough\n")
    first = port_of_a_coordinator()
    process = subprocess.Popen(
        [SWELL, "coordinator", "--coordinator", f"127.0.0.1:{first}", "--cluster-key-file", key,
         "--health-port", str(first + 4)]
    )  # fmt: skip
    try:
        addresses = [("127.0.0.1", first + number) for number in range(4)]
        until(lambda: all(map(listens, addresses)), "it listens")
        ready = f"http://127.0.0.1:{first + 4}/ready"
        until(lambda: fetch(ready).status == 200, "it has all that it needs")
        for address in addresses:
            before = psutil.Process(process.pid).memory_info().rss
            assert flood(address, 256 << 20) < 64 << 20, "the connection is closed"
            assert psutil.Process(process.pid).memory_info().rss - before < 8 << 20
            assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def listens(address: tuple[str, int]) -> bool:
    try:
        create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def test_coordinator_short_of_descriptors_warns_and_stays_healthy(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    (port,) = free_ports(1)
    log = tmp_path / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            ["prlimit", "--nofile=128:128", SWELL, "coordinator", "--health-port", str(port),
             "--coordinator", f"ipc://{tmp_path}/coordinator"],
            stderr=written,
        )  # fmt: skip
    try:
        first = Peer(tmp_path, context, b"first")
        hello = Hello("engine", 0, 10, "h", 1, protocol=PROTOCOL_VERSION)
        assert isinstance(first.request(hello), Welcome)
        peers = [Peer(tmp_path, context, f"peer {number}".encode()) for number in range(90)]
        until(lambda: "of 128 file descriptors are open" in log.read_text(), "it warns")
        late: list[object] = []

        def is_refused() -> bool:
            """Whether it has counted all connections, which it does now and then."""
            number = 100 + len(late)
            hello = Hello("engine", number, number, "h", 1, protocol=PROTOCOL_VERSION)
            late.append(peers[-1].request(hello))
            return isinstance(late[-1], Refused)

        until(is_refused, "who comes late is refused")
        assert isinstance(late[-1], Refused)
        assert late[-1].field == "descriptors"
        assert fetch(f"http://127.0.0.1:{port}/ready").status == 200
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
