"""Ports that accept several cluster keys during key rotation."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zmq

from engine.shared.config import ClusterConfig
from engine.shared.transport import SharedPort, Transport, bound_address

Context = zmq.Context[zmq.Socket[bytes]]
OLD, NEW, WRONG = (f"{name:->32}" for name in ("old", "new", "wrong"))


class Node:
    """A node's key files, as in a mounted secret volume."""

    def __init__(self, directory: Path, key: str, accepted: str | None = None) -> None:
        directory.mkdir()
        self._key, self._accepted = directory / "cluster-key", directory / "cluster-key-accepted"
        self.show(key, accepted)

    def show(self, key: str, accepted: str | None = None) -> None:
        for path, text in ((self._key, key), (self._accepted, accepted)):
            if text is None:
                path.unlink(missing_ok=True)
                continue
            path.with_suffix(".next").write_text(text)
            os.replace(path.with_suffix(".next"), path)

    def transport(self, context: Context) -> Transport:
        files: dict[str, Any] = {
            "cluster_key_file": str(self._key),
            "accepted_cluster_key_file": str(self._accepted),
        }
        return Transport(ClusterConfig(**files), context)


Arrives: TypeAlias = Callable[..., bool]


@pytest.fixture
def arrives(context: Context, tmp_path: Path) -> Arrives:
    """Whether a message of a peer with a key gets to a socket's address."""
    numbers = iter(range(100))

    def arrives(pull: "zmq.Socket[bytes]", address: str, key: str, wait: int = 10_000) -> bool:
        name = f"peer-{next(numbers)}"
        push = Node(tmp_path / name, key).transport(context).connect(zmq.PUSH, address)
        push.send(name.encode())
        came = bool(pull.poll(wait)) and pull.recv() == name.encode()
        push.close(linger=0)
        return came

    return arrives


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_both_keys_are_accepted_and_no_other(
    context: Context, tmp_path: Path, arrives: Arrives, host: str
) -> None:
    transport = Node(tmp_path / "node", NEW, OLD).transport(context)
    pull = transport.bind(zmq.PULL, f"tcp://{host}:*")
    address = bound_address(pull, host)
    assert all(arrives(pull, address, key) for key in (OLD, NEW) * 4)
    assert not arrives(pull, address, WRONG, wait=500)


def test_key_added_at_run_time_is_accepted_and_connections_stay(
    context: Context, tmp_path: Path, arrives: Arrives
) -> None:
    node = Node(tmp_path / "node", OLD)
    transport = node.transport(context)
    pull = transport.bind(zmq.PULL, "tcp://*:*")
    address = bound_address(pull, "127.0.0.1")
    early = Node(tmp_path / "early", OLD).transport(context).connect(zmq.PUSH, address)
    early.send(b"before")
    assert pull.poll(60_000)
    assert pull.recv() == b"before"
    for key, accepted in ((OLD, NEW), (NEW, OLD), (NEW, None)):
        node.show(key, accepted)
        transport.maintain()
        assert arrives(pull, address, OLD), "until the process ends"
        assert arrives(pull, address, NEW)
        early.send(b"still there")
        assert pull.poll(60_000)
        assert pull.recv() == b"still there"


def test_new_connections_use_the_current_key_of_the_file(context: Context, tmp_path: Path) -> None:
    pull = Node(tmp_path / "binder", NEW).transport(context).bind(zmq.PULL, "tcp://127.0.0.1:*")
    node = Node(tmp_path / "node", OLD)
    transport = node.transport(context)
    node.show(NEW)
    transport.connect(zmq.PUSH, bound_address(pull, "127.0.0.1")).send(b"with the new one")
    assert pull.poll(60_000)


def test_a_file_that_cannot_be_used_changes_nothing(
    context: Context, tmp_path: Path, arrives: Arrives, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path / "node", OLD)
    transport = node.transport(context)
    pull = transport.bind(zmq.PULL, "tcp://127.0.0.1:*")
    node.show("short")
    transport.maintain()
    assert "keeping the old cluster keys" in caplog.text
    assert arrives(pull, bound_address(pull, "127.0.0.1"), OLD)


def test_port_used_by_other_process_is_not_shared(context: Context, tmp_path: Path) -> None:
    transport = Node(tmp_path / "node", OLD, NEW).transport(context)
    port = bound_address(transport.bind(zmq.PULL, "tcp://127.0.0.1:*"), "x").rpartition(":")[2]
    with pytest.raises(OSError, match="in use"):
        transport.bind(zmq.PULL, f"tcp://127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        SharedPort(context.socket(zmq.PULL), f"tcp://127.0.0.1:{other.getsockname()[1]}")
