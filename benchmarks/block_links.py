"""Proxies the sockets through which a node's engines transfer KV blocks.

It slows transfers down, so that faults can hit them midway, and cuts, stalls or corrupts them. An
engine's local socket is a file below the stack's `--socket-dir`: it is moved aside and replaced
before other engines have connected. With TCP, a preloaded library reports the ports on which
engines listen, and has their peers connect to the proxy's ports instead.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.preload import compile_preload

_CHUNK = 1 << 16
_CONTENT = 1 << 12
"""Minimum size of a chunk that must be block content."""
_LOOK_INTERVAL = 0.02
_FLOWS_WITHIN = 30.0
_CREDENTIALS = struct.Struct("3i")

_DETOURS = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* The port is at the same place in addresses of IPv4 and IPv6. */
static in_port_t *port_of(struct sockaddr_storage *address) {
    int is_ip = address->ss_family == AF_INET || address->ss_family == AF_INET6;
    return is_ip ? &((struct sockaddr_in *)address)->sin_port : 0;
}

int listen(int socket, int backlog) {
    static int (*real)(int, int);
    if (!real) real = dlsym(RTLD_NEXT, "listen");
    int result = real(socket, backlog);
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    if (!result && !getsockname(socket, (struct sockaddr *)&name, &size) && port_of(&name)) {
        int file = open(getenv("DETOUR_LISTENERS"), O_WRONLY | O_APPEND | O_CLOEXEC);
        if (file >= 0) {
            dprintf(file, "%d %d\n", getpid(), ntohs(*port_of(&name)));
            close(file);
        }
    }
    return result;
}

int connect(int socket, const struct sockaddr *to, socklen_t size) {
    static int (*real)(int, const struct sockaddr *, socklen_t);
    if (!real) real = dlsym(RTLD_NEXT, "connect");
    struct sockaddr_storage other;
    if (size > sizeof other) return real(socket, to, size);
    memcpy(&other, to, size);
    in_port_t *port = port_of(&other);
    FILE *file = port ? fopen(getenv("DETOUR_PORTS"), "re") : 0;
    if (file) {
        int from, through;
        while (fscanf(file, "%d %d", &from, &through) == 2)
            if (ntohs(*port) == from) {
                *port = htons(through);
                break;
            }
        fclose(file);
    }
    return real(socket, (struct sockaddr *)&other, size);
}
"""


@dataclass(eq=False)
class Link:
    """A connection between the engine that offers blocks and the one that reads them."""

    offers: psutil.Process
    reads: psutil.Process
    sockets: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    damages: bool = False
    """Whether the next content is corrupted."""

    def disconnect(self) -> None:
        """Break the connection during a transfer."""
        for each in self.sockets:
            each.transport.abort()


class BlockLinks:
    """All such connections of one stack; requires `watch` to run.

    Args:
        directory: an empty directory; `sockets` below it is the stack's `--socket-dir`.
        bytes_per_second: rate limit per connection.
        over_tcp: whether the engines' sockets are on TCP instead.

    Raises:
        OSError: the library for TCP cannot be compiled.
    """

    def __init__(self, directory: Path, bytes_per_second: float, *, over_tcp: bool) -> None:
        self.environment: dict[str, str] = {}
        """Variables that the stack needs."""
        self._sockets, self._aside = directory / "sockets", directory / "aside"
        self._aside.mkdir()
        self._listeners, self._ports = directory / "listeners", directory / "ports"
        self._num_listeners = 0
        self._detours: dict[int, int] = {}
        """Ports of engines, and of the proxies in front of them."""
        if over_tcp:
            self._listeners.touch()
            self.environment = {
                "LD_PRELOAD": str(compile_preload(_DETOURS, directory, "detours")),
                "DETOUR_LISTENERS": str(self._listeners),
                "DETOUR_PORTS": str(self._ports),
            }
        self._rate = bytes_per_second
        self._servers: dict[Path | tuple[int, int], asyncio.Server] = {}
        self._flowing: asyncio.Future[Link] | None = None
        self._open = asyncio.Event()
        self._open.set()

    async def watch(self) -> None:
        """Proxy present and new engines until cancelled."""
        try:
            while True:
                for path in self._sockets.rglob("*-blocks"):
                    if path not in self._servers:
                        with contextlib.suppress(FileNotFoundError):  # the engine has just died
                            await self._replace(path)
                if self.environment:
                    await self._detour_new_ports()
                await asyncio.sleep(_LOOK_INTERVAL)
        finally:
            for server in self._servers.values():
                server.close()

    async def flowing(self) -> Link:
        """Wait for part of a block, and return its connection; the part arrives a little later.

        Raises:
            TimeoutError: there was no transfer.
        """
        self._flowing = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(self._flowing, _FLOWS_WITHIN)

    async def silence(self, seconds: float) -> None:
        """Stall all connections for a while, then forward the delayed data."""
        self._open.clear()
        await asyncio.sleep(seconds)
        self._open.set()

    async def _replace(self, path: Path) -> None:
        """Take the place of an engine's local socket."""
        hidden, ours = self._aside / path.name, self._aside / f"{path.name}-ours"

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialled = asyncio.open_unix_connection(hidden)
            ends = lambda here: (_peer(here), _peer(writer))  # noqa: E731
            await self._forward(reader, writer, dialled, ends)

        self._servers[path] = await asyncio.start_unix_server(connected, ours)
        os.rename(path, hidden)
        os.rename(ours, path)

    async def _detour_new_ports(self) -> None:
        """Have proxies in front of the ports on which engines have begun to listen."""
        lines = self._listeners.read_text().splitlines()
        for line in lines[self._num_listeners :]:
            pid, port = map(int, line.split())
            with contextlib.suppress(psutil.NoSuchProcess):
                engine = psutil.Process(pid)
                if " ".join(engine.cmdline()).startswith("swell: engine"):
                    await self._detour(engine, port)
        self._num_listeners = len(lines)

    async def _detour(self, engine: psutil.Process, port: int) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialled = asyncio.open_connection("127.0.0.1", port)
            ends = lambda _: (engine, _owner(writer))  # noqa: E731
            await self._forward(reader, writer, dialled, ends)

        server = self._servers[engine.pid, port] = await asyncio.start_server(
            connected, "127.0.0.1"
        )
        self._detours[port] = server.sockets[0].getsockname()[1]
        changed = self._ports.with_suffix(".new")
        changed.write_text("".join(f"{port} {to}\n" for port, to in self._detours.items()))
        changed.rename(self._ports)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        dialled: Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]],
        ends: Callable[[asyncio.StreamWriter], tuple[psutil.Process, psutil.Process]],
    ) -> None:
        """Forward both directions of a connection until it ends.

        `ends` returns the engine that offers blocks, and the one that reads them.
        """
        writers = [writer]
        try:
            there, here = await dialled
            writers.append(here)
            link = Link(*ends(here), (writer, here))
            passing = (self._pass(reader, here, link), self._pass(there, writer, link))
            await asyncio.gather(*passing, return_exceptions=True)
        except (OSError, psutil.NoSuchProcess):
            pass  # one of them has died
        finally:
            for each in writers:
                each.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link
    ) -> None:
        try:
            while data := await reader.read(_CHUNK):
                if len(data) >= _CONTENT:
                    if self._flowing is not None and not self._flowing.done():
                        self._flowing.set_result(link)
                    await asyncio.sleep(len(data) / self._rate)
                    if link.damages:
                        link.damages, middle = False, len(data) // 2
                        data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        finally:
            link.disconnect()  # both ends notice the disconnection


def _peer(writer: asyncio.StreamWriter) -> psutil.Process:
    """Return the process at the other end of a local connection.

    Raises:
        psutil.NoSuchProcess: it has exited.
    """
    local: socket.socket = writer.get_extra_info("socket")
    credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return psutil.Process(_CREDENTIALS.unpack(credentials)[0])


def _owner(writer: asyncio.StreamWriter) -> psutil.Process:
    """Return the process of this host that has connected over TCP.

    Raises:
        psutil.NoSuchProcess: it has exited.
    """
    port = writer.get_extra_info("peername")[1]
    for connection in psutil.net_connections("tcp"):
        if connection.laddr[1:] == (port,) and connection.raddr and connection.pid is not None:
            return psutil.Process(connection.pid)
    raise psutil.NoSuchProcess(0)
