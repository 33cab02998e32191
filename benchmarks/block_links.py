"""Stands between the engines of a node on the sockets through which KV blocks travel.

It makes transfers last, so that there is a middle to strike in, and cuts, silences or damages them.
An engine's socket is a file below the stack's `--socket-dir`: it is moved aside, and another one
takes its place before the other engines have connected.
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
"""Bytes at once that only the content of blocks has."""
_LOOK_INTERVAL = 0.02
_FLOWS_WITHIN = 60.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(eq=False)
class Link:
    """A connection: who offers blocks, and who reads them."""

    offers: psutil.Process
    reads: psutil.Process
    sockets: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    damages: bool = False
    """Whether the next content is changed on its way."""

    def cut(self) -> None:
        """End the connection in the middle of what it sends."""
        for each in self.sockets:
            each.transport.abort()


class BlockLinks:
    """All such connections of one stack; needs `watch` to run.

    Args:
        sockets: the stack's `--socket-dir`.
        aside: an empty directory of the same file system.
        bytes_per_second: of each connection.
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
        """Get between the engines that there are, and those that come, until cancelled."""
        try:
            while True:
                for path in self._sockets.rglob("*-blocks"):
                    if path not in self._servers:
                        await self._get_between(path)
                await asyncio.sleep(_LOOK_INTERVAL)
        finally:
            for server in self._servers.values():
                server.close()

    async def flowing(self) -> Link:
        """Wait for a part of a block, and return its connection; it arrives a little later.

        Raises:
            TimeoutError: none did.
        """
        self._flowing = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(self._flowing, _FLOWS_WITHIN)

    async def silence(self, seconds: float) -> None:
        """Let nothing pass for a while, and then what has come meanwhile."""
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
            link.cut()  # each end learns that the other has gone


def _peer(writer: asyncio.StreamWriter) -> psutil.Process:
    """Return the process at the other end of a local connection.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    local: socket.socket = writer.get_extra_info("socket")
    credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return psutil.Process(_CREDENTIALS.unpack(credentials)[0])
