"""HOST:PORT parsing (IPv6 in brackets), address family selection and dual-stack listening.

Given a name, ZeroMQ uses an IPv6 address whenever there is one, even without a route to it. So the
family of a socket is chosen here, in the order of the system's resolver.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from pathlib import Path

ANY_HOSTS = ("*", "0.0.0.0", "::")
"""Hosts that mean all interfaces when a socket is bound."""


class BadAddress(ValueError):
    """Text that is not HOST:PORT."""


def join_host_port(host: str, port: int | str) -> str:
    """Return HOST:PORT, with brackets round an IPv6 address."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Return host (without brackets) and port of HOST:PORT.

    Raises:
        BadAddress: the port is missing or invalid, or an IPv6 address has no brackets.
    """
    host, _, port = text.rpartition(":")
    bare = bare_host(host)
    if ":" in bare and bare == host:
        raise BadAddress(f"{text}: an IPv6 address needs brackets, [ADDRESS]:PORT")
    if not bare or not port.isdecimal() or int(port) > 65535:
        raise BadAddress(f"{text} is not HOST:PORT")
    return bare, int(port)


def bare_host(host: str) -> str:
    """Return a host without the brackets of an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_literal(host: str) -> bool:
    """Return whether a host is an IP address, which needs no name lookup."""
    try:
        ipaddress.ip_address(bare_host(host).partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is an address reachable only from this machine."""
    return is_literal(host) and ipaddress.ip_address(bare_host(host).partition("%")[0]).is_loopback


def uses_ipv6(host: str) -> bool:
    """Return whether a socket for a host has to be an IPv6 socket; those can use IPv4 as well.

    So a name that cannot be resolved yet counts as IPv6.
    """
    if host == "*":
        return True
    if is_literal(host):
        return ":" in host
    try:
        return resolve(host)[0] == socket.AF_INET6
    except OSError:
        return True


def resolve(host: str, port: int = 0) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the family and address of a host that the system's resolver prefers.

    Raises:
        OSError: the host cannot be resolved.
    """
    found = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM)[0]
    return found[0], (str(found[4][0]), port)


def address_towards(host: str, port: int) -> str:
    """Return the local address used to reach a host. Sends nothing.

    Raises:
        OSError: there is no route, or the host cannot be resolved.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(
        bare_host(host), port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def listen_unix(path: Path, backlog: int) -> socket.socket:
    """Return a listening Unix domain socket; replaces a stale socket file.

    Raises:
        OSError: a process already listens there, the path is another kind of file, or binding
            fails.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file that is not a socket", str(path))
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening TCP socket; `*` and `::` mean all interfaces, IPv4 and IPv6.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    bare = bare_host(host)
    if bare not in ("*", "::"):
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        return socket.create_server((bare, port), family=family, backlog=backlog)
    with contextlib.suppress(OSError):
        # Falls back to IPv4 if IPv6 is disabled. A port that is taken fails there as well.
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("0.0.0.0", port), backlog=backlog)


_PORTS_TRIED = 400


def first_free_ports(host: str, first: int, count: int) -> int:
    """Return the first of `count` consecutive free ports, starting at `first`.

    Raises:
        OSError: none were found, or the address is not of this machine.
    """
    address = resolve(host)[1][0]
    for port in range(first, min(first + _PORTS_TRIED, 65536 - count), count):
        with contextlib.ExitStack() as held:
            try:
                for each in range(port, port + count):
                    held.enter_context(listen(address, each, 1))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            return port
    raise OSError(errno.EADDRINUSE, f"no {count} consecutive free ports on {host} from {first} on")
