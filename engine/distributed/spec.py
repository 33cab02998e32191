"""What a process has to know to join a group, and how a group fails; free of torch."""

import socket

import msgspec

from engine.shared.addresses import join_host_port, split_host_port


class GroupBroken(Exception):
    """A member has died, hangs or was told to give up: the group cannot be used any more.

    All members see it, within the group's timeout. What was being exchanged is lost.
    """


class GroupSpec(msgspec.Struct, frozen=True):
    """One process's place in a group.

    Groups meet under `address`, at a store that rank 0 hosts there while the group exists.
    Members that bring another `topology` to the same address do not meet.
    """

    address: str
    """HOST:PORT, at rank 0."""
    rank: int
    size: int
    topology: int
    timeout_s: float
    """Longest wait for the others, both to join and in a collective."""

    @property
    def host(self) -> str:
        """Name or address of the store's host."""
        return split_host_port(self.address)[0]

    @property
    def port(self) -> int:
        """Port of the store."""
        return split_host_port(self.address)[1]


def open_listener(host: str, port: int = 0) -> socket.socket:
    """Return a bound socket for the store of a group; port 0 takes a free one.

    Raises:
        OSError: the address is in use, or not of this machine.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)


def listener_address(listener: socket.socket) -> str:
    """Return a listener's HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return join_host_port(host, port)
