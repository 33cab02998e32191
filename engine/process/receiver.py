"""The engine's reading thread: membership, orders of the coordinator, requests of all front ends.

It owns every socket that the engine reads from and hands typed items to the engine's loop through
one queue. Its socket calls release the GIL while the model runs.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq

from engine.lockstep.group_connection import GroupConnection
from engine.process.links import FrontEndLinks, LinkChanges
from engine.process.sender import ConnectCoordinator, ConnectFrontEnd, DisconnectFrontEnd, Outbox
from engine.shared.config import EngineConfig
from engine.shared.group_config import group_config
from engine.shared.membership import HELLO_INTERVAL, Identity, Joined, Membership, Rejected
from engine.shared.messages import (
    CoordinatorReply,
    CoreInput,
    EngineInput,
    EngineSetup,
    FormGroup,
    FrontEndEntry,
    FrontEnds,
    GroupOrder,
    GroupStatus,
    RouteTaken,
    StartDpWave,
    Welcome,
    encode,
)
from engine.shared.scope import node_name
from engine.shared.transport import Inbox, Transport

logger = logging.getLogger(__name__)

_SUBSCRIBE_ALL = b"\x01"
_CONTROL_ADDRESS = "inproc://receiver-control"
_READY, _DRAIN, _GROUP_STATUS, _STOP = b"ready", b"drain", b"group-status", b"stop"


@dataclass(frozen=True)
class Welcomed:
    """The engine is a member and knows its rank."""

    rank: int
    wave: int


@dataclass(frozen=True)
class FrontEndJoined:
    """A front end is connected; its requests may follow."""

    index: int
    incarnation: int


@dataclass(frozen=True)
class FrontEndLeft:
    """A front end has gone; nobody waits for its requests any more."""

    index: int


@dataclass(frozen=True)
class Rejoined:
    """A restarted coordinator knows the engine again, and of this wave."""

    wave: int


@dataclass(frozen=True)
class GrammarsSettled:
    """Grammars have been compiled, or could not be, since the message before."""


@dataclass(frozen=True)
class Drain:
    """The engine has to finish what it has, then end."""


@dataclass(frozen=True)
class Stop:
    """The engine has to end, for this reason if it is an error."""

    error: str | None = None


InboxItem = (
    CoreInput
    | Welcomed
    | Rejoined
    | FrontEndJoined
    | FrontEndLeft
    | StartDpWave
    | FormGroup
    | GrammarsSettled
    | Drain
    | Stop
)


class Receiver:
    """Runs the reading thread from `start` to `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        incarnation: int,
        transport: Transport,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        inbox: "SimpleQueue[InboxItem]",
        outbox: Outbox,
        lockstep: bool,
        connection: GroupConnection,
        on_routed: Callable[[], None],
    ) -> None:
        """Wire the thread; it calls `on_routed` once, when front ends route to a ready engine."""
        self._connection = connection
        self._on_routed = on_routed
        self._cluster = config.cluster
        self._incarnation = incarnation
        self._transport = transport
        self._inbox = inbox
        self._outbox = outbox
        rank = config.parallel.data_parallel_rank
        self._membership = Membership(
            Identity(
                kind="engine",
                index=-1 if rank is None else rank,
                incarnation=incarnation,
                host=node_name(config.cluster),
                pid=os.getpid(),
                group_config=group_config(config, lockstep=lockstep),
            ),
            config.cluster.heartbeat_interval,
        )
        self._setup: EngineSetup | None = None
        self._group_status: GroupStatus | None = None
        self._links = FrontEndLinks(
            incarnation,
            node_name(config.cluster),
            config.cluster.engine_timeout,
            config.cluster.heartbeat_interval,
        )
        self._requests: dict[int, zmq.Socket[bytes]] = {}
        self._orders: zmq.Socket[bytes] | None = None
        self._coordinator_addresses = ("", "")
        self._poller = zmq.Poller()
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._registration = transport.connect(
            zmq.DEALER,
            config.cluster.coordinator_address,
            identity=f"engine-{incarnation:x}".encode(),
        )
        # The loop's end of the control pair is used by the loop's thread only.
        self._control = context.socket(zmq.PAIR)
        self._control.bind(_CONTROL_ADDRESS)
        self._commands = context.socket(zmq.PAIR)
        self._commands.connect(_CONTROL_ADDRESS)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    # -- called by the engine's loop -------------------------------------------------------------

    def start(self) -> None:
        """Start reading; the first item in the inbox is `Welcomed` (or `Stop`)."""
        self._thread.start()

    def ready(self, setup: EngineSetup) -> None:
        """Tell the coordinator that the engine serves."""
        self._setup = setup
        self._control.send(_READY)

    def set_group_status(self, group_status: GroupStatus) -> None:
        """Tell the coordinator where the engine stands with its lockstep group."""
        self._group_status = group_status
        self._control.send(_GROUP_STATUS)

    def note_wave(self, wave: int) -> None:
        """The engine is in `wave`, which a coordinator that is restarted has to be told."""
        self._membership.wave = max(self._membership.wave, wave)

    def drain(self) -> None:
        """Tell the coordinator that the engine wants nothing new."""
        self._control.send(_DRAIN)

    def stop(self, timeout: float = 2.0) -> None:
        """Say goodbye, close every socket and wait for the thread; idempotent."""
        if self._control.closed:
            return
        self._control.send(_STOP)
        self._thread.join(timeout)
        self._control.close(linger=0)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        registration = self._registration
        self._serve(Inbox(registration, CoordinatorReply, "registration"), self._reply)
        address = self._cluster.coordinator_address
        watch = self._transport.watch(registration, address, binder=False)
        if watch is not None:
            self._handlers[watch.socket] = watch.check
            self._poller.register(watch.socket, zmq.POLLIN)
        self._poller.register(self._commands, zmq.POLLIN)
        self._handlers[self._commands] = self._command
        try:
            while not self._stopping:
                for message in self._membership.tick(time.monotonic()):
                    registration.send(encode(message))
                for readable, _ in self._poller.poll(self._poll_timeout_ms()):
                    if readable in self._handlers:
                        self._handlers[readable]()
                self._tend_links(time.monotonic())
            registration.send(encode(self._membership.goodbye()))
        except Exception as error:
            logger.exception("the receiver failed")
            self._inbox.put(Stop(f"receiver failed: {error}"))
        finally:
            for each in self._handlers:
                each.close(linger=200 if each is registration else 0)

    def _serve(self, inbox: Inbox, handle: Callable[[Any], None]) -> None:
        def drain() -> None:
            while (received := inbox.receive()) is not None:
                handle(received[1])

        self._handlers[inbox.socket] = drain
        self._poller.register(inbox.socket, zmq.POLLIN)

    def _poll_timeout_ms(self) -> int:
        joining = self._membership.epoch is None
        return int(1000 * (HELLO_INTERVAL if joining else self._links.wait))

    def _command(self) -> None:
        match self._commands.recv():
            case b"ready":
                self._membership.ready(self._setup)
                self._links.serve(time.monotonic())
            case b"drain":
                self._membership.drain()
            case b"group-status" if self._group_status is not None:
                self._membership.set_group_status(self._group_status)
            case _:
                self._stopping = True

    def _reply(self, reply: CoordinatorReply) -> None:
        event = self._membership.receive(reply)
        if isinstance(event, Rejected):
            self._inbox.put(Stop(f"the coordinator refused this engine: {event.reason}"))
        elif isinstance(event, Joined):
            self._joined(event)

    def _joined(self, event: Joined) -> None:
        welcome = event.welcome
        self._follow_coordinator(welcome)
        if event.again:
            logger.warning("registered again: the coordinator had forgotten this process")
            self._inbox.put(Rejoined(welcome.wave))
        else:
            logger.info("joined as rank %d", welcome.index)
            self._inbox.put(Welcomed(welcome.index, welcome.wave))
        self._update_front_ends(welcome.epoch, welcome.front_ends)

    def _follow_coordinator(self, welcome: Welcome) -> None:
        """Connect to where the coordinator publishes and listens, if that is new."""
        addresses = welcome.publish_address, welcome.output_address
        if addresses == self._coordinator_addresses:
            return
        self._coordinator_addresses = addresses
        if self._orders is not None:
            self._forget(self._orders)
        self._orders = self._transport.connect(zmq.XSUB, welcome.publish_address)
        self._orders.send(_SUBSCRIBE_ALL)
        self._serve(Inbox(self._orders, GroupOrder, "back publish"), self._order)
        self._outbox.put(ConnectCoordinator(welcome.output_address))

    def _forget(self, socket: "zmq.Socket[bytes]") -> None:
        self._poller.unregister(socket)
        del self._handlers[socket]
        socket.close(linger=0)

    def _order(self, order: GroupOrder) -> None:
        match order:
            case StartDpWave():
                self._inbox.put(order)
            case FormGroup():
                self._connection.ordered(order.topology)
                self._inbox.put(order)
            case FrontEnds(epoch, front_ends) if epoch == self._membership.epoch:
                self._update_front_ends(epoch, front_ends)

    def _update_front_ends(self, epoch: int, entries: list[FrontEndEntry]) -> None:
        rank, now = self._membership.index, time.monotonic()
        self._change_links(self._links.update(rank, epoch, entries, now))

    def _change_links(self, changes: LinkChanges) -> None:
        self._drop_front_ends(changes.left)
        for entry in changes.joined:
            self._add_front_end(entry)
        for index, hello in changes.hellos:
            self._requests[index].send(encode(hello))

    def _add_front_end(self, entry: FrontEndEntry) -> None:
        # Outputs may follow as soon as a request does: the way back has to be there first.
        self._outbox.put(ConnectFrontEnd(entry.index, entry.addresses.outputs))
        self._inbox.put(FrontEndJoined(entry.index, entry.incarnation))
        identity = f"{self._membership.index}-{self._incarnation:x}".encode()
        requests = self._transport.connect(zmq.DEALER, entry.addresses.requests, identity=identity)
        self._requests[entry.index] = requests
        self._serve(Inbox(requests, EngineInput, "requests"), self._request)

    def _request(self, message: EngineInput) -> None:
        if isinstance(message, RouteTaken):
            self._links.answered(message)
        else:
            self._inbox.put(message)

    def _tend_links(self, now: float) -> None:
        self._change_links(self._links.tick(self._membership.index, now))
        unconfirmed = self._links.take_unconfirmed(now)
        if unconfirmed is None:
            return
        if unconfirmed:
            names = ", ".join(map(str, unconfirmed))
            logger.warning("ready, but front ends %s have not said that they route here", names)
        self._on_routed()

    def _drop_front_ends(self, indices: list[int]) -> None:
        for index in indices:
            self._forget(self._requests.pop(index))
            self._inbox.put(FrontEndLeft(index))
            self._outbox.put(DisconnectFrontEnd(index))
