"""Publishes KV block events on ZeroMQ sockets, like vLLM's engines, from a separate thread.

Events contain prompt tokens: TCP sockets are encrypted and require the cluster key, like all
sockets between processes.
"""

import os
import threading
import time
from queue import Empty, SimpleQueue

import msgspec
import zmq

from engine.kv.events import AllBlocksCleared, Event, Journal
from engine.shared.config import EngineConfig
from engine.shared.transport import Transport

_END = (-1).to_bytes(8, "big", signed=True)
_MAX_REQUEST = 64
"""Maximum bytes of a replay request."""
_SHUTDOWN_SECONDS = 5.0


class BadKvEvents(ValueError):
    """The settings of events are invalid, or their sockets cannot be bound."""


class KvEventSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, with vLLM's names."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    """Address of engine 0; each other engine adds its rank to the port."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    """Ignored: the thread encodes and sends, and never waits for a subscriber."""
    topic: str = ""


def read_settings(text: str | None) -> KvEventSettings | None:
    """Parse the flag; return None if events are disabled.

    Raises:
        BadKvEvents: the value is invalid.
    """
    if text is None:
        return None
    try:
        settings = msgspec.json.decode(text, type=KvEventSettings)
    except msgspec.MsgspecError as error:
        raise BadKvEvents(f"--kv-events-config: {error}") from error
    if settings.publisher not in ("zmq", "null"):
        raise BadKvEvents(
            f"--kv-events-config: publisher {settings.publisher!r} is unknown: zmq or null"
        )
    if min(settings.buffer_steps, settings.hwm) < 1:
        raise BadKvEvents("--kv-events-config: buffer_steps and hwm are at least 1")
    if not settings.enable_kv_cache_events or settings.publisher == "null":
        return None
    return settings


def check_events(config: EngineConfig, *, pools: bool) -> None:
    """Reject settings under which no KV blocks are cached.

    Raises:
        BadKvEvents: naming the setting to change.
    """
    if read_settings(config.cache.kv_events_config) is None:
        return
    if not config.cache.enable_prefix_caching:
        raise BadKvEvents("--kv-events-config: leave out --no-enable-prefix-caching")
    if pools:
        raise BadKvEvents("--kv-events-config: serve a model that generates")


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the address that the engine with this rank binds.

    Raises:
        BadKvEvents: it is neither tcp:// with a port nor ipc://.
    """
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    address, _, port = endpoint.rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal():
        raise BadKvEvents(f"--kv-events-config: {endpoint!r} is neither tcp://HOST:PORT nor ipc://")
    return f"{address}:{int(port) + rank if int(port) else 0}"


class KvEventPublisher:
    """Publishes batches in order, and replays those that a subscriber requests.

    Raises:
        BadKvEvents: an endpoint cannot be bound.
    """

    def __init__(self, settings: KvEventSettings, rank: int, transport: Transport) -> None:
        self._topic = settings.topic.encode()
        self._journal = Journal(rank, settings.buffer_steps)
        self._queue: SimpleQueue[list[Event] | None] = SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._publish = self._bind(transport, zmq.PUB, settings.endpoint, rank, settings.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if settings.replay_endpoint is not None:
            self._replay = self._bind(
                transport, zmq.ROUTER, settings.replay_endpoint, rank, settings.hwm
            )
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    @property
    def endpoints(self) -> list[str]:
        """Bound addresses, the replay endpoint last."""
        return [str(each.getsockopt_string(zmq.LAST_ENDPOINT)) for each in self._sockets]

    def publish(self, events: list[Event]) -> None:
        """Publish a batch; returns immediately."""
        self._queue.put(events)
        os.eventfd_write(self._wakeup, 1)

    def shutdown(self) -> None:
        """Publish queued batches, and end the thread; idempotent."""
        if self._wakeup < 0:
            return
        self._queue.put(None)
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(_SHUTDOWN_SECONDS)
        os.close(self._wakeup)
        self._wakeup = -1

    def _bind(
        self, transport: Transport, kind: int, endpoint: str, rank: int, hwm: int
    ) -> "zmq.Socket[bytes]":
        address = endpoint_of(endpoint, rank)
        try:
            socket = transport.bind(kind, address, largest=_MAX_REQUEST, max_queued=hwm)
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise BadKvEvents(f"--kv-events-config: {address}: {error}") from error
        self._sockets.append(socket)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                readable = dict(poller.poll())
                if self._wakeup in readable and not self._publish_queued():
                    return
                if self._replay is not None and self._replay in readable:
                    self._answer(self._replay)
        finally:
            for socket in self._sockets:
                socket.close(linger=0)

    def _publish_queued(self) -> bool:
        """Publish all queued batches; return False after the last one."""
        os.eventfd_read(self._wakeup)
        while True:
            try:
                events = self._queue.get_nowait()
            except Empty:
                return True
            if events is None:
                return False
            number, content = self._journal.add(events, time.time())
            self._publish.send_multipart([self._topic, number.to_bytes(8, "big"), content])

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Answer one replay request; malformed ones are dropped."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for number, content in self._journal.replay(start, time.time()):
            replay.send_multipart([client, b"", number.to_bytes(8, "big"), content])
        replay.send_multipart([client, b"", _END, b""])
