"""Which connections a front end has, and which one is closed when there are too many.

No I/O: the protocol reports events and carries out what is decided.
"""

import ipaddress
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

C = TypeVar("C")


class Connection(Protocol):
    """A connection that can be ended."""

    def cut(self) -> None:
        """Close it at once; unsent data is lost."""
        ...


class TooManyConnections(Exception):
    """All connections are being answered: none can give way to a new one."""


def client_of(address: str) -> str:
    """Return what counts as one client: an address, or the /64 network that a host owns in IPv6."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    if known.ipv4_mapped is not None:  # of a socket that listens to both
        return str(known.ipv4_mapped)
    return str(ipaddress.ip_network((int(known), 64), strict=False))


class ConnectionBook(Generic[C]):
    """The connections of one front end by client.

    A connection is waiting while its client has something to send: its first request, the rest of
    one, or the next. When there is no room for a new connection, a waiting one is closed: the
    longest waiting one of the client with the most connections. A client that opens thousands
    thus closes its own, and connections that are being answered are never closed.
    """

    def __init__(self, most: int, changed: Callable[[int], None] = lambda _: None) -> None:
        """Hold at most `most` connections; `changed` is called with their number each time."""
        self._max = most
        self._changed = changed
        self._total = 0
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return self._total

    def open(self, connection: C, client: str) -> C | None:
        """Note a new connection, which waits; return the one to close for it, if one has to.

        Raises:
            TooManyConnections: there is no room, and none waits. The new one is not noted.
        """
        victim = None
        if self._total >= self._max:
            hosts = [each for each, waiting in self._waiting.items() if waiting]
            if not hosts:
                raise TooManyConnections
            waiting = self._waiting[max(hosts, key=self._counts.__getitem__)]
            victim = next(iter(waiting))  # the oldest
            del waiting[victim]  # it closes soon: the next newcomer needs another one
        self._total += 1
        self._changed(self._total)
        self._counts[client] = self._counts.get(client, 0) + 1
        self._waiting.setdefault(client, {})[connection] = None
        return victim

    def busy(self, connection: C, client: str) -> None:
        """A whole request has come: the connection is being answered."""
        waiting = self._waiting.get(client)
        if waiting is not None:
            waiting.pop(connection, None)

    def waiting(self, connection: C, client: str) -> None:
        """All requests are answered: the client may send the next."""
        if client in self._counts:
            self._waiting.setdefault(client, {})[connection] = None

    def close(self, connection: C, client: str) -> None:
        """Forget a connection that was noted."""
        self.busy(connection, client)
        self._total -= 1
        self._changed(self._total)
        left = self._counts.get(client, 1) - 1
        if left:
            self._counts[client] = left
        else:
            self._counts.pop(client, None)
            self._waiting.pop(client, None)
