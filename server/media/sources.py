"""Reads images from `data:` URLs, and from hosts and directories that the operator allows."""

import asyncio
import binascii
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from server.media.decode import BadImage
from server.media.hosts import MAX_URL, Hosts

_PIECE = 1 << 16
"""Length in characters above which a `data:` URL is decoded in a thread."""


class ImageSources:
    """Reads the bytes of images.

    Args:
        domains: allowed hosts; `*.example.com` allows all subdomains of example.com.
        local_path: directory below which files can be read.
        max_bytes: maximum size of an image.
        seconds: timeout for fetching an image from a host.
    """

    def __init__(
        self,
        *,
        domains: Sequence[str] = (),
        local_path: Path | None = None,
        max_bytes: int,
        seconds: float,
    ) -> None:
        self._hosts = Hosts(domains, max_bytes=max_bytes, seconds=seconds)
        self._root = None if local_path is None else local_path.expanduser().resolve()
        self._max_bytes = max_bytes

    async def read(self, url: str) -> bytes:
        """Return the bytes of the image at a URL.

        Raises:
            BadImage: the URL is invalid or not allowed, or reading failed, timed out or exceeded
                `max_bytes`.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            if len(url) > _PIECE:
                return await asyncio.to_thread(self._of_data, url)
            return self._of_data(url)
        if len(url) > MAX_URL:
            raise BadImage(f"the URL is longer than {MAX_URL} characters")
        if scheme == "file":
            return await asyncio.to_thread(self._of_file, url)
        if scheme in ("http", "https"):
            return await self._hosts.fetch(url)
        raise BadImage("the URL must begin with data:, https:, http: or file:")

    def _of_data(self, url: str) -> bytes:
        comma = url.find(",")
        if not url[: max(comma, 0)].lower().endswith(";base64"):
            raise BadImage("the URL must be data:image/...;base64,...")
        if (len(url) - comma - 1) // 4 * 3 > self._max_bytes + 2:
            raise BadImage(f"the image has more than {self._max_bytes} bytes")
        try:  # of the megabytes one copy, not three
            return binascii.a2b_base64(memoryview(url.encode())[comma + 1 :], strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise BadImage("the URL's data is not base64") from error

    def _of_file(self, url: str) -> bytes:
        if self._root is None:
            raise BadImage("files are read only with --allowed-local-media-path")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise BadImage("the URL of a file must be file:///PATH")
        outside = BadImage("there is no such file below --allowed-local-media-path")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._root):
                raise outside
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError, RuntimeError) as error:
            raise outside from error
        try:
            # The path may have been replaced since the check, so check the opened file.
            at = Path(os.readlink(f"/proc/self/fd/{file}"))
            if not at.is_relative_to(self._root) or not stat.S_ISREG(os.fstat(file).st_mode):
                raise outside
            with os.fdopen(file, "rb", closefd=False) as opened:
                content = opened.read(self._max_bytes + 1)
        finally:
            os.close(file)
        if len(content) > self._max_bytes:
            raise BadImage(f"the image has more than {self._max_bytes} bytes")
        return content
