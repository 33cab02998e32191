"""Parameters for joining a group, and the group's exception; free of torch."""

import socket

import msgspec

from engine.shared.addresses import join_host_port, split_host_port


class GroupBroken(Exception):
    """A member has died, hangs or gave up: the group is unusable.

    All members raise it, within the group's timeout. Data in flight is lost.
    """


class GroupSpec(msgspec.Struct, frozen=True):
    """One process's rank in a group, and the rendezvous.

    Groups meet under `address`, at a store that rank 0 hosts while the group exists. Members with
    different `topology` at the same address do not meet.
    """

    address: str
    """HOST:PORT, at rank 0."""
    rank: int
    size: int
    topology: int
    timeout_s: float
    """Maximum wait for other members, both to join and in a collective."""

    @property
    def host(self) -> str:
        """Name or address of the store's host."""
        return split_host_port(self.address)[0]

    @property
    def port(self) -> int:
        """Port of the store."""
        return split_host_port(self.address)[1]


def open_listener(host: str, port: int = 0) -> socket.socket:
    """Return a bound socket for the store of a group; port 0 selects a free one.

    Raises:
        OSError: the address is in use, or not of this machine.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)


def listener_address(listener: socket.socket) -> str:
    """Return a listener's HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return join_host_port(host, port)
