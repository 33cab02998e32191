"""Proxies the sockets through which a node's engines transfer KV blocks.

It slows transfers down, so that faults can hit them midway, and cuts, stalls or corrupts them. An
engine's socket is a file below the stack's `--socket-dir`: it is moved aside and replaced before
other engines have connected.
"""

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import psutil

_CHUNK = 1 << 16
_CONTENT = 1 << 12
"""Minimum size of a chunk that must be block content."""
_LOOK_INTERVAL = 0.02
_FLOWS_WITHIN = 60.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(eq=False)
class Link:
    """A connection between the engine that offers blocks and the one that reads them."""

    offers: psutil.Process
    reads: psutil.Process
    sockets: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    damages: bool = False
    """Whether the next content is corrupted."""

    def cut(self) -> None:
        """Break the connection during a transfer."""
        for each in self.sockets:
            each.transport.abort()


class BlockLinks:
    """All such connections of one stack; requires `watch` to run.

    Args:
        sockets: the stack's `--socket-dir`.
        aside: an empty directory on the same file system.
        bytes_per_second: rate limit per connection.
    """

    def __init__(self, sockets: Path, aside: Path, bytes_per_second: float) -> None:
        self._sockets = sockets
        self._aside = aside
        self._rate = bytes_per_second
        self._servers: dict[Path, asyncio.Server] = {}
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
                            await self._get_between(path)
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

    async def _get_between(self, path: Path) -> None:
        hidden, ours = self._aside / path.name, self._aside / f"{path.name}-ours"

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, here = await asyncio.open_unix_connection(hidden)
            except OSError:  # the engine has died
                writer.transport.abort()
                return
            with contextlib.suppress(psutil.NoSuchProcess):
                link = Link(_peer(here), _peer(writer), (writer, here))
                passing = (self._pass(reader, here, link), self._pass(there, writer, link))
                await asyncio.gather(*passing, return_exceptions=True)
            for each in (writer, here):
                each.transport.abort()

        self._servers[path] = await asyncio.start_unix_server(connected, ours)
        os.rename(path, hidden)
        os.rename(ours, path)

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
            link.cut()  # both ends notice the disconnection


def _peer(writer: asyncio.StreamWriter) -> psutil.Process:
    """Return the process at the other end of a local connection.

    Raises:
        psutil.NoSuchProcess: it has exited.
    """
    local: socket.socket = writer.get_extra_info("socket")
    credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return psutil.Process(_CREDENTIALS.unpack(credentials)[0])
