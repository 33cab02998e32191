"""The group that an engine is connected to, as two threads see it."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.distributed.engines import EngineGroup  # imports torch: not every engine needs it


class GroupConnection:
    """Lets the thread that hears of a newer group free the one that computes in an older one.

    The loop attaches and detaches its group; the receiver says which formation it heard of. Whoever
    waits in a group that is superseded finds it broken at once, also if no member has died.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: EngineGroup | None = None
        self._newest = 0

    @property
    def is_superseded(self) -> bool:
        """Whether a newer group than the attached one has been ordered."""
        with self._lock:
            return self._group is not None and self._group.topology < self._newest

    def attach(self, group: "EngineGroup") -> None:
        """Note that the engine is in this group from now on."""
        with self._lock:
            self._group = group
            self._cut_if_superseded()

    def detach(self) -> None:
        """The engine has left its group, whose connections are closed; idempotent."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def ordered(self, topology: int) -> None:
        """The coordinator wants a group of this number."""
        with self._lock:
            self._newest = max(self._newest, topology)
            self._cut_if_superseded()

    def _cut_if_superseded(self) -> None:
        if self._group is not None and self._group.topology < self._newest:
            self._group.abort()
