"""An engine's KV block port in virtual time: the production class without its thread."""

from __future__ import annotations

import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from engine.kv.tiers import BlockName
from engine.shared.messages import EngineCounters, KvSource
from tests.support.checked_executor import CheckedExecutor

if TYPE_CHECKING:
    from tests.faults.engine import Engine

SCHEME = "blocks-"
"""Prefix of an engine's block address, before its incarnation."""
OFFERED_BLOCKS = 12
"""Maximum number of offered blocks."""
_NOTICED = 0.001
"""Seconds until the end of a connection is noticed at its other end."""


class BlockSocket:
    """A socket, its monitor, or an engine's bound socket; messages have several frames."""

    def __init__(self, blocks: Blocks, write: Callable[[list[bytes]], None]) -> None:
        self.blocks = blocks
        self.peer: Engine | None = None
        """The engine that it is connected to."""
        self.closed = False
        self.monitor: BlockSocket | None = None
        self._write = write
        self._arrived: deque[list[bytes]] = deque()

    def put(self, frames: list[bytes]) -> None:
        if not self.closed:
            self._arrived.append(frames)
            self.blocks.run_once({self})

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._arrived:
            raise zmq.Again
        return self._arrived.popleft()

    def send(self, frame: bytes, flags: int) -> None:
        self._write([frame])

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self._write(frames)

    def get_monitor_socket(self, events: int) -> BlockSocket:
        self.monitor = BlockSocket(self.blocks, lambda _: None)
        return self.monitor

    def disable_monitor(self) -> None:
        pass

    def close(self, linger: int) -> None:
        self.closed = True

    def lost(self) -> None:
        """Report through the monitor that its connection has ended."""
        if self.monitor is not None:
            self.monitor.put([struct.pack("=HI", zmq.EVENT_DISCONNECTED, 0)])


class Blocks:
    """An engine's block port for its tiers, and the transport of that port."""

    def __init__(self, engine: Engine, executor: CheckedExecutor, *, offers: bool) -> None:
        self._engine = engine
        self._sockets: list[BlockSocket] = []
        """Sockets connected to other engines; a socket's index is its name there."""
        self._turn_at = float("inf")
        self._ordered = False
        self.damaged_until = 0.0
        """Until then, contents that it sends arrive corrupted."""
        self._bound: BlockSocket | None = None
        self.address = f"{SCHEME}{engine.incarnation}" if offers else ""
        transport: Any = self
        self.port = engine.world.parts.port(
            transport,
            self.address or None,
            incarnation=engine.incarnation,
            block_bytes=len(executor.read_block(0)),
            max_offered_bytes=OFFERED_BLOCKS * len(executor.read_block(0)),
            counters=EngineCounters(),
            clock=lambda: engine.clock.now,
        )
        weakref.finalize(self, os.close, self.port._wakeup)
        engine.after(0.0, self.run_once, ())

    # -- for the tiers ---------------------------------------------------------------------------

    def offer(self, key: bytes, read: Callable[[], bytes]) -> None:
        self.port.offer(key, read)

    def pull(
        self,
        source: KvSource,
        model: bytes,
        wanted: Sequence[BlockName],
        take: Callable[[BlockName, bytes], bool],
        over: Callable[[bool], None],
    ) -> None:
        self.port.pull(source, model, wanted, take, over)
        if not self._ordered:
            self._ordered = True
            self._engine.after(0.0, self.run_once, {self.port._wakeup})

    def clear(self) -> None:
        self.port.clear()

    def shutdown(self) -> None:
        """Do nothing: engines are only killed."""

    # -- for the port ----------------------------------------------------------------------------

    def maintain(self) -> None:
        """Do nothing: failed encryption handshakes are not simulated."""

    def bind(self, kind: int, address: str, *, largest: int, max_queued: int) -> BlockSocket:
        self._bound = BlockSocket(self, self._reply)
        return self._bound

    def connect(self, kind: int, address: str, *, largest: int) -> BlockSocket:
        engine, world = self._engine, self._engine.world
        peer = world.engine_process(int(address.removeprefix(SCHEME)))
        number = len(self._sockets)
        identity = struct.pack("qq", engine.incarnation, number)

        def ask(frames: list[bytes]) -> None:
            assert peer.blocks is not None
            engine.send(peer, "blocks", peer.blocks.asked, [identity, *frames])

        socket = BlockSocket(self, ask)
        socket.peer = peer
        self._sockets.append(socket)
        if not peer.alive:
            engine.after(_NOTICED, socket.lost)
        return socket

    # -- on the network --------------------------------------------------------------------------

    def run_once(self, readable: Any) -> None:
        """Run what the port's thread would do now."""
        self._ordered = self._ordered and self.port._wakeup not in readable
        self.port.run_once(readable)
        due = self._engine.clock.now + self.port.wait_ms / 1000
        if due != self._turn_at:
            self._turn_at = due
            self._engine.after(due - self._engine.clock.now, self._tick, due)

    def _tick(self, due: float) -> None:
        if due == self._turn_at:
            self.run_once(())

    def asked(self, frames: list[bytes]) -> None:
        """Handle a request for blocks."""
        assert self._bound is not None
        self._bound.put(frames)

    def _reply(self, frames: list[bytes]) -> None:
        incarnation, number = struct.unpack("qq", frames[0])
        asking = self._engine.world.engine_process(incarnation)
        assert asking.blocks is not None
        socket = asking.blocks._sockets[number]
        if self._engine.clock.now < self.damaged_until and frames[2]:
            frames = [*frames[:2], bytes([frames[2][0] ^ 1]) + frames[2][1:]]
        self._engine.send(asking, "blocks", socket.put, frames[1:])

    def lose(self, peer: Engine) -> None:
        """Handle the end of the connections to an engine."""
        for socket in self._sockets:
            if socket.peer is peer and not socket.closed:
                self._engine.after(_NOTICED, socket.lost)

    def check(self) -> None:
        """Check that no transfer has left anything.

        Raises:
            AssertionError: something is left.
        """
        name, port = self._engine.name, self.port
        assert not any(link.pulls for link in port._links.values()), f"{name} pulls for ever"
        port._offers.expire(float("inf"))
        assert port._offers.num_bytes == 0, f"{name} counts blocks that it does not have"
