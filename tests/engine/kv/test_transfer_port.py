"""KV block sockets with peers that are silent, malicious, slow or disconnected."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from engine.kv import transfer_port as module
from engine.kv.tiers import BlockName
from engine.kv.transfer_messages import BlockFound, BlocksWanted, checksum, decode_wanted, pack
from engine.kv.transfer_port import BlockPort
from engine.shared.config import ClusterConfig
from engine.shared.messages import EngineCounters, KvSource, encode
from engine.shared.transport import Transport, make_context
from tests.support.waiting import PATIENCE, until

MODEL = b"m" * 16
NAMES: list[BlockName] = [(0, bytes([n]) * 16) for n in range(100)]
SIZE = 1000


def content_of(name: BlockName) -> bytes:
    return pack(name)[:10] * (SIZE // 10)


class Pulled:
    """The result of a pull."""

    def __init__(self) -> None:
        self.blocks: list[tuple[BlockName, bytes]] = []
        self.most = len(NAMES)
        self.is_over = threading.Event()
        self.has_all = False

    def take(self, name: BlockName, content: bytes) -> bool:
        self.blocks.append((name, content))
        return len(self.blocks) < self.most

    def over(self, has_all: bool) -> None:
        self.has_all = has_all
        self.is_over.set()


class Ports:
    """Creates ports on one context, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = make_context()
        self._opened: list[BlockPort] = []
        self.counters: dict[int, EngineCounters] = {}

    def open(self, incarnation: int, *, max_bytes: int = 1 << 20) -> BlockPort:
        counters = self.counters[incarnation] = EngineCounters()
        port = BlockPort(
            Transport(ClusterConfig(coordinator="ipc:///x"), self.context),
            self.source(incarnation).address,
            incarnation=incarnation,
            block_bytes=SIZE,
            max_offered_bytes=max_bytes,
            counters=counters,
        )
        port.start()
        self._opened.append(port)
        return port

    def source(self, incarnation: int) -> KvSource:
        return KvSource(f"ipc://{self._directory}/{incarnation}", incarnation)

    def pull(self, port: BlockPort, source: KvSource, names: list[BlockName]) -> Pulled:
        pulled = Pulled()
        port.pull(source, MODEL, names, pulled.take, pulled.over)
        return pulled

    def close(self) -> None:
        for port in self._opened:
            port.shutdown()
        self.context.destroy(linger=0)


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[Ports]:
    made = Ports(tmp_path)
    yield made
    made.close()


def offer(port: BlockPort, names: list[BlockName]) -> None:
    for name in names:
        port.offer(MODEL + pack(name), lambda name=name: content_of(name))  # type: ignore[misc]


def test_all_blocks_arrive_in_order_and_are_then_dropped(ports: Ports) -> None:
    giving, taking = ports.open(1), ports.open(2)
    offer(giving, NAMES)
    pulled = ports.pull(taking, ports.source(1), NAMES)
    assert pulled.is_over.wait(PATIENCE)
    assert pulled.has_all
    assert pulled.blocks == [(name, content_of(name)) for name in NAMES]
    assert giving._offers.num_bytes == 0


def test_concurrent_pulls_complete_without_mixing(ports: Ports) -> None:
    giving, taking = ports.open(1), ports.open(2)
    shares = [NAMES[n::10] for n in range(10)]
    for share in shares:
        offer(giving, share)
    pulls = [ports.pull(taking, ports.source(1), share) for share in shares]
    for pulled, share in zip(pulls, shares, strict=True):
        assert pulled.is_over.wait(PATIENCE)
        assert [name for name, _ in pulled.blocks] == share


def test_a_consumer_that_stops_early_gets_no_more_blocks(ports: Ports) -> None:
    giving, taking = ports.open(1), ports.open(2)
    offer(giving, NAMES)
    pulled = Pulled()
    pulled.most = 3
    taking.pull(ports.source(1), MODEL, NAMES, pulled.take, pulled.over)
    assert pulled.is_over.wait(PATIENCE)
    assert (len(pulled.blocks), pulled.has_all) == (3, False)


def test_closed_port_has_no_blocks(ports: Ports) -> None:
    taking = ports.open(2)
    silent = ports.context.socket(zmq.ROUTER)
    silent.bind(ports.source(1).address)
    before = ports.pull(taking, ports.source(1), NAMES)
    taking.shutdown()
    after = ports.pull(taking, ports.source(1), NAMES)
    for pulled in (before, after):
        assert pulled.is_over.is_set()
        assert not pulled.has_all
    silent.close(linger=0)


def test_no_pull_waits_for_a_thread_that_has_failed(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = ports.open(2)
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())

    def fail(_: bool) -> None:
        raise RuntimeError("a bug")

    taking.pull(ports.source(1), MODEL, NAMES, lambda *_: True, fail)
    assert failed.wait(PATIENCE)
    pulled = ports.pull(taking, ports.source(1), NAMES)
    assert pulled.is_over.wait(PATIENCE)


def test_offers_without_readers_expire(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OFFER_SECONDS", 0.1)
    giving = ports.open(1)
    offer(giving, NAMES)
    until(lambda: giving._offers.num_bytes == 0, "they are forgotten")
    assert ports.counters[1].kv_transfer_dropped_blocks == len(NAMES)


def test_absent_peer_is_detected_immediately(ports: Ports) -> None:
    pulled = ports.pull(ports.open(2), ports.source(1), NAMES)
    assert pulled.is_over.wait(PATIENCE)
    assert not pulled.has_all


def test_silent_peer_is_given_up_and_its_late_blocks_are_ignored(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    silent = ports.context.socket(zmq.ROUTER)
    silent.bind(ports.source(1).address)
    taking = ports.open(2)
    pulled = ports.pull(taking, ports.source(1), NAMES)
    assert pulled.is_over.wait(PATIENCE)
    assert pulled.blocks == []
    peer, question = silent.recv_multipart()
    answers(decode_wanted(question), peer, silent.send_multipart)
    again = ports.pull(taking, ports.source(1), NAMES[:1])
    assert again.is_over.wait(PATIENCE)
    assert again.blocks == []
    silent.close(linger=0)
    assert ports.counters[2].kv_transfer_failures == 2


def test_peer_dying_during_transfer_is_detected_immediately(ports: Ports) -> None:
    dying = ports.context.socket(zmq.ROUTER)
    dying.bind(ports.source(1).address)
    pulled = ports.pull(ports.open(2), ports.source(1), NAMES)
    peer, question = dying.recv_multipart()
    wanted = decode_wanted(question)
    answers(BlocksWanted(1, MODEL, wanted.pull, wanted.names[:5]), peer, dying.send_multipart)
    until(lambda: len(pulled.blocks) == 5, "some blocks have come")
    dying.close(linger=0)
    assert pulled.is_over.wait(PATIENCE)
    assert not pulled.has_all


def answers(wanted: BlocksWanted, peer: bytes, send: Callable[[list[bytes]], object]) -> None:
    for name in wanted.names:
        content = content_of((name[0], name[1:]))
        digest = checksum(MODEL + name, content)
        send([peer, encode(BlockFound(wanted.pull, name, digest)), content])


@pytest.mark.parametrize("fault", ["damaged", "another block", "too short", "of another model"])
def test_corrupt_content_and_all_after_it_are_rejected(ports: Ports, fault: str) -> None:
    lying = ports.context.socket(zmq.ROUTER)
    lying.bind(ports.source(1).address)
    pulled = ports.pull(ports.open(2), ports.source(1), NAMES)
    peer, question = lying.recv_multipart()
    wanted = decode_wanted(question)
    for place, name in enumerate(wanted.names):
        key, content = MODEL + name, content_of((name[0], name[1:]))
        if place == 2:
            match fault:
                case "damaged":
                    digest, content = checksum(key, content), content[:-1] + b"?"
                case "another block":
                    content = content_of(NAMES[50])
                    digest = checksum(MODEL + pack(NAMES[50]), content)
                case "too short":
                    content = content[:10]
                    digest = checksum(key, content)
                case _:
                    digest = checksum(b"n" * 16 + name, content)
        else:
            digest = checksum(key, content)
        lying.send_multipart([peer, encode(BlockFound(wanted.pull, name, digest)), content])
    assert pulled.is_over.wait(PATIENCE)
    assert pulled.blocks == [(name, content_of(name)) for name in NAMES[:2]]
    assert not pulled.has_all
    lying.close(linger=0)


def test_malformed_messages_from_strangers_are_harmless(ports: Ports) -> None:
    giving, taking = ports.open(1), ports.open(2)
    offer(giving, NAMES)
    stranger = ports.context.socket(zmq.DEALER)
    stranger.connect(ports.source(1).address)
    too_many = BlocksWanted(1, MODEL, 1, [pack(NAMES[0])] * 65)
    no_text = encode(BlocksWanted(1, MODEL, 1, [])).replace(b"BlocksWanted", b"\xff" * 12)
    for frames in ([b""], [no_text], [b"nonsense", b"m"], [encode(too_many)], [bytes(1 << 20)]):
        stranger.send_multipart(frames)
    pulled = ports.pull(taking, ports.source(1), NAMES)
    assert pulled.is_over.wait(PATIENCE)
    assert pulled.has_all
    stranger.close(linger=0)
