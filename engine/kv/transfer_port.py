"""An engine's sockets for KV blocks, and the thread that reads and writes them.

One socket serves the engine's offers; one per peer pulls the peer's offers. Contents are copied out
of and into the KV cache by the engine's own thread: memory that a step could write to is never
sent.
"""

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import zmq

from engine.kv.tier_opening import KvMemory, require_host_memory, tier_setting
from engine.kv.tiers import BlockName
from engine.kv.transfer_messages import (
    MAX_NAMES,
    MAX_REQUEST,
    BlockFound,
    BlocksWanted,
    checksum,
    decode_found,
    decode_wanted,
    pack,
    unpack,
)
from engine.kv.transfer_offers import Offers
from engine.kv.transfer_pull import Pull
from engine.kv.transfer_settings import BadKvTransfer, Role, read_transfer
from engine.shared.addresses import is_loopback, join_host_port
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.config import ClusterConfig, EngineConfig
from engine.shared.messages import EngineCounters, KvSource, encode
from engine.shared.transport import Transport, advertised_host, bound_address

PATIENCE = 2.0
"""Seconds without a block after which a peer is given up."""
DEADLINE = 30.0
"""Seconds after which a pull ends in any case, including queued pulls."""
OFFER_SECONDS = 60.0
"""Seconds for which a block waits for its reader."""
WINDOW_BYTES = 8 << 20
"""Maximum bytes in transit per pull, but at least one block."""
MAX_PULLS_AT_ONCE = 4
"""Maximum concurrent pulls per peer; further ones are queued."""
UNUSED_SECONDS = 30.0
"""Seconds after which an idle connection is closed."""

_MAX_QUEUED = 4096
"""Maximum blocks queued to one peer; further ones are dropped."""
_MAINTENANCE_INTERVAL = 1.0
_SHUTDOWN_SECONDS = 5.0
_SECONDS_BETWEEN_WARNINGS = 60.0
_EVENT = struct.Struct("=HI")
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

logger = logging.getLogger(__name__)


class _Order(NamedTuple):
    """A pull to start; the arguments of `BlockPort.pull`."""

    source: KvSource
    model: bytes
    names: Sequence[BlockName]
    take: Callable[[BlockName, bytes], bool]
    over: Callable[[bool], None]


@dataclass(eq=False)
class _Running:
    number: int
    order: _Order
    pull: Pull
    started_at: float = 0.0


@dataclass(eq=False)
class _Link:
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    used_at: float
    pulls: dict[int, _Running] = field(default_factory=dict)


class BlockPort:
    """Offers blocks, and pulls them. All methods but `shutdown` return immediately.

    Args:
        transport: used by this thread only.
        address: address to bind; None if nothing is offered.
        incarnation: id of this process.
        block_bytes: size of every block's content.
        max_offered_bytes: limit for contents that wait for their readers.
        counters: the engine's counters.
        clock: returns the time in seconds.

    Raises:
        OSError, ValueError, zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self,
        transport: Transport,
        address: str | None,
        *,
        incarnation: int,
        block_bytes: int,
        max_offered_bytes: int,
        counters: EngineCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._next_check = clock()
        self._transport = transport
        self._incarnation = incarnation
        self._block_bytes = block_bytes
        self._window = max(1, min(MAX_NAMES, WINDOW_BYTES // block_bytes))
        self._counters = counters
        self._lock = threading.Lock()
        self._offers = Offers(max_offered_bytes, OFFER_SECONDS)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup, zmq.POLLIN)
        self.bound: zmq.Socket[bytes] | None = None
        if address is not None:
            self.bound = transport.bind(
                zmq.ROUTER, address, largest=MAX_REQUEST, max_queued=_MAX_QUEUED
            )
            self._poller.register(self.bound, zmq.POLLIN)
        self._links: dict[KvSource, _Link] = {}
        self._num_pulls = 0
        self._is_over = False
        """Whether the thread accepts no more orders."""
        self._warned_at = -_SECONDS_BETWEEN_WARNINGS
        self._thread = threading.Thread(target=self._run, name="kv blocks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # -- called from other threads ---------------------------------------------------------------

    def offer(self, key: bytes, read: Callable[[], bytes]) -> None:
        """Offer a block to one reader; `read` returns its content, if it is not yet held."""
        now = self._clock()
        with self._lock:
            if self._offers.renew(key, now):
                return
            if self.bound is None or not self._offers.put(key, read(), now):
                self._counters.kv_transfer_dropped_blocks += 1

    def clear(self) -> None:
        """Withdraw all offers made so far."""
        with self._lock:
            self._offers.clear()

    def pull(
        self,
        source: KvSource,
        model: bytes,
        wanted: Sequence[BlockName],
        take: Callable[[BlockName, bytes], bool],
        over: Callable[[bool], None],
    ) -> None:
        """Start pulling blocks; ends in bounded time, whatever the peer does.

        The port's thread calls `take` for each block, while that returns True, and finally `over`
        with whether all have arrived. If the thread has ended, `over` is called immediately.
        """
        with self._lock:
            if not self._is_over:
                self._orders.put(_Order(source, model, wanted, take, over))
                os.eventfd_write(self._wakeup, 1)
                return
        over(False)

    def shutdown(self) -> None:
        """End all pulls and the thread; idempotent."""
        if self._wakeup < 0:
            return
        self._orders.put(None)
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(_SHUTDOWN_SECONDS)
        os.close(self._wakeup)
        self._wakeup = -1

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.run_once(dict(self._poller.poll(self.wait_ms))):
                pass
        finally:
            with self._lock:
                self._is_over = True
            while not self._orders.empty():
                order = self._orders.get()
                if order is not None:
                    order.over(False)
            for source in list(self._links):
                self._drop_link(source)
            if self.bound is not None:
                self.bound.close(linger=0)

    def run_once(self, readable: Container[object]) -> bool:
        """Read from sockets and do what is due; return False when the thread is to end."""
        if self._wakeup in readable and not self._start_pulls():
            return False
        if self.bound is not None and self.bound in readable:
            self._answer_all(self.bound)
        for source, link in list(self._links.items()):
            if link.socket in readable:
                self._receive(link)
            if link.monitor in readable and _is_lost(link.monitor):
                self._drop_link(source)
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + _MAINTENANCE_INTERVAL
            self._check_links(now)
        self._continue_pulls(now)
        return True

    @property
    def wait_ms(self) -> int:
        """Milliseconds until something is due."""
        ends = [each.pull.ends_at for link in self._links.values() for each in link.pulls.values()]
        return max(0, int(1000 * (min([self._next_check, *ends]) - self._clock())) + 1)

    def _check_links(self, now: float) -> None:
        self._transport.maintain()
        with self._lock:
            self._counters.kv_transfer_dropped_blocks += self._offers.expire(now)
            self._counters.kv_transfer_offered_bytes = self._offers.num_bytes
        for source, link in list(self._links.items()):
            if not link.pulls and now - link.used_at > UNUSED_SECONDS:
                self._drop_link(source)

    # -- offering --------------------------------------------------------------------------------

    def _answer_all(self, bound: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                frames = bound.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                wanted = decode_wanted(frames[1])
            except (IndexError, msgspec.DecodeError, UnicodeDecodeError):
                self._warn("dropped a malformed request for KV blocks")
                continue
            self._answer(bound, frames[0], wanted)

    def _answer(self, bound: "zmq.Socket[bytes]", peer: bytes, wanted: BlocksWanted) -> None:
        for name in wanted.names:
            content, key = None, wanted.model + name
            if wanted.incarnation == self._incarnation:
                with self._lock:
                    content = self._offers.read(key)
            digest = b"" if content is None else checksum(key, content)
            found = BlockFound(wanted.pull, name, digest)
            try:
                bound.send_multipart([peer, encode(found), content or b""], zmq.NOBLOCK)
            except zmq.ZMQError:
                return  # the peer has disconnected
            if content is None:
                return
            self._counters.kv_transfer_sent_bytes += len(content)

    # -- pulling ---------------------------------------------------------------------------------

    def _start_pulls(self) -> bool:
        """Start the ordered pulls; return False after the last order."""
        os.eventfd_read(self._wakeup)
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return True
            if order is None:
                return False
            now = self._clock()
            self._num_pulls += 1
            deadline = now + DEADLINE
            pull = Pull(order.names, window=self._window, patience=PATIENCE, deadline=deadline)
            running = _Running(self._num_pulls, order, pull, now)
            link = self._link_to(order.source, now)
            if link is None:
                running.pull.give_up()
                self._end(running)
            else:
                link.pulls[running.number] = running

    def _link_to(self, source: KvSource, now: float) -> _Link | None:
        link = self._links.get(source)
        if link is None:
            largest = max(MAX_REQUEST, self._block_bytes)
            try:
                socket = self._transport.connect(zmq.DEALER, source.address, largest=largest)
            except (OSError, ValueError, zmq.ZMQError) as error:
                self._warn("KV blocks at %s: %s", source.address, error)
                return None
            monitor = socket.get_monitor_socket(_LOST)
            link = self._links[source] = _Link(socket, monitor, now)
            self._poller.register(socket, zmq.POLLIN)
            self._poller.register(monitor, zmq.POLLIN)
        link.used_at = now
        return link

    def _receive(self, link: _Link) -> None:
        for _ in range(MAX_NAMES):  # then other connections are served
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                found = decode_found(frames[0])
                content = frames[1]
            except (IndexError, msgspec.DecodeError, UnicodeDecodeError):
                self._warn("dropped a malformed answer with KV blocks")
                continue
            running = link.pulls.get(found.pull)
            if running is not None:
                self._accept_block(running, found, content)

    def _accept_block(self, running: _Running, found: BlockFound, content: bytes) -> None:
        order, now = running.order, self._clock()
        is_good = bool(found.digest)
        if is_good and (
            len(content) != self._block_bytes
            or checksum(order.model + found.name, content) != found.digest
        ):
            self._warn("a KV block from %s was damaged: it is recomputed", order.source.address)
            is_good = False
        name = unpack(found.name)
        if not running.pull.received(name, is_good=is_good, now=now):
            return
        self._counters.kv_transfer_bytes += len(content)
        if not order.take(name, content):
            running.pull.give_up()

    def _continue_pulls(self, now: float) -> None:
        for source, link in list(self._links.items()):
            running = list(link.pulls.values())
            for each in running:
                each.pull.tick(now)
            if any(each.pull.was_silent for each in running):
                self._warn("%s sends no KV blocks: they are recomputed", source.address)
                self._drop_link(source)  # discards whatever it still sends
                continue
            for each in running:
                if each.pull.is_over:
                    del link.pulls[each.number]
                    self._end(each)
            for each in list(link.pulls.values())[:MAX_PULLS_AT_ONCE]:
                names = each.pull.next_names(now)
                if names:
                    link.used_at = now
                    self._request(link, each, names)

    def _request(self, link: _Link, running: _Running, names: Sequence[BlockName]) -> None:
        order = running.order
        request = BlocksWanted(
            order.source.incarnation, order.model, running.number, [pack(each) for each in names]
        )
        try:
            link.socket.send(encode(request), zmq.NOBLOCK)
        except zmq.ZMQError:
            running.pull.give_up()
            del link.pulls[running.number]
            self._end(running)

    def _drop_link(self, source: KvSource) -> None:
        """Close the connection to a peer, ending its pulls."""
        link = self._links.pop(source)
        for socket in (link.socket, link.monitor):
            self._poller.unregister(socket)
        link.socket.disable_monitor()
        for socket in (link.socket, link.monitor):
            socket.close(linger=0)
        for running in link.pulls.values():
            running.pull.give_up()
            self._end(running)

    def _end(self, running: _Running) -> None:
        self._counters.kv_transfer_seconds += self._clock() - running.started_at
        self._counters.kv_transfer_failures += not running.pull.is_complete
        running.order.over(running.pull.is_complete)

    def _warn(self, message: str, *arguments: object) -> None:
        now = self._clock()
        if now - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = now
            logger.warning(message, *arguments)


def _is_lost(monitor: "zmq.Socket[bytes]") -> bool:
    lost = False
    while True:
        try:
            head = monitor.recv_multipart(zmq.NOBLOCK)[0]
        except zmq.Again:
            return lost
        event, _ = _EVENT.unpack(head)
        lost = lost or bool(event & _LOST)


def open_port(
    config: EngineConfig,
    executor: KvMemory,
    context: "zmq.Context[zmq.Socket[bytes]]",
    *,
    rank: int,
    incarnation: int,
    counters: EngineCounters,
) -> tuple[BlockPort, Role, str] | None:
    """Return the port of an engine, its thread running, with its role, or None if it has no role.

    The third value is the address where others read the engine's offers; empty if it offers none.

    Raises:
        BadKvTransfer: the settings are invalid, or the socket cannot be bound.
        BadTiers: the KV cache is on a device.
    """
    transfer = read_transfer(config.cache, rank)
    if transfer is None or transfer.role is None:
        return None
    require_host_memory(config, executor)
    address = None
    try:
        if transfer.role != "decode":
            address = _address(config.cluster, incarnation)
        port = BlockPort(
            Transport(config.cluster, context),
            address,
            incarnation=incarnation,
            block_bytes=len(executor.read_block(0)),
            max_offered_bytes=transfer.max_bytes,
            counters=counters,
        )
    except (InsecureCluster, OSError, ValueError, zmq.ZMQError) as error:
        raise BadKvTransfer(f"{tier_setting(config)}: {address}: {error}") from error
    reported_address = ""
    if port.bound is not None:
        reported_address = bound_address(port.bound, advertised_host(config.cluster))
    port.start()
    return port, transfer.role, reported_address


def _address(cluster: ClusterConfig, incarnation: int) -> str:
    """Return the address to bind: ipc, loopback or TCP, like the coordinator's."""
    coordinator = cluster.coordinator_address
    if coordinator.startswith("ipc://"):
        directory = Path(coordinator.removeprefix("ipc://")).parent
        return f"ipc://{directory / f'{incarnation:x}-blocks'}"
    host = advertised_host(cluster)
    return f"tcp://{join_host_port(host if is_loopback(host) else '*', '*')}"
