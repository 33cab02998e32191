"""Peers with a different cluster key are logged on both sides, and only there."""

import time
from pathlib import Path

import pytest
import zmq

from engine.shared.config import ClusterConfig
from engine.shared.transport import HandshakeWatch, Transport, bound_address

Context = zmq.Context["zmq.Socket[bytes]"]


def transport(directory: Path, secret: str, context: Context) -> Transport:
    key = directory / secret
    key.write_text(secret.ljust(32, "-"))
    return Transport(ClusterConfig(cluster_key_file=str(key)), context)


def until_checked(watch: HandshakeWatch, failures: int) -> None:
    deadline = time.monotonic() + 60
    while watch.failures < failures:
        assert watch.socket.poll(max(0, int(1000 * (deadline - time.monotonic()))))
        watch.check()


def test_wrong_key_is_logged_on_both_sides_without_other_effect(
    tmp_path: Path, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = transport(tmp_path, "a", context), transport(tmp_path, "b", context)
    binder = ours.bind(zmq.PULL, "tcp://127.0.0.1:*")
    address = bound_address(binder, "127.0.0.1")
    at_binder = ours.watch(binder, address, binder=True)
    stranger = theirs.connect(zmq.PUSH, address)
    at_stranger = theirs.watch(stranger, address, binder=False)
    assert at_binder is not None
    assert at_stranger is not None
    stranger.send(b"let me in")
    until_checked(at_binder, 3)
    until_checked(at_stranger, 1)
    refused = [line for line in caplog.messages if "its cluster key is not ours" in line]
    assert len(refused) == 1, "a peer that keeps trying must not fill the log"
    assert any("--cluster-key-file holds another key" in line for line in caplog.messages)
    ours.connect(zmq.PUSH, address).send(b"from a friend")
    assert binder.poll(60_000)
    assert binder.recv() == b"from a friend"
    for watch in (at_binder, at_stranger):
        watch.socket.close(linger=0)


def test_handshakes_are_not_watched_without_keys(tmp_path: Path, context: Context) -> None:
    local = Transport(ClusterConfig(), context)
    address = f"ipc://{tmp_path}/socket"
    assert local.watch(local.bind(zmq.PULL, address), address, binder=True) is None
