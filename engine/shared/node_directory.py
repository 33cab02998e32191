"""The private directory of a node's local sockets and shared files, whole for as long as it lives.

It is always a fresh one, inside the directory that the operator names or the system's temporary
one; whatever else is there is left alone. Its maker holds a lock on it. The lock keeps
systemd-tmpfiles away, and tells a successor which directories belong to the dead.

Files that processes map are in memory (`NodeDirectory.share`): the directory has links to
descriptors of its maker. On a disk they would kill their readers with SIGBUS once it is full.

Other cleaners ignore locks. The maker puts removed links and directories back; sockets are bound
again by their owners (`engine.shared.transport.Transport.mend`).
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
"""Name of the file that marks a directory as one of ours, which its name alone does not."""


def make_private(path: Path) -> None:
    """Make a directory with mode 0700 if it is not there.

    Raises:
        PermissionError: it is another user's, others can enter it, or it is a link.
        NotADirectoryError: it is a file.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} must be a directory and no link")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (number {found.st_uid})")
    if found.st_mode & 0o077:
        raise PermissionError(f"{path} must not be accessible to others: chmod 700 {path}")


class NodeDirectory:
    """A fresh directory below `parent`, or below the system's temporary one, as a context manager.

    Raises:
        OSError: `parent` cannot be used; a PermissionError if others could get at it.
    """

    def __init__(self, parent: str | None) -> None:
        if parent is not None:
            # Links on the way are the operator's own; what they lead to has to be private.
            make_private(Path(os.path.realpath(parent)))
        self._parent = Path(os.path.realpath(parent or tempfile.gettempdir()))
        for directory in self._parent.glob(f"{_PREFIX}*"):  # of owners that died
            with contextlib.suppress(OSError):  # another user's, a living one's, or just removed
                found = (directory / _MARK).lstat()
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    continue
                descriptor = _lock(directory)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        shutil.rmtree(directory, ignore_errors=True)
                finally:
                    os.close(descriptor)
        # Under its name it is never seen unlocked, or it would be taken for a dead one's.
        new = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=self._parent))
        self._lock = _lock(new)
        (new / _MARK).touch()
        self.path = self._parent / new.name.replace(_UNLOCKED_PREFIX, _PREFIX)
        new.rename(self.path)
        self._shared: dict[Path, int] = {}

    def share(self, name: str) -> Path:
        """Make an empty file in memory and return its path, whose parents are made too."""
        path = self.path / name
        self._shared[path] = os.memfd_create(path.name)
        self._link(path)
        return path

    def _link(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{self._shared[path]}")

    def keep(self) -> bool:
        """Put back what somebody has removed since the last call; return whether anything was.

        Raises:
            PermissionError: another user has put something in its place.
            OSError: it cannot be made.
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
            logger.warning("files in %s were removed: put back", self.path)
        return is_new or bool(lost)

    def close(self) -> None:
        """Remove the directory with all that is in it; idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for descriptor in (*self._shared.values(), self._lock):
            os.close(descriptor)
        self._shared.clear()
        self._lock = -1

    def __enter__(self) -> "NodeDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
