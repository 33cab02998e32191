"""The coordinator process: sockets and clock around `coordinator.groups`."""

import contextlib
import logging
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from coordinator.config import CoordinatorLaunch
from coordinator.events import (
    Action,
    Event,
    FromMember,
    Notice,
    PublishOrder,
    PublishView,
    Reply,
    Subscribed,
    Tick,
)
from coordinator.groups import EngineGroups
from coordinator.state import CoordinatorParameters
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.cpu.machine import bind_process
from engine.shared.health import Health, serve_health
from engine.shared.lifeline import CANNOT_START, Lifeline
from engine.shared.logs import name_process
from engine.shared.messages import (
    EngineReport,
    FrontEndNotice,
    MemberMessage,
    NodeReport,
    ProcessEntry,
    encode,
)
from engine.shared.process_state import end_signals, freeze_heap, process_use
from engine.shared.scope import node_name
from engine.shared.transport import (
    Inbox,
    Transport,
    advertised_host,
    bound_address,
    make_context,
)
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION
from engine.shared.watched_file import WatchedFile

logger = logging.getLogger(__name__)

_SUBSCRIBE = b"\x01"

_MAX_MESSAGES_PER_POLL = 1000
"""Maximum messages read from a socket before the other sockets are served."""

_MAINTENANCE_INTERVAL = 1.0
"""Seconds between checks that the files of local sockets still exist."""


def socket_addresses(registration: str) -> tuple[str, str, str]:
    """Return the addresses for front publish, back output and back publish.

    They derive from the registration address, so that members find a restarted coordinator: the
    next three TCP ports, or sibling paths.
    """
    if registration.startswith("tcp://"):
        host, port = registration.rsplit(":", 1)
        first, second, third = (f"{host}:{int(port) + offset}" for offset in (1, 2, 3))
        return first, second, third
    return f"{registration}-front", f"{registration}-output", f"{registration}-back"


class Coordinator:
    """Owns the four sockets; all decisions are made by `EngineGroups`."""

    def __init__(
        self,
        launch: CoordinatorLaunch,
        transport: Transport,
    ) -> None:
        config = launch.config
        self._transport = transport
        registration = config.cluster.coordinator_address
        front, output, back = socket_addresses(registration)
        self.registration = transport.bind(zmq.ROUTER, registration)
        self.front = transport.bind(zmq.XPUB, front)
        self.output = transport.bind(zmq.PULL, output)
        self.back = transport.bind(zmq.XPUB, back)
        self._handshakes = transport.watch(self.registration, registration, binder=True)
        # Deliver repeated subscriptions too: each one is from a newcomer that needs the state.
        self.front.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.back.setsockopt(zmq.XPUB_VERBOSE, 1)
        host = advertised_host(config.cluster)
        self._process = ProcessEntry(
            "coordinator", node_name(config.cluster), SWELL_VERSION, PROTOCOL_VERSION, None
        )
        file = config.publish.expected_engines_file
        self._expected_file = None if file is None else WatchedFile(file)
        self.state = EngineGroups(
            CoordinatorParameters(
                epoch=secrets.randbits(48),
                front_publish=bound_address(self.front, host),
                back_publish=bound_address(self.back, host),
                back_output=bound_address(self.output, host),
                publish_interval=config.publish.publish_interval,
                publish_idle_interval=config.publish.publish_idle_interval,
                member_timeout=config.cluster.engine_timeout,
                has_predecessors=launch.has_predecessors,
                planned_engines=launch.planned_engines,
            ),
            config.publish.expected,
            config.cluster.engine_group,
        )
        self._members = Inbox(self.registration, MemberMessage | NodeReport, "registration")
        self._reports = Inbox(self.output, EngineReport, "back output")
        self._notices = Inbox(self.front, FrontEndNotice, "front publish")

    def run(self, health: Health, lifeline: Lifeline) -> None:
        """Serve until a signal raises SystemExit."""
        poller = zmq.Poller()
        for socket in (self.registration, self.front, self.output, self.back):
            poller.register(socket, zmq.POLLIN)
        if self._handshakes is not None:
            poller.register(self._handshakes.socket, zmq.POLLIN)
        maintain_at = time.monotonic()
        while True:
            health.record_iteration()
            now = time.monotonic()
            if now >= maintain_at:
                self._transport.maintain()
                lifeline.heartbeat()
                self.state.descriptors = self._transport.descriptors
                use = process_use(self._transport.descriptors)
                self.state.process = msgspec.structs.replace(self._process, use=use)
                if self._expected_file is not None and self._expected_file.changed():
                    try:
                        self.state.reload_expected()
                        logger.info("reloaded the number of expected engines")
                    except (OSError, ValueError) as error:
                        logger.error("keeping the old number of expected engines: %s", error)
                maintain_at = now + _MAINTENANCE_INTERVAL
            wait = max(0.0, min(self.state.next_deadline(now), maintain_at) - now)
            readable = dict(poller.poll(int(wait * 1000) + 1))
            if self._handshakes is not None and self._handshakes.socket in readable:
                self._handshakes.check()
            for event in self._events(readable):
                self._apply(self.state.handle(event, time.monotonic()))
            self._apply(self.state.handle(Tick(), time.monotonic()))

    def _events(self, readable: dict[object, int]) -> Iterator[Event]:
        if self.registration in readable:
            yield from (FromMember(*each) for each in _received(self._members))
        if self.output in readable:
            yield from (report for _, report in _received(self._reports))
        if self.front in readable:
            for frame in _frames(self.front):
                if frame[:1] == _SUBSCRIBE:
                    yield Subscribed("front_end")
                elif frame[:1] != b"\0" and (notice := self._notices.decode(frame)) is not None:
                    yield notice
        if self.back in readable and _SUBSCRIBE in [frame[:1] for frame in _frames(self.back)]:
            yield Subscribed("engine")

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(to, message):
                    self.registration.send_multipart([to, encode(message)])
                case PublishView():
                    self.front.send(encode(action.message))
                case PublishOrder(order):
                    self.back.send(encode(order))
                case Notice(text):
                    logger.info("%s", text)

    def close(self) -> None:
        """Close all sockets; 200 ms of linger lets the last messages leave."""
        if self._handshakes is not None:
            self._handshakes.socket.close(linger=0)
        for socket in (self.registration, self.front, self.output, self.back):
            socket.close(linger=200)


def _frames(socket: "zmq.Socket[bytes]") -> Iterator[bytes]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv(zmq.NOBLOCK)


def _received(inbox: Inbox) -> Iterator[tuple[bytes, Any]]:
    """Yield pending messages, at most `_MAX_MESSAGES_PER_POLL` so that other sockets are served."""
    for _ in range(_MAX_MESSAGES_PER_POLL):
        received = inbox.receive()
        if received is None:
            return
        yield received


def run(launch: CoordinatorLaunch, lifeline: Lifeline) -> int:
    """Run a coordinator until a signal arrives and return the exit code."""
    config = launch.config
    bind_process(launch.cpus)
    name_process("coordinator", config.log.log_level, config.log.log_format)
    for signum in end_signals():
        signal.signal(signum, lambda *_: sys.exit(0))
    lifeline.watch()
    context: zmq.Context[zmq.Socket[bytes]] = make_context()
    health = Health(config.health.stall_timeout)
    try:
        serve_health(config.health, health)
        transport = Transport(config.cluster, context)
        coordinator = Coordinator(launch, transport)
    except (InsecureCluster, OSError, ValueError, zmq.ZMQError) as error:
        lifeline.failed(f"cannot listen on {config.cluster.coordinator_address}: {error}")
        return CANNOT_START
    freeze_heap()
    try:
        lifeline.ready(f"listening on {config.cluster.coordinator_address}")
        health.ready()
        coordinator.run(health, lifeline)
    finally:
        coordinator.close()
        context.term()
    return 0
