"""Sockets of an engine's shells, over the simulated network.

`Transport` replaces `engine.shared.transport.Transport`: its addresses are those that the simulated
coordinator and front ends use. Messages are encoded in transit, as in production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.shared.messages import (
    EngineOutput,
    EngineReport,
    EngineStats,
    MemberMessage,
    RouteHello,
    UtilityResult,
)

if TYPE_CHECKING:
    from tests.faults.engine import Engine
    from tests.faults.front import Front

HUB, ORDERS, REPORTS = "hub", "back", "output"
"""Addresses of the coordinator's sockets. Those of a front end are `requests-N` and `outputs-N`,
with its incarnation."""

_to_hub = msgspec.msgpack.Decoder(MemberMessage)
_hello = msgspec.msgpack.Decoder(RouteHello)
_output = msgspec.msgpack.Decoder(EngineOutput)
_report = msgspec.msgpack.Decoder(EngineReport)


class Socket:
    """A socket: `write` is called with sent frames, `put` adds received ones."""

    socket_type = zmq.DEALER

    def __init__(
        self, write: Callable[[bytes], None], on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.send = write
        self.closed = False
        self._on_close = on_close
        self._arrived: deque[bytes] = deque()

    def put(self, frame: bytes) -> None:
        self._arrived.append(frame)

    def recv(self) -> bytes:
        return self._arrived.popleft()

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._arrived:
            raise zmq.Again
        return [self._arrived.popleft()]

    def close(self, linger: int = 0) -> None:
        self.closed = True
        self._on_close()

    def bind(self, address: str) -> None:
        """Do nothing: a control pair is connected through its context."""

    connect = bind


class Context:
    """Creates the two ends of a receiver's control pair: messages arrive immediately."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        self._ends.append(Socket(self._wake))
        return self._ends[-1]

    def _wake(self, frame: bytes) -> None:
        self._engine.arrived(self._ends[1], frame)


class Line(Socket):
    """An engine's connection to a front end's request socket."""

    def __init__(self, engine: Engine, front: Front, identity: bytes) -> None:
        super().__init__(self._greet, self._leave)
        self.engine = engine
        self.front = front
        self.up = True
        """Whether the front end's socket knows the peer."""
        self._identity = identity

    def _greet(self, frame: bytes) -> None:
        hello = _hello.decode(frame)
        front = self.front
        self.engine.send(front, "hellos", front.greeting_arrived, self._identity, self, hello)

    def _leave(self) -> None:
        self.engine.send(self.front, "closing", setattr, self, "up", False)


class Transport:
    """Connects the sockets of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def watch(self, *socket: object, binder: bool) -> None:
        """Do nothing: failed encryption handshakes are not simulated."""

    def connect(self, kind: int, address: str, *, identity: bytes = b"") -> Socket:
        engine = self._engine
        world, hub = engine.world, engine.world.hub
        place, _, number = address.partition("-")
        match place:
            case "hub":
                engine.registration = Socket(
                    lambda frame: world.to_hub(engine, _to_hub.decode(frame))
                )
                return engine.registration
            case "back":
                engine.orders = Socket(
                    lambda _: engine.send(hub, "subscription", hub.subscribed, "engine")
                )
                return engine.orders
            case "output":
                return Socket(self._report)
            case "requests":
                line = Line(engine, world.front_process(int(number)), identity)
                engine.lines.append(line)
                return line
            case "outputs":
                front = world.front_process(int(number))
                return Socket(lambda frame: self._say(front, frame))
        raise ValueError(address)

    def _say(self, front: Front, frame: bytes) -> None:
        output = _output.decode(frame)
        if not isinstance(output, UtilityResult):  # its operator does not wait for it
            self._engine.send(front, "outputs", front.output_arrived, output)

    def _report(self, frame: bytes) -> None:
        report = _report.decode(frame)
        assert isinstance(report, EngineStats)
        self._engine.world.stats_to_hub(self._engine, report)
