"""A front end's link to the coordinator: membership, views received, and notices sent."""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
from msgspec.structs import replace

from engine.shared.membership import (
    HELLO_INTERVAL,
    JOIN_TIMEOUT,
    Joined,
    Membership,
    Rejected,
)
from engine.shared.messages import (
    AdapterTable,
    ClusterView,
    CoordinatorReply,
    FleetOrder,
    FrontEndNotice,
    Hello,
    ViewChange,
    encode,
)
from engine.shared.process_state import process_use
from engine.shared.transport import HandshakeWatch, Inbox, Transport
from server.router.followed_view import FollowedView

logger = logging.getLogger(__name__)

_SUBSCRIBE_ALL = b"\x01"


class JoinRefused(Exception):
    """The coordinator rejected this front end; the message states the reason."""


class ClusterLink:
    """Owns the registration and subscription sockets, on an event loop."""

    def __init__(
        self,
        identity: Hello,
        coordinator: str,
        heartbeat_interval: float,
        transport: Transport,
    ) -> None:
        self._membership = Membership(
            identity, heartbeat_interval, lambda: process_use(transport.descriptors)
        )
        self._coordinator = coordinator
        self._interval = heartbeat_interval
        self._transport = transport
        self._name = f"front-end-{identity.incarnation:x}".encode()
        self._registration: Inbox | None = None
        self._handshakes: HandshakeWatch | None = None
        self._publish_address = ""
        self._refusal: str | None = None
        self._views: Inbox | None = None
        self._followed = FollowedView(0.0)
        self._on_view: Callable[[ClusterView], None] = lambda view: None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._welcomed: asyncio.Future[int] = self._loop.create_future()
        self.replaced: asyncio.Future[str] = self._loop.create_future()
        """Done, with the reason, once another front end has this number: this process must exit."""

    async def join(self) -> int:
        """Register, and return this front end's number.

        Raises:
            JoinRefused: the coordinator refused, or did not answer in time.
        """
        socket = self._transport.connect(zmq.DEALER, self._coordinator, identity=self._name)
        self._registration = Inbox(socket, CoordinatorReply, "registration")
        self._registration.attach(self._loop, self._reply)
        self._handshakes = self._transport.watch(socket, self._coordinator, binder=False)
        if self._handshakes is not None:
            self._loop.add_reader(self._handshakes.socket.fileno(), self._handshakes.check)
        self._tick()
        try:
            return await asyncio.wait_for(self._welcomed, JOIN_TIMEOUT)
        except TimeoutError:
            raise JoinRefused(
                f"no coordinator answered at {self._coordinator} within {JOIN_TIMEOUT:.0f} s"
            ) from None

    def subscribe(self, on_view: Callable[[ClusterView], None]) -> None:
        """Call `on_view` with the current cluster view immediately, and with every later one."""
        self._on_view = on_view
        self._connect_views()

    def _connect_views(self) -> None:
        if self._views is not None:
            self._views.close()
        views = self._transport.connect(zmq.XSUB, self._publish_address)
        views.send(_SUBSCRIBE_ALL)
        self._followed = FollowedView(time.monotonic())
        self._views = Inbox(views, ClusterView | ViewChange, "front publish")
        self._views.attach(self._loop, self._published)

    def _published(self, _sender: bytes, message: ClusterView | ViewChange) -> None:
        shown = message if isinstance(message, ClusterView) else message.view
        if shown.group != self._membership.group:
            return
        view = self._followed.take(message)
        if view is not None:
            self._on_view(view)
        elif self._views is not None and self._followed.should_request(time.monotonic()):
            self._views.send(_SUBSCRIBE_ALL)

    def remember(self, table: AdapterTable | None, order: FleetOrder | None) -> None:
        """Record the newest adapter table and fleet order, for a restarted coordinator."""
        self._membership.adapters = table
        self._membership.fleet = order

    def ready(self) -> None:
        """Notify the coordinator that this front end serves."""
        self._membership.ready(None)
        self._send_due()

    def notify(self, notice: FrontEndNotice) -> None:
        """Send a notice to the coordinator on the subscription socket."""
        if self._views is not None:
            self._views.send(encode(replace(notice, group=self._membership.group)))

    def _tick(self) -> None:
        self._send_due()
        joining = self._membership.epoch is None
        self._timer = self._loop.call_later(
            HELLO_INTERVAL if joining else self._interval, self._tick
        )

    def _send_due(self) -> None:
        assert self._registration is not None
        for message in self._membership.tick(time.monotonic()):
            self._registration.send(encode(message))

    def _reply(self, _sender: bytes, reply: CoordinatorReply) -> None:
        event = self._membership.receive(reply)
        if isinstance(event, Rejected):
            if not self._welcomed.done():
                self._welcomed.set_exception(JoinRefused(event.reason))
            elif not event.replaced:
                # Engines of another model have joined: retry until those of this one are back.
                if event.reason != self._refusal:
                    text = "the coordinator refused this front end, which keeps retrying: %s"
                    logger.error(text, event.reason)
                self._refusal = event.reason
            elif not self.replaced.done():
                self.replaced.set_result(event.reason)
        elif isinstance(event, Joined):
            self._joined(event)
        if self._membership.epoch is None:
            self._send_due()

    def _joined(self, event: Joined) -> None:
        self._refusal = None
        before, self._publish_address = self._publish_address, event.welcome.publish_address
        self._send_due()
        if event.again:
            logger.warning("registered again: the coordinator did not know this process")
            if self._publish_address != before and self._views is not None:
                self._connect_views()
            return
        if not self._welcomed.done():
            self._welcomed.set_result(event.welcome.index)

    def close(self) -> None:
        """Send a goodbye and close both sockets."""
        if self._timer is not None:
            self._timer.cancel()
        if self._handshakes is not None:
            self._loop.remove_reader(self._handshakes.socket.fileno())
            self._handshakes.socket.close(linger=0)
        if self._registration is not None:
            self._registration.send(encode(self._membership.goodbye()))
            self._registration.close(linger_ms=200)
        if self._views is not None:
            self._views.close(linger_ms=200)
