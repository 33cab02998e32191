"""KV block events on sockets: settings, a subscriber, a gap, and unauthorized peers."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from engine.kv.event_publisher import (
    BadKvEvents,
    KvEventPublisher,
    KvEventSettings,
    check_events,
    endpoint_of,
    read_settings,
)
from engine.kv.events import AllBlocksCleared, BlockStored, Event
from engine.shared.config import CacheConfig, ClusterConfig, EngineConfig
from engine.shared.transport import Transport, make_context
from tests.engine.kv.test_event_journal import decoded
from tests.support.waiting import until

EVENT = BlockStored([b"a" * 16], None, [1, 2], 2, None, "CPU", None, None, 0)
TIMEOUT_MS = 20_000
END = b"\xff" * 8


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = make_context()
    yield context
    context.destroy(linger=0)


@contextmanager
def connected(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str
) -> Iterator["zmq.Socket[bytes]"]:
    with context.socket(kind) as socket:
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(address)
        yield socket


def test_subscriber_gets_batches_and_replays_missed_ones(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: object
) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    settings = KvEventSettings(endpoint=events, replay_endpoint=replay, topic="kv@pod")
    publisher = KvEventPublisher(settings, 0, Transport(ClusterConfig(), context))
    try:
        with (
            connected(context, zmq.SUB, events) as subscriber,
            connected(context, zmq.DEALER, replay) as asking,
        ):

            def hears() -> int:
                publisher.publish([EVENT])
                return subscriber.poll(20)

            until(hears, "it has subscribed")
            topic, first, content = subscriber.recv_multipart()
            assert topic == b"kv@pod"
            assert decoded(content).events in ([AllBlocksCleared()], [EVENT])
            asking.send_multipart([b"", bytes(8)])
            missed: list[list[Event]] = []
            while (frames := asking.recv_multipart())[1] != END:
                assert int.from_bytes(frames[1], "big") == len(missed)
                missed.append(decoded(frames[2]).events)
        assert missed[0] == [AllBlocksCleared()]
        assert int.from_bytes(first, "big") < len(missed)
    finally:
        publisher.shutdown()
        publisher.shutdown()


def test_malformed_requests_are_dropped(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: object
) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    settings = KvEventSettings(endpoint=events, replay_endpoint=replay)
    publisher = KvEventPublisher(settings, 0, Transport(ClusterConfig(), context))
    try:
        with connected(context, zmq.DEALER, replay) as asking:
            asking.send_multipart([b"not empty", bytes(8)])
            asking.send_multipart([b"", b"short"])
            asking.send(b"")
            asking.send_multipart([b"", bytes(8)])
            _, number, content = asking.recv_multipart()
            assert int.from_bytes(number, "big") == 0
            assert decoded(content).events == [AllBlocksCleared()]
            assert asking.recv_multipart() == [b"", END, b""]
    finally:
        publisher.shutdown()


def test_tcp_needs_the_cluster_key_since_events_contain_prompts(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    settings = KvEventSettings(endpoint="tcp://127.0.0.1:0")
    with pytest.raises(BadKvEvents, match="--cluster-key-file"):
        KvEventPublisher(settings, 0, Transport(ClusterConfig(), context))


def test_port_in_use_is_named(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    with context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        settings = KvEventSettings(endpoint=f"tcp://127.0.0.1:{port - 2}")
        with pytest.raises(BadKvEvents, match=str(port)):
            KvEventPublisher(settings, 2, Transport(ClusterConfig(insecure_cluster=True), context))


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
    ],
)
def test_each_engine_has_its_own_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["udp://*:1", "tcp://host", "inproc://kv"])
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(BadKvEvents, match="--kv-events-config"):
        endpoint_of(endpoint, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "--kv-events-config"),
        ("[]", "--kv-events-config"),
        ('{"endpoints": "tcp://*:1"}', "endpoints"),
        ('{"publisher": "nats"}', "nats"),
        ('{"buffer_steps": 0}', "buffer_steps"),
    ],
)
def test_wrong_settings_are_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(BadKvEvents, match=reason):
        read_settings(text)


def test_events_can_be_disabled() -> None:
    assert read_settings(None) is None
    assert read_settings('{"enable_kv_cache_events": false}') is None
    assert read_settings('{"publisher": "null"}') is None
    assert read_settings("{}") == KvEventSettings()


def test_engines_without_prefix_cache_publish_no_events() -> None:
    config = EngineConfig(cache=CacheConfig(kv_events_config="{}"))
    check_events(config, pools=False)
    with pytest.raises(BadKvEvents, match="generates"):
        check_events(config, pools=True)
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    with pytest.raises(BadKvEvents, match="--no-enable-prefix-caching"):
        check_events(msgspec.structs.replace(config, cache=cache), pools=False)
