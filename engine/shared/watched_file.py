"""Detects that a file has changed: how a running process notices a new key."""

from collections.abc import Sequence
from pathlib import Path

_Signature = tuple[int, int, int] | None


class WatchedFile:
    """A file and what it looked like; symbolic links are followed, as Kubernetes swaps them."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._seen = self._signature()

    def changed(self) -> bool:
        """Whether it was written, replaced, made or removed since the last call."""
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
    """Whether a file has changed; all are looked at, so that no change is reported twice."""
    return any([file.changed() for file in files])
