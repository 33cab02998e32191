"""Sockets: security between nodes, addresses, and typed receiving."""

import asyncio
import contextlib
import shutil
import socket
from pathlib import Path

import pytest
import zmq

from engine.shared.cluster_keys import InsecureCluster, cluster_key_pair
from engine.shared.config import ClusterConfig
from engine.shared.messages import AbortRequests, EngineInput, Refused, encode
from engine.shared.transport import (
    Inbox,
    Transport,
    advertised_host,
    bound_address,
)

Context = zmq.Context[zmq.Socket[bytes]]


def keyed(context: Context, directory: Path, secret: str) -> Transport:
    path = directory / secret
    path.write_text(f"{secret:->32}\n")
    return Transport(ClusterConfig(cluster_key_file=str(path)), context)


@pytest.mark.parametrize("intruder", ["wrong key", "no key"])
def test_wrong_or_missing_secret_transfers_nothing(
    context: Context, tmp_path: Path, intruder: str
) -> None:
    pull = keyed(context, tmp_path, "alpha").bind(zmq.PULL, "tcp://127.0.0.1:*")
    address = bound_address(pull, "127.0.0.1")
    if intruder == "wrong key":
        outsider = keyed(context, tmp_path, "beta")
    else:
        outsider = Transport(ClusterConfig(insecure_cluster=True), context)
    with contextlib.suppress(zmq.Again):  # turned away before it could send
        outsider.connect(zmq.PUSH, address).send(b"let me in", zmq.NOBLOCK)
    keyed(context, tmp_path, "alpha").connect(zmq.PUSH, address).send(b"friend")
    assert pull.poll(60_000)
    assert pull.recv() == b"friend"
    assert not pull.poll(500), "the outsider came first and had time enough"


def test_tcp_without_key_needs_explicit_permission(context: Context) -> None:
    with pytest.raises(InsecureCluster, match="--cluster-key-file"):
        Transport(ClusterConfig(), context).bind(zmq.PULL, "tcp://127.0.0.1:*")
    Transport(ClusterConfig(insecure_cluster=True), context).bind(zmq.PULL, "tcp://127.0.0.1:*")


def test_key_is_derived_only_from_the_secret() -> None:
    key = b"0123456789abcdef"
    assert cluster_key_pair(key) == cluster_key_pair(b" " + key + b"\n")
    assert cluster_key_pair(key) != cluster_key_pair(key + b"0")


@pytest.mark.parametrize("material", [b"", b" \n\t" * 20, b"secret\n", b"0123456789abcde "])
def test_guessable_key_is_refused(material: bytes, tmp_path: Path, context: Context) -> None:
    key = tmp_path / "key"
    key.write_bytes(material)
    with pytest.raises(InsecureCluster, match=f"{key}.*at least 16"):
        Transport(ClusterConfig(cluster_key_file=str(key)), context)


def test_local_socket_is_restored_after_cleaner_removed_directory(
    tmp_path: Path, context: Context
) -> None:
    directory = tmp_path / "node"
    directory.mkdir(mode=0o700)
    address = f"ipc://{directory}/s"
    transport = Transport(ClusterConfig(), context)
    pull = transport.bind(zmq.PULL, address)
    old = transport.connect(zmq.PUSH, address)
    old.send(b"before")
    assert pull.recv() == b"before"
    shutil.rmtree(directory)
    transport.maintain()
    new = transport.connect(zmq.PUSH, address)
    new.send(b"newcomer")
    assert pull.poll(60_000)
    assert pull.recv() == b"newcomer"
    old.send(b"still there")
    assert pull.poll(60_000)
    assert pull.recv() == b"still there"


def test_socket_is_not_rebound_in_insecure_directory(
    tmp_path: Path,
    context: Context,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = tmp_path / "node"
    directory.mkdir(mode=0o700)
    transport = Transport(ClusterConfig(), context)
    transport.bind(zmq.PULL, f"ipc://{directory}/s")
    shutil.rmtree(directory)
    directory.mkdir()
    directory.chmod(0o777)
    transport.maintain()
    assert list(directory.iterdir()) == []
    assert "must not be accessible to others" in caplog.text


def test_addresses_are_completed_and_advertised(context: Context) -> None:
    assert ClusterConfig(coordinator="head:7550").coordinator_address == "tcp://head:7550"
    assert ClusterConfig(coordinator="ipc:///x").coordinator_address == "ipc:///x"
    assert ClusterConfig().coordinator_address == "tcp://127.0.0.1:7550"
    transport = Transport(ClusterConfig(insecure_cluster=True), context)
    socket = transport.bind(zmq.PULL, "tcp://*:*")
    assert bound_address(socket, "node-7").startswith("tcp://node-7:")


def test_a_path_too_long_for_a_socket_is_named(context: Context) -> None:
    with pytest.raises(ValueError, match="--socket-dir"):
        Transport(ClusterConfig(), context).bind(zmq.PULL, f"ipc:///tmp/{'x' * 120}")


def pair(context: Context, directory: Path) -> tuple[Inbox, "zmq.Socket[bytes]"]:
    transport = Transport(ClusterConfig(), context)
    pull = transport.bind(zmq.PULL, f"ipc://{directory}/s")
    return Inbox(pull, EngineInput, "test"), transport.connect(zmq.PUSH, f"ipc://{directory}/s")


def test_unknown_and_malformed_messages_are_counted_and_skipped(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, push = pair(context, tmp_path)
    no_text = b"\x91\xa1\xff"
    for frame in (b"\xc1", no_text, encode(Refused("x")), b"", encode(AbortRequests([4]))):
        push.send(frame)
    inbox.socket.poll(60_000)
    received = None
    while received is None:
        received = inbox.receive()
    assert received == (b"", AbortRequests([4]))
    assert inbox.dropped == 4
    assert len(caplog.records) == 1, "logged once, not per message"


def test_an_event_loop_gets_every_message_of_a_burst(context: Context, tmp_path: Path) -> None:
    async def scenario() -> None:
        inbox, push = pair(context, tmp_path)
        got: list[int] = []
        done = asyncio.Event()

        def handle(_sender: bytes, message: AbortRequests) -> None:
            got.extend(message.ids)
            if len(got) == 1000:
                done.set()

        inbox.attach(asyncio.get_running_loop(), handle)
        for i in range(1000):
            push.send(encode(AbortRequests([i])))
        async with asyncio.timeout(60):
            await done.wait()
        assert got == list(range(1000))
        inbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("coordinator", "advertise", "expected"),
    [
        ("127.0.0.1:7550", None, "127.0.0.1"),
        ("ipc:///tmp/x", None, "127.0.0.1"),
        ("0.0.0.0:7550", None, socket.gethostname()),
        ("0.0.0.0:7550", "head", "head"),
        ("localhost:7550", "10.1.2.3", "10.1.2.3"),
        ("[::1]:7550", None, "::1"),
        ("*:7550", "[fd00::7]", "fd00::7"),
        ("[::]:7550", None, socket.gethostname()),
    ],
)
def test_advertised_host_is_what_others_connect_to(
    coordinator: str, advertise: str | None, expected: str
) -> None:
    config = ClusterConfig(coordinator=coordinator, advertise_host=advertise)
    assert advertised_host(config) == expected


def test_all_interfaces_are_reached_over_both_families(context: Context, tmp_path: Path) -> None:
    transport = keyed(context, tmp_path, "alpha")
    pull = transport.bind(zmq.PULL, "tcp://*:*")
    for host in ("127.0.0.1", "::1", "localhost"):
        transport.connect(zmq.PUSH, bound_address(pull, host)).send(host.encode())
    assert {pull.recv() for _ in range(3) if pull.poll(60_000)} == {
        b"127.0.0.1",
        b"::1",
        b"localhost",
    }


def test_silent_peer_is_disconnected(context: Context) -> None:
    """It took the connection and is silent, like a node that is lost behind a balancer."""
    cluster = ClusterConfig(insecure_cluster=True, heartbeat_interval=0.1, engine_timeout=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        port = silent.getsockname()[1]
        pull = Transport(cluster, context).connect(zmq.PULL, f"tcp://127.0.0.1:{port}")
        heard = b""
        with silent.accept()[0] as connection:
            connection.sendall(ZMTP_GREETING)
            while received := connection.recv(4096):  # ends when the other side gives up
                heard += received
        assert b"\x04PING" in heard
        silent.accept()[0].close()
        pull.close()


ZMTP_GREETING = (
    b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
)  # fmt: skip
"""What a PUSH socket without security says first (ZMTP 3.1)."""


def test_a_coordinator_that_cannot_be_resolved_is_an_error() -> None:
    with pytest.raises(OSError, match="coordinator's host nowhere"):
        advertised_host(ClusterConfig(coordinator="nowhere.invalid:7550"))
