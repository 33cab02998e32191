"""The private directory of a node's local sockets and shared files, kept intact while it is used.

It is always a new one, inside the configured directory or the system's temporary one; other
contents are not touched. Its owner holds a lock on it. The lock keeps systemd-tmpfiles away, and
lets later instances recognize directories of dead owners.

Files that processes map are in memory (`NodeDirectory.share`): the directory has links to
descriptors of its owner. On a full disk, mapped files would kill their readers with SIGBUS.

Other cleanup programs ignore locks. The owner restores removed links and directories; sockets are
bound again by their owners (`engine.shared.transport.Transport.maintain`).
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "swell-"
_UNLOCKED_PREFIX = ".swell-new-"
_MARK = ".swell"
"""Name of a file that marks a directory as ours; its name alone does not."""


def make_private(path: Path) -> None:
    """Create a directory with mode 0700 if it is missing.

    Raises:
        PermissionError: it belongs to another user, is accessible to others, or is a symlink.
        NotADirectoryError: it is a file.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} must be a directory, not a link")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (number {found.st_uid})")
    if found.st_mode & 0o077:
        raise PermissionError(f"{path} must not be accessible to others: chmod 700 {path}")


class NodeDirectory:
    """A new directory in `parent`, or in the system's temporary one, as a context manager.

    Raises:
        OSError: `parent` cannot be used; a PermissionError if others can access it.
    """

    def __init__(self, parent: str | None) -> None:
        if parent is not None:
            # Symlinks in the path are the operator's choice; their target has to be private.
            make_private(Path(os.path.realpath(parent)))
        self._parent = Path(os.path.realpath(parent or tempfile.gettempdir()))
        for directory in self._parent.glob(f"{_PREFIX}*"):  # of dead owners
            with contextlib.suppress(OSError):  # another user's, in use, or just removed
                found = (directory / _MARK).lstat()
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    continue
                descriptor = _lock(directory)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        _remove(directory)
                finally:
                    os.close(descriptor)
        # Renamed only after it is locked: an unlocked one would be taken for a dead owner's.
        new = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=self._parent))
        self._lock = _lock(new)
        (new / _MARK).touch()
        self.path = self._parent / new.name.replace(_UNLOCKED_PREFIX, _PREFIX)
        new.rename(self.path)
        self._shared: dict[Path, int] = {}

    def share(self, name: str) -> Path:
        """Create an empty file in memory, and its parent directories; return its path."""
        path = self.path / name
        self._shared[path] = os.memfd_create(path.name)
        self._link(path)
        return path

    def _link(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{self._shared[path]}")

    def keep(self) -> bool:
        """Restore whatever was removed since the last call; return whether anything was.

        Raises:
            PermissionError: another user has replaced it.
            OSError: it cannot be created.
        """
        make_private(self.path)
        is_new = self.path.stat().st_ino != os.fstat(self._lock).st_ino
        if is_new:
            lock = _lock(self.path)
            os.close(self._lock)
            self._lock = lock
        (self.path / _MARK).touch()
        lost = [path for path in self._shared if not path.exists()]
        for path in lost:
            self._link(path)
        if is_new or lost:
            logger.warning("restored files that were removed from %s", self.path)
        return is_new or bool(lost)

    def close(self) -> None:
        """Remove the directory and its contents; idempotent."""
        if self._lock < 0:
            return
        _remove(self.path)
        for descriptor in (*self._shared.values(), self._lock):
            os.close(descriptor)
        self._shared.clear()
        self._lock = -1

    def __enter__(self) -> "NodeDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    # A process of a killed supervisor may still create files here. Without the mark, no later
    # start would remove them.
    with contextlib.suppress(OSError):
        (directory / _MARK).touch()


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
