"""Engine messages are sent at once, from any thread, and stats are never lost."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.core.front_ends import CoreStep
from engine.core.sender import LATE_INTERVAL, Sender, StatsThrottle
from engine.shared.config import ClusterConfig
from engine.shared.messages import (
    EngineDead,
    EngineStats,
    RequestOutput,
    StepOutputs,
)
from engine.shared.transport import Inbox, Transport
from engine.shared.version import PROTOCOL_VERSION
from tests.support.waiting import PATIENCE, until

Context = zmq.Context[zmq.Socket[bytes]]
Pull = zmq.Socket[bytes]


def stats(step: int, running: int = 1) -> EngineStats:
    return EngineStats(0, 1, step, 0, step, 0, running, 0.0, 0)


@pytest.fixture
def transport(context: Context) -> Transport:
    return Transport(ClusterConfig(), context)


@pytest.fixture
def sender(transport: Transport) -> Iterator[Sender]:
    made = Sender(transport)
    made.start()
    yield made
    made.stop()


def listen(transport: Transport, address: str) -> Pull:
    return transport.bind(zmq.PULL, address)


def received(pull: Pull, kind: type) -> object:
    assert pull.poll(60_000), "nothing came"
    return msgspec.msgpack.decode(pull.recv(), type=kind)


def wake_ups(sender: Sender) -> int:
    """Return the number of voluntary context switches of its thread."""
    status = Path(f"/proc/self/task/{sender._thread.native_id}/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def test_outputs_are_sent_before_send_step_returns(sender: Sender, transport: Transport) -> None:
    pulls = [listen(transport, f"inproc://front-end-{i}") for i in range(2)]
    for index in range(2):
        sender.connect_front_end(index, f"inproc://front-end-{index}", PROTOCOL_VERSION)
    outputs = {i: [RequestOutput(i, [7])] for i in range(2)}
    sender.send_step(CoreStep(outputs, [], stats(1)))
    for index, pull in enumerate(pulls):
        assert pull.poll(0), "inproc delivers at once"
        message = received(pull, StepOutputs)
        assert message == StepOutputs(stats(1), outputs[index])


def test_large_outputs_are_sent_in_frames_if_supported(
    sender: Sender, transport: Transport, tmp_path: Path
) -> None:
    vector = bytes(range(256)) * 4 * 5000
    message = StepOutputs(stats(1), [RequestOutput(1, [], pooled=vector)])
    for index, protocol in enumerate((PROTOCOL_VERSION, PROTOCOL_VERSION - 1)):
        address = f"ipc://{tmp_path}/{index}"
        pull = transport.bind(zmq.PULL, address, largest=16 << 20)
        sender.connect_front_end(index, address, protocol)
        sender.send_step(CoreStep({index: message.outputs}, [], stats(1)))
        assert pull.poll(60_000)
        if protocol == PROTOCOL_VERSION:
            assert Inbox(pull, StepOutputs, "test").receive() == (b"", message)
        else:
            assert msgspec.msgpack.decode(pull.recv(), type=StepOutputs) == message


def test_messages_to_departed_front_end_are_dropped(sender: Sender, transport: Transport) -> None:
    pull = listen(transport, "inproc://front-end")
    sender.connect_front_end(0, "inproc://front-end", PROTOCOL_VERSION)
    sender.disconnect_front_end(0)
    sender.send_step(CoreStep({0: [RequestOutput(1, [7])]}, [], stats(1)))
    assert not pull.poll(50)


def test_held_back_stats_are_sent_during_long_step(sender: Sender, transport: Transport) -> None:
    coordinator = listen(transport, "inproc://coordinator")
    sender.connect_coordinator("inproc://coordinator")
    sender.send_step(CoreStep({}, [], stats(1)))
    sender.send_step(CoreStep({}, [], stats(2)))
    assert received(coordinator, EngineStats) == stats(1)
    assert received(coordinator, EngineStats) == stats(2)


def test_sender_without_held_back_stats_sleeps_and_sends_later_ones(
    sender: Sender, transport: Transport
) -> None:
    coordinator = listen(transport, "inproc://coordinator")
    sender.connect_coordinator("inproc://coordinator")

    def sleeps() -> bool:
        before = wake_ups(sender)
        time.sleep(4 * LATE_INTERVAL)
        return wake_ups(sender) == before

    for step in (1, 3):
        sender.send_step(CoreStep({}, [], stats(step)))
        sender.send_step(CoreStep({}, [], stats(step + 1)))
        assert received(coordinator, EngineStats) == stats(step)
        assert received(coordinator, EngineStats) == stats(step + 1)
        until(sleeps, "it finds that nothing is held any more")


def test_stopping_sends_the_newest_stats(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.sender.STATS_INTERVAL", PATIENCE)
    coordinator = listen(transport, "inproc://coordinator")
    sender = Sender(transport)
    sender.start()
    sender.connect_coordinator("inproc://coordinator")
    for step in (1, 2, 3):
        sender.send_step(CoreStep({}, [], stats(step)))
    sender.stop()
    assert received(coordinator, EngineStats) == stats(1)
    assert received(coordinator, EngineStats) == stats(3)


def test_stopping_sender_without_held_back_stats_ends_its_thread(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(transport)
    stopping = threading.Thread(target=sender.stop)
    late: list[threading.Thread] = []

    def holds(throttle: StatsThrottle) -> bool:
        if threading.current_thread().name == "late-stats" and not late:
            stopping.start()
            late.append(threading.current_thread())
            stopping.join(0.2)
            return False
        return True

    monkeypatch.setattr(StatsThrottle, "has_pending", property(holds))
    sender.start()
    sender.send_step(CoreStep({}, [], stats(1)))
    until(lambda: bool(late), "the thread looks for what is held")
    stopping.join(PATIENCE)
    assert not late[0].is_alive()


def test_start_of_work_is_reported_immediately_and_end_on_second_stats() -> None:
    throttle, idle, busy = StatsThrottle(1.0), stats(1, running=0), stats(2)
    assert throttle.offer(idle, 0.0) == idle
    assert throttle.offer(busy, 0.1) == busy
    assert throttle.offer(idle, 0.2) is None
    assert throttle.offer(idle, 0.3) == idle


def test_frequent_short_work_is_reported_periodically() -> None:
    throttle, idle, busy = StatsThrottle(1.0), stats(1, running=0), stats(2)
    offers = [busy, idle] * 50
    sent = [each for i, each in enumerate(offers) if throttle.offer(each, i / 20) is not None]
    assert len(sent) == 5
    assert throttle.has_pending
    assert throttle.take(6.0) == idle
    assert throttle.offer(busy, 6.1) == busy, "the end was told at last"


def test_several_threads_can_send_at_once(sender: Sender, transport: Transport) -> None:
    pull = listen(transport, "inproc://front-end")
    sender.connect_front_end(0, "inproc://front-end", PROTOCOL_VERSION)

    def speak(first: int) -> None:
        for id_ in range(first, first + 200):
            sender.send_step(CoreStep({0: [RequestOutput(id_, [1])]}, [], stats(id_)))

    threads = [threading.Thread(target=speak, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    ids = []
    while pull.poll(50):
        message = msgspec.msgpack.decode(pull.recv(), type=StepOutputs)
        ids += [output.id for output in message.outputs]
    assert sorted(ids) == sorted(1000 * i + k for i in range(4) for k in range(200))


def test_unsendable_item_does_not_stop_later_messages(sender: Sender, transport: Transport) -> None:
    pull = listen(transport, "inproc://front-end")
    sender.connect_front_end(0, "inproc://front-end", PROTOCOL_VERSION)
    sender.connect_front_end(1, "nonsense", PROTOCOL_VERSION)
    dead = EngineDead(0, 1, "a step failed")
    sender.send_failure(dead)
    assert received(pull, EngineDead) == dead
