"""Detects changes of a file, so that a running process notices a new key."""

from collections.abc import Sequence
from pathlib import Path

_Signature = tuple[int, int, int] | None


class WatchedFile:
    """A file and its last known state; follows symlinks, as Kubernetes swaps them."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._seen = self._signature()

    def changed(self) -> bool:
        """Return whether it was written, replaced, created or removed since the last call."""
        now = self._signature()
        changed = now != self._seen
        self._seen = now
        return changed

    def _signature(self) -> _Signature:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def any_changed(files: Sequence[WatchedFile]) -> bool:
    """Return whether any file has changed; checks all, so that no change is reported twice."""
    return any([file.changed() for file in files])
