"""Which names of this server requests may use: the defence against DNS rebinding.

A web page may have its own name resolve to an address of this machine. Its browser then takes this
server for a part of the page, and lets it read answers; but the requests still carry that name.
"""

import ipaddress
import socket
from functools import lru_cache

from starlette.types import Scope

from server.config import FrontEndConfig
from server.errors import ApiError

_PRIVATE = ("localhost", "local", "internal", "lan", "home.arpa", "svc")
"""Names below these, and names without a dot, cannot be bought: no page has one of them."""


class KnownHosts:
    """The hosts that requests may ask for.

    Args:
        names: hosts, `*.example.com` for all names below one, `*` for any. IP addresses and names
            of private networks are always known.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._any = "*" in names
        plain = [name.lower().removesuffix(".") for name in names]
        self._names = frozenset(plain)
        self._below = tuple(
            [name[1:] for name in plain if name.startswith("*.")]
            + [f".{name}" for name in _PRIVATE]
        )
        self.knows = lru_cache(1024)(self._knows)
        """Whether the value of a Host header names one of them."""

    def _knows(self, header: str) -> bool:
        if self._any:
            return True
        host = header.lower()
        if host.startswith("["):
            host = host[1:].partition("]")[0]
        else:
            host = host.partition(":")[0].removesuffix(".")
        if "." not in host and ":" not in host:
            return True
        return host in self._names or host.endswith(self._below) or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def known_hosts(config: FrontEndConfig) -> KnownHosts | None:
    """Return the hosts that a front end answers to, None for any.

    A browser sends no key for a page that does not have it, accepts no certificate for another name
    and reaches no Unix socket. So unless names are given only servers without all that need this.
    """
    guards, http = config.guards, config.http
    safe = guards.api_key or guards.api_key_file or guards.ssl_certfile or http.uds
    if safe and not guards.allowed_hosts:
        return None
    return KnownHosts((*guards.allowed_hosts, http.host.replace("*", ""), socket.gethostname()))


def unknown_host(hosts: KnownHosts, scope: Scope) -> ApiError | None:
    """Return why a request for a host does not get in, None if the host is known."""
    for name, value in scope["headers"]:
        if name == b"host" and not hosts.knows(host := value.decode("latin-1")):
            return ApiError(
                403,
                f"This server does not know the host {host!r}. Its operator can allow it with "
                "--allowed-hosts, or set an API key.",
                code="unknown_host",
            )
    return None
