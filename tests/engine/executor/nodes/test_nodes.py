"""A node joins an engine's leader: agreement, worker messages, and termination."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from engine.executor import worker_process
from engine.executor.nodes import joining, leading
from engine.executor.nodes.joining import CannotJoin, JoinedNode
from engine.executor.nodes.leading import NodeLinks, NodesMissing
from engine.executor.nodes.messages import (
    LARGEST_MESSAGE,
    Alive,
    FromLeader,
    FromNode,
    Join,
    Over,
    Piece,
    Refused,
    Start,
)
from engine.executor.nodes.rules import CannotSpan, agreement, difference
from engine.executor.team_messages import WorkerLaunch
from engine.executor.worker_process import StartedWorker
from engine.shared.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
)
from engine.shared.lifeline import FrameReader
from engine.shared.messages import ChildStatus
from engine.shared.transport import Transport, make_context
from engine.shared.version import SWELL_VERSION
from tests.engine.executor.played import Played
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

SILENCE = 2.0


def launch_of(played: Played) -> WorkerLaunch:
    """Return the launch parameters of a worker."""
    reader = FrameReader(WorkerLaunch)
    while True:
        for launch in reader.feed(played.lifeline.recv(65536)):
            assert isinstance(launch, WorkerLaunch)
            return launch


class OtherNode:
    """A joined node in a separate thread, with simulated workers."""

    def __init__(self, config: EngineConfig, timeout: float) -> None:
        self.node = JoinedNode(config, timeout)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except CannotJoin as error:
            self.error = error

    def refusal(self, links: NodeLinks) -> str:
        """Return why the node failed while a leader waits for it."""
        while self.thread.is_alive():
            with contextlib.suppress(NodesMissing):
                links.wait(lambda _: None, 0.1)
        assert self.error is not None
        return str(self.error)

    def close(self) -> None:
        self.node.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    key = tmp_path / "cluster.key"
    key.write_text("one long secret for all")
    return EngineConfig(
        model=ModelConfig(dtype="float32", device="cpu"),
        parallel=ParallelConfig(
            data_parallel_size=1,
            pipeline_parallel_size=2,
            nnodes=2,
            master_addr="127.0.0.1",
            master_port=free_port(),
        ),
        cluster=ClusterConfig(
            cluster_key_file=str(key), engine_timeout=SILENCE, heartbeat_interval=0.2
        ),
    )


def on_node_1(config: EngineConfig, **sections: Any) -> EngineConfig:
    parallel = msgspec.structs.replace(config.parallel, node_rank=1)
    return msgspec.structs.replace(config, **({"parallel": parallel} | sections))


StartNode = Callable[..., OtherNode]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator["SimpleQueue[Played]"]:
    started: SimpleQueue[Played] = SimpleQueue()
    every: list[Played] = []

    def start(lifeline: int, commands: int) -> Played:
        every.append(Played(lifeline, commands))
        started.put(every[-1])
        return every[-1]

    monkeypatch.setattr(worker_process, "spawn", start)
    yield started
    for each in every:
        each.close()


@pytest.fixture
def start_node(workers: "SimpleQueue[Played]") -> Iterator[StartNode]:
    with contextlib.ExitStack() as running:

        def start(config: EngineConfig, timeout: float = PATIENCE) -> OtherNode:
            return running.enter_context(contextlib.closing(OtherNode(config, timeout)))

        yield start


@pytest.fixture
def lead() -> Iterator[Callable[[EngineConfig], NodeLinks]]:
    with contextlib.ExitStack() as made:
        yield lambda config: made.enter_context(contextlib.closing(NodeLinks(config)))


Lead = Callable[[EngineConfig], NodeLinks]


@pytest.fixture
def begun() -> Iterator["Begin"]:
    """Return a function that starts the nodes and returns the worker's handle in its team."""
    made: list[StartedWorker] = []

    def begin(links: NodeLinks) -> StartedWorker:
        links.wait(lambda _: None, PATIENCE)
        made.append(links.worker(1))
        made[-1].lifeline.settimeout(PATIENCE)
        made[-1].commands.settimeout(PATIENCE)
        links.begin(0, "127.0.0.1:4711")
        return made[-1]

    yield begin
    for each in made:
        each.lifeline.close()
        each.commands.close()


Begin = Callable[[NodeLinks], StartedWorker]


class Session(NamedTuple):
    """A leader, a node that has joined it, and the node's worker from both sides."""

    links: NodeLinks
    node: OtherNode
    worker: StartedWorker
    played: Played
    launch: WorkerLaunch


@pytest.fixture
def session(
    config: EngineConfig,
    lead: Lead,
    start_node: StartNode,
    begun: Begin,
    workers: "SimpleQueue[Played]",
) -> Session:
    node = start_node(on_node_1(config))
    links = lead(config)
    worker = begun(links)
    played = workers.get(timeout=PATIENCE)
    return Session(links, node, worker, played, launch_of(played))


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(1 << 16)
        assert more, "closed"
        data += more
    return data


def last_words(worker: StartedWorker) -> str:
    """Return the failure of a worker that its team reads."""
    reader, found = FrameReader(ChildStatus), []
    while data := worker.lifeline.recv(65536):
        found += reader.feed(data)
    return found[0].reason if found else ""


def test_commands_and_replies_of_a_worker_arrive_complete_and_in_order(session: Session) -> None:
    _, _, worker, played, launch = session
    assert (launch.rank, launch.size, launch.address) == (1, 2, "127.0.0.1:4711")
    many = os.urandom(3_000_000)  # more than sockets hold
    telling = threading.Thread(target=worker.commands.sendall, args=(many,))
    telling.start()
    assert read(played.commands, len(many)) == many
    telling.join()
    played.commands.sendall(b"done")
    assert read(worker.commands, 4) == b"done"


def test_node_serves_next_engine(
    config: EngineConfig,
    lead: Lead,
    start_node: StartNode,
    begun: Begin,
    workers: "SimpleQueue[Played]",
) -> None:
    start_node(on_node_1(config))
    first = lead(config)
    begun(first)
    played = workers.get(timeout=PATIENCE)
    launch_of(played)
    first.close()
    assert played.lifeline.recv(1) == b"", "its workers end"
    begun(lead(config))
    launch_of(workers.get(timeout=PATIENCE))


def test_worker_death_and_last_output_reach_leader(session: Session) -> None:
    session.played.close()
    assert last_words(session.worker) == ""
    assert session.worker.commands.recv(1) == b""


def test_stopping_node_notifies_leader(session: Session) -> None:
    session.node.node.stop()
    assert last_words(session.worker) == "node 1 is lost: it was stopped"
    assert session.played.lifeline.recv(1) == b""


def test_silent_node_is_lost_and_its_workers_exit(
    monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    monkeypatch.setattr(session.links, "_handle", lambda *_: None)  # as if nothing arrived
    assert last_words(session.worker) == "node 1 is lost: no message from it for 2 s"
    assert session.played.lifeline.recv(1) == b""


def test_node_ends_workers_when_leader_is_silent(
    config: EngineConfig,
    lead: Lead,
    start_node: StartNode,
    begun: Begin,
    workers: "SimpleQueue[Played]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (leading, joining):
        monkeypatch.setattr(module, "STARTING_PATIENCE", SILENCE)
    start_node(on_node_1(config))
    links = lead(config)
    begun(links)
    played = workers.get(timeout=PATIENCE)
    launch_of(played)
    monkeypatch.setattr(links, "_send", lambda *_: True)
    assert played.lifeline.recv(1) == b""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"cache": CacheConfig(block_size=32)}, "block_size is 16 on the first node but 32 there"),
        ({"model": ModelConfig(dtype="bfloat16", device="cpu")}, "dtype is float32 on the first"),
    ],
)
def test_another_setting_is_refused_by_name_on_both_sides(
    config: EngineConfig,
    lead: Lead,
    start_node: StartNode,
    other: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    links = lead(config)
    assert reason in start_node(on_node_1(config, **other)).refusal(links)
    assert reason in caplog.text


def test_another_layout_is_refused(config: EngineConfig, lead: Lead, start_node: StartNode) -> None:
    parallel = msgspec.structs.replace(config.parallel, node_rank=1, pipeline_parallel_size=4)
    refusal = start_node(on_node_1(config, parallel=parallel)).refusal(lead(config))
    assert "pipeline_parallel_size is 2 on the first node but 4 there" in refusal


def test_another_version_is_refused(
    config: EngineConfig, lead: Lead, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = lead(config)
    monkeypatch.setattr(joining, "SWELL_VERSION", "0.0.9")
    refusal = start_node(on_node_1(config)).refusal(links)
    assert "on the first node but 0.0.9 there" in refusal


def test_wrong_cluster_key_is_reported_on_both_sides(
    config: EngineConfig,
    lead: Lead,
    start_node: StartNode,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = tmp_path / "wrong.key"
    wrong.write_text("another secret, long enough")
    cluster = msgspec.structs.replace(config.cluster, cluster_key_file=str(wrong))
    start_node(on_node_1(config, cluster=cluster))
    links = lead(config)
    for text in ("--cluster-key-file holds another key there", "its cluster key is not ours"):
        while text not in caplog.text:
            with contextlib.suppress(NodesMissing):
                links.wait(lambda _: None, 0.1)


def test_second_node_with_same_number_waits_and_logs_reason(
    config: EngineConfig, session: Session, start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    assert session.launch.rank == 1
    caplog.set_level(logging.INFO)
    start_node(on_node_1(config))
    until(
        lambda: "(node 1 is refused: it, or another with its number, is here)" in caplog.text,
        "it says why",
    )


def test_node_without_engine_gives_up_and_names_what_is_missing(
    config: EngineConfig, start_node: StartNode
) -> None:
    node = start_node(on_node_1(config), 0.1)
    node.thread.join(PATIENCE)
    assert "is the first node (--node-rank 0) there?" in str(node.error)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The greeting of a ZeroMQ connection."""
ENDLESS = b"\x06" + (1 << 40).to_bytes(8)
"""The beginning of a command of as many bytes."""


@pytest.mark.parametrize(
    "data",
    [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n" * 64, GREETING + ENDLESS],
    ids=["noise", "http", "endless"],
)
def test_connection_of_stranger_is_closed_without_effect(
    data: bytes, config: EngineConfig, session: Session
) -> None:
    port = config.parallel.master_port
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger:
        stranger.sendall(data)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    session.played.commands.sendall(b"done")
    assert read(session.worker.commands, 4) == b"done"


class Peer:
    """A peer with the cluster key that sends what a test specifies."""

    def __init__(self, config: EngineConfig) -> None:
        self._context = make_context()
        address = f"tcp://127.0.0.1:{config.parallel.master_port}"
        self.socket = Transport(config.cluster, self._context).connect(zmq.DEALER, address)
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))

    def say(self, *messages: FromNode | bytes) -> None:
        for each in messages:
            self.socket.send(each if isinstance(each, bytes) else msgspec.msgpack.encode(each))

    def hear(self, kind: type[Any]) -> Any:
        """Return the next message of a kind."""
        while not isinstance(
            message := msgspec.msgpack.decode(self.socket.recv(), type=FromLeader), kind
        ):
            pass
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def peer(config: EngineConfig) -> Iterator[Peer]:
    made = Peer(config)
    yield made
    made.close()


def test_repeated_hello_counts_once_and_other_peer_is_ignored(
    config: EngineConfig, lead: Lead, begun: Begin, peer: Peer
) -> None:
    hello = Join(SWELL_VERSION, 1, agreement(config))
    peer.say(hello, hello)
    begun(lead(config))
    start = peer.hear(Start)
    assert (start.engine, start.address) == (0, "127.0.0.1:4711")
    second = Peer(config)
    try:
        second.say(hello)
        assert second.hear(Refused) == Refused(
            "node 1 is refused: it, or another with its number, is here", final=False
        )
        second.say(Piece(start.session, 1, "lifeline", b""))  # pretends to be that node
        assert second.hear(Over).session == start.session
        peer.say(Alive(start.session))
        assert peer.hear(Alive).session == start.session
    finally:
        second.close()


def test_nodes_get_silence_timeout_when_engine_has_started(
    config: EngineConfig, lead: Lead, begun: Begin, peer: Peer
) -> None:
    rarely = msgspec.structs.replace(config.cluster, heartbeat_interval=10 * PATIENCE)
    config = msgspec.structs.replace(config, cluster=rarely)
    peer.say(Join(SWELL_VERSION, 1, agreement(config)))
    links = lead(config)
    begun(links)
    peer.hear(Start)
    links.started()
    while peer.hear(Alive).patience != 10 * PATIENCE:
        pass  # it may have said before that it starts


def test_messages_from_unknown_nodes_are_dropped(
    config: EngineConfig, lead: Lead, begun: Begin, peer: Peer
) -> None:
    peer.say(Join(SWELL_VERSION, 1, agreement(config)))
    worker = begun(lead(config))
    session = peer.hear(Start).session
    peer.say(
        b"", b"\xc1", b"cos\nsystem\n(S'true'\ntR.",  # the last of them is a pickle
        msgspec.msgpack.encode(["Join", 1, 2, 3]),
        msgspec.msgpack.encode(["Piece", session, 1, "standard input", b"x"]),
        Piece(session, 0, "commands", b"of the leader itself"),
        Piece(session, 1 << 60, "commands", b"of nobody"),
        Piece(session + 1, 1, "commands", b"of another session"),
        Piece(session, 1, "commands", b"answer"),
    )  # fmt: skip
    assert read(worker.commands, 6) == b"answer"
    peer.say(b"x" * (2 * LARGEST_MESSAGE))
    assert last_words(worker) == "node 1 is lost: its connection was closed"


def test_engine_names_missing_nodes_and_gives_advice(config: EngineConfig, lead: Lead) -> None:
    messages: list[str] = []
    with pytest.raises(NodesMissing, match="same command with --node-rank 1 there"):
        lead(config).wait(messages.append, 0.3)
    where = f"127.0.0.1:{config.parallel.master_port}"
    assert messages == [
        f"waiting for node 1 to join at {where}: run the same command with --node-rank 1 there"
    ]


def test_different_model_contents_are_detected_and_simulated_engines_cannot_span_nodes(
    config: EngineConfig,
) -> None:
    local = agreement(config)
    assert difference(local, local) is None
    remote = local | {"config.json of the model": "0"}
    assert "config.json of the model" in (difference(local, remote) or "")
    assert "later is not known on the first node" in (
        difference(local, local | {"later": "1"}) or ""
    )
    simulated = ExecutorConfig(executor="simulated")
    with pytest.raises(CannotSpan, match="--executor model"):
        agreement(msgspec.structs.replace(config, executor=simulated))
