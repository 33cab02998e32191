"""The engine's receiver thread: the sockets around `Reception`.

It owns every socket that the engine reads from, passes arriving messages to `Reception` and carries
out its actions. Socket calls release the GIL while the model runs.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from queue import SimpleQueue
from typing import Any, assert_never

import zmq

from engine.core.events import InboxItem, Stop
from engine.core.sender import Sender
from engine.lockstep.grouping import GroupConnection
from engine.process.reception import (
    Action,
    Announce,
    Close,
    Command,
    Connect,
    Deliver,
    Disconnect,
    Event,
    Follow,
    FrontEndLinks,
    Leave,
    Reception,
    Register,
    SendHello,
    Supersede,
    Tick,
)
from engine.shared.config import EngineConfig, LoraConfig
from engine.shared.group_config import group_config
from engine.shared.membership import Membership
from engine.shared.messages import (
    AdapterEntry,
    AdapterTable,
    CoordinatorReply,
    EngineInput,
    GroupOrder,
    Hello,
    encode,
)
from engine.shared.process_state import process_use
from engine.shared.scope import node_name
from engine.shared.transport import Inbox, Transport

logger = logging.getLogger(__name__)

_SUBSCRIBE_ALL = b"\x01"
_CONTROL_ADDRESS = "inproc://receiver-control"


def configured_adapters(config: LoraConfig) -> AdapterTable | None:
    """Return a new cluster's first adapter table; None if LoRA is disabled."""
    if not config.enable_lora:
        return None
    entries = [
        AdapterEntry(serial, module.name, module.path, confined=False)
        for serial, module in enumerate(config.modules, 1)
    ]
    return AdapterTable(0, entries)


def build_reception(config: EngineConfig, incarnation: int, *, lockstep: bool) -> Reception:
    """Return the state machine for the engine that `config` describes."""
    cluster, rank = config.cluster, config.parallel.data_parallel_rank
    identity = Hello(
        kind="engine",
        index=-1 if rank is None else rank,
        incarnation=incarnation,
        host=node_name(cluster),
        pid=os.getpid(),
        group_config=group_config(config, lockstep=lockstep),
        group=cluster.engine_group,
    )
    membership = Membership(identity, cluster.heartbeat_interval, process_use)
    membership.adapters = configured_adapters(config.lora)
    return Reception(
        membership,
        FrontEndLinks(
            incarnation, node_name(cluster), cluster.engine_timeout, cluster.heartbeat_interval
        ),
    )


class _Sockets:
    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}

    def listen(self, socket: "zmq.Socket[bytes]", handle: Callable[[], None]) -> None:
        self._handlers[socket] = handle
        self._poller.register(socket, zmq.POLLIN)

    def serve(self, inbox: Inbox, handle: Callable[[Any], None]) -> None:
        """Call `handle` with every message that an inbox receives."""

        def drain() -> None:
            while (received := inbox.receive()) is not None:
                handle(received[1])

        self.listen(inbox.socket, drain)

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for readable sockets, and handle them once."""
        for readable, _ in self._poller.poll(math.ceil(1000 * max(0.0, seconds))):
            self.read(readable)

    def read(self, socket: "zmq.Socket[bytes]") -> None:
        """Handle pending messages of a socket, unless it was closed meanwhile."""
        if socket in self._handlers:
            self._handlers[socket]()

    def forget(self, socket: "zmq.Socket[bytes]") -> None:
        self._poller.unregister(socket)
        del self._handlers[socket]
        socket.close(linger=0)

    def close(self, last: "zmq.Socket[bytes]") -> None:
        """Close all sockets; `last` gets 200 ms of linger to send pending messages."""
        for each in self._handlers:
            each.close(linger=200 if each is last else 0)


@dataclass(eq=False)
class Receiver:
    """Runs the receiver thread from `start` to `stop`."""

    coordinator_address: str
    incarnation: int
    transport: Transport
    context: "zmq.Context[zmq.Socket[bytes]]"
    _: KW_ONLY
    reception: Reception
    inbox: "SimpleQueue[InboxItem]"
    outputs: Sender
    connection: GroupConnection
    on_routed: Callable[[], None]
    """Called once, when front ends route to a ready engine."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._requests: dict[int, zmq.Socket[bytes]] = {}
        self._orders: zmq.Socket[bytes] | None = None
        self.sockets = _Sockets()
        self._registration = self.transport.connect(
            zmq.DEALER, self.coordinator_address, identity=f"engine-{self.incarnation:x}".encode()
        )
        self.sockets.serve(
            Inbox(self._registration, CoordinatorReply, "registration"), self._handle
        )
        watch = self.transport.watch(self._registration, self.coordinator_address, binder=False)
        if watch is not None:
            self.sockets.listen(watch.socket, watch.check)
        # The loop's thread alone uses its end of the control pair.
        self._control = self.context.socket(zmq.PAIR)
        self._control.bind(_CONTROL_ADDRESS)
        woken = self.context.socket(zmq.PAIR)
        woken.connect(_CONTROL_ADDRESS)
        self.sockets.listen(woken, lambda: self._command(woken))
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    # -- called from the engine's loop -----------------------------------------------------------

    def start(self) -> None:
        """Start reading; the first item in the inbox is `Welcomed` (or `Stop`)."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Pass a command of the loop to `Reception`."""
        self._commands.put(command)
        self._control.send(b"")

    def stop(self, timeout: float = 2.0) -> None:
        """Say goodbye, close every socket and wait for the thread; idempotent."""
        if self._control.closed:
            return
        if self._thread.is_alive():  # otherwise nobody reads the command
            self.submit(Leave())
            self._thread.join(timeout)
        self._control.close(linger=0)

    # -- the receiver thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.is_closed:
                self.sockets.poll(self.reception.deadline - self.clock())
                self.tick()
        except Exception as error:
            logger.exception("the receiver failed")
            self.inbox.put(Stop(f"receiver failed: {error}"))
        finally:
            self.sockets.close(self._registration)

    def tick(self) -> None:
        """Pass a `Tick` to `Reception` if its deadline has passed."""
        if self.clock() >= self.reception.deadline:
            self._handle(Tick())

    def _command(self, woken: "zmq.Socket[bytes]") -> None:
        woken.recv()
        self._handle(self._commands.get_nowait())

    def _handle(self, event: Event) -> None:
        for action in self.reception.handle(event, self.clock()):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Deliver(item):
                self.inbox.put(item)
            case Register(message):
                self._registration.send(encode(message))
            case SendHello(front_end, hello):
                self._requests[front_end].send(encode(hello))
            case Connect(entry):
                self.outputs.connect_front_end(entry.index, entry.addresses.outputs, entry.protocol)
                identity = f"{self.reception.rank}-{self.incarnation:x}".encode()
                requests = self.transport.connect(
                    zmq.DEALER, entry.addresses.requests, identity=identity
                )
                self._requests[entry.index] = requests
                self.sockets.serve(Inbox(requests, EngineInput, "requests"), self._handle)
            case Disconnect(front_end):
                self.sockets.forget(self._requests.pop(front_end))
                self.outputs.disconnect_front_end(front_end)
            case Follow(orders_address, reports_address):
                if self._orders is not None:
                    self.sockets.forget(self._orders)
                self._orders = self.transport.connect(zmq.XSUB, orders_address)
                self._orders.send(_SUBSCRIBE_ALL)
                self.sockets.serve(Inbox(self._orders, GroupOrder, "back publish"), self._handle)
                self.outputs.connect_coordinator(reports_address)
            case Supersede(topology):
                self.connection.ordered(topology)
            case Announce(unconfirmed):
                if unconfirmed:
                    names = ", ".join(map(str, unconfirmed))
                    logger.warning("ready, but front ends %s do not route here yet", names)
                self.on_routed()
            case Close():
                self.is_closed = True
            case _:
                assert_never(action)
