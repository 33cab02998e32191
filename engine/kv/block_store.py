"""A directory of KV blocks, one file each, shared by all engines that can write to it.

In `/dev/shm` the directory is host memory shared by a node's engines; on a disk it outlives them. A
file is written under a temporary name and renamed, and starts with a digest of its key and
content: torn, truncated or foreign files count as missing and are removed. Anyone who can write to
the directory can forge blocks, so it is private to its user.
"""

import contextlib
import fcntl
import os
import shutil
from hashlib import blake2b
from pathlib import Path

from engine.shared.node_directory import make_private

MODEL_SIZE = 16
"""Bytes at the start of a key that identify the model."""

_MAGIC = b"swell kv block 1"
_DIGEST_SIZE = 16
_HEADER = len(_MAGIC) + _DIGEST_SIZE
_SUFFIX = ".kv"
_LOW_WATER = 0.9
"""Fraction of the limit to which removing the least recently used files shrinks the directory."""
_SCAN_SHARE = 32
"""The directory is measured again after writing 1/32 of the limit, since others write too."""


class BlockStore:
    """Keeps the newest blocks that fit into `max_bytes`. Methods may block on disk I/O.

    Args:
        root: created if missing; must be private to this user.
        max_bytes: limit for all files below the root, over all models.
        outlives_users: if False, the last engine to close it removes the directory.

    Raises:
        OSError: the directory cannot be used; PermissionError if others have access to it.
    """

    def __init__(self, root: Path, max_bytes: int, *, outlives_users: bool) -> None:
        make_private(root)
        self._root = root
        self._max_bytes = max_bytes
        self._outlives_users = outlives_users
        self._size = self._remove_oldest()
        self._unscanned = 0
        self._user_lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._user_lock, fcntl.LOCK_SH)

    def read(self, key: bytes) -> bytes | None:
        """Return a block's content, or None if it is missing.

        Raises:
            BadBlock: it is damaged or foreign, and has been removed.
            OSError: the file system fails.
        """
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        content = data[_HEADER:]
        if data[:_HEADER] != seal(key, content):
            path.unlink(missing_ok=True)
            raise BadBlock(f"{path} is damaged or was not written by this program: removed")
        with contextlib.suppress(OSError):
            os.utime(path)  # for LRU removal
        return content

    def write(self, key: bytes, content: bytes) -> bool:
        """Store a block; the least recently used ones are removed to make room.

        Returns:
            Whether it was written; False if it exists or exceeds the limit.

        Raises:
            OSError: the file system is full or fails.
        """
        path = self._path(key)
        size = _HEADER + len(content)
        if path.exists() or size > self._max_bytes:
            return False
        self._unscanned += size
        is_due = self._unscanned * _SCAN_SHARE > self._max_bytes
        if is_due or self._size + self._unscanned > self._max_bytes:
            self._size, self._unscanned = self._remove_oldest(size), size
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.new")
        try:
            with temporary.open("wb") as file:
                file.write(seal(key, content))
                file.write(content)
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        return True

    def clear(self, model: bytes) -> None:
        """Remove all blocks of a model, by key prefix."""
        shutil.rmtree(self._root / model.hex(), ignore_errors=True)

    def close(self) -> None:
        """Release the store; idempotent."""
        if self._user_lock < 0:
            return
        if not self._outlives_users:
            with contextlib.suppress(OSError):
                fcntl.flock(self._user_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._user_lock)
        self._user_lock = -1

    def _path(self, key: bytes) -> Path:
        model, name = key[:MODEL_SIZE].hex(), key[MODEL_SIZE:].hex()
        return self._root / model / name[-2:] / (name + _SUFFIX)

    def _remove_oldest(self, num_bytes: int = 0) -> int:
        """Measure the directory; remove the least recently used files if it is too large.

        Returns:
            The remaining bytes.
        """
        found: list[tuple[float, int, str]] = []
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path, follow_symlinks=False)
                    if not name.endswith(_SUFFIX):
                        if not _is_being_written(name):
                            os.unlink(path)
                        continue
                    found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        if total + num_bytes <= self._max_bytes:
            return total
        for _, size, path in sorted(found):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
            if total + num_bytes <= _LOW_WATER * self._max_bytes:
                break
        return total


def seal(key: bytes, content: bytes) -> bytes:
    """Return the header of a block's file, which authenticates key and content."""
    digest = blake2b(key, digest_size=_DIGEST_SIZE)
    digest.update(content)
    return _MAGIC + digest.digest()


def _is_being_written(name: str) -> bool:
    """Return whether the process that writes a file of this name is alive.

    A process of another container may be considered dead; its block is then not stored.
    """
    process = name.split(".")[-2:][0]
    return process.isdigit() and Path("/proc", process).exists()


class BadBlock(Exception):
    """The data read is not what was written."""
