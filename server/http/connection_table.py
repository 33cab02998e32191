"""Bookkeeping of a front end's connections, and the choice of one to close at the limit.

No I/O: the protocol reports events and carries out the decisions.
"""

import ipaddress
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

C = TypeVar("C")


class Connection(Protocol):
    """A connection that can be closed."""

    def abort(self) -> None:
        """Close it immediately; unsent data is lost."""
        ...


class TooManyConnections(Exception):
    """All connections are serving requests: none can be closed for a new one."""


def client_of(address: str) -> str:
    """Return the key of a client: its address, or the /64 network for IPv6."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    if known.ipv4_mapped is not None:  # from a dual-stack socket
        return str(known.ipv4_mapped)
    return str(ipaddress.ip_network((int(known), 64), strict=False))


class ConnectionTable(Generic[C]):
    """The connections of one front end, by client.

    A connection is waiting while its client has something to send: its first request, the rest of
    one, or the next. If there is no room for a new connection, a waiting one is closed: the longest
    waiting one of the client with the most connections. So a client that opens thousands closes its
    own, and connections that serve requests are never closed.
    """

    def __init__(self, limit: int, changed: Callable[[int], None] = lambda _: None) -> None:
        """Limit connections to `limit`; `changed` is called with each new count."""
        self._max = limit
        self._changed = changed
        self._total = 0
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return self._total

    def open(self, connection: C, client: str) -> C | None:
        """Add a new, waiting connection; return the one to close for it, if needed.

        Raises:
            TooManyConnections: there is no room and none waits. The new one is not added.
        """
        victim = None
        if self._total >= self._max:
            hosts = [each for each, waiting in self._waiting.items() if waiting]
            if not hosts:
                raise TooManyConnections
            waiting = self._waiting[max(hosts, key=self._counts.__getitem__)]
            victim = next(iter(waiting))  # the oldest
            del waiting[victim]  # it closes soon: the next new connection needs another victim
        self._total += 1
        self._changed(self._total)
        self._counts[client] = self._counts.get(client, 0) + 1
        self._waiting.setdefault(client, {})[connection] = None
        return victim

    def busy(self, connection: C, client: str) -> None:
        """Mark a connection as serving a request that has been received completely."""
        waiting = self._waiting.get(client)
        if waiting is not None:
            waiting.pop(connection, None)

    def waiting(self, connection: C, client: str) -> None:
        """Mark a connection as waiting after all requests are answered."""
        if client in self._counts:
            self._waiting.setdefault(client, {})[connection] = None

    def close(self, connection: C, client: str) -> None:
        """Remove a connection."""
        self.busy(connection, client)
        self._total -= 1
        self._changed(self._total)
        left = self._counts.get(client, 1) - 1
        if left:
            self._counts[client] = left
        else:
            self._counts.pop(client, None)
            self._waiting.pop(client, None)
