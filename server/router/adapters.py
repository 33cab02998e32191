"""A front end's view of the adapter table, and its leases on adapter versions: no I/O.

A request that names an adapter holds a lease on its version until it has ended, so that the
coordinator knows which versions each front end still needs.
"""

from collections import Counter

from engine.shared.messages import (
    AdapterOutcome,
    AdaptersInUse,
    AdaptersView,
    AdapterTable,
)

REPEAT_INTERVAL = 1.0
"""Seconds after which a notice is repeated to the coordinator, which may have missed it."""


class Adapters:
    """The newest table, and the leases on its versions."""

    def __init__(self, front_end: int, incarnation: int) -> None:
        self._front_end = front_end
        self._incarnation = incarnation
        self.table: AdapterTable | None = None
        """None until any engine is known to have adapters."""
        self._leases: Counter[str] = Counter()
        self._last_notice: AdaptersInUse | None = None
        self._repeat_at = float("-inf")

    def take(self, view: AdaptersView | None) -> list[AdapterOutcome]:
        """Apply the coordinator's view; return the outcomes of all front ends' adapter changes.

        An older table is ignored: a restarted coordinator can know less than this front end.
        """
        if view is None or (self.table is not None and view.table.revision < self.table.revision):
            return []
        self.table = view.table
        return view.outcomes

    @property
    def served(self) -> dict[str, str]:
        """Paths of the adapters that requests can name, by name."""
        if self.table is None:
            return {}
        return {name: entry.path for name, entry in self.table.serving.items()}

    def version(self, name: str) -> str | None:
        """Return the version that a request naming this adapter gets; None if there is none."""
        entry = None if self.table is None else self.table.serving.get(name)
        return None if entry is None else entry.version

    def name(self, version: str) -> str:
        """Return the current or former name of a version."""
        entries = [] if self.table is None else self.table.entries
        names = [entry.name for entry in entries if entry.version == version]
        return names[-1] if names else version

    def lease(self, version: str) -> None:
        """Take a lease for a request that begins."""
        if version:
            self._leases[version] += 1

    def release(self, version: str) -> None:
        """Release the lease of a request that has ended."""
        if version:
            self._leases[version] -= 1
            if not self._leases[version]:
                del self._leases[version]

    def notice(self, now: float) -> AdaptersInUse | None:
        """Return the notice due to the coordinator at `now` (seconds, monotonic), if any."""
        if self.table is None:
            return None
        notice = AdaptersInUse(
            self._front_end, self._incarnation, self.table.revision, sorted(self._leases)
        )
        if notice == self._last_notice and now < self._repeat_at:
            return None
        self._last_notice, self._repeat_at = notice, now + REPEAT_INTERVAL
        return notice
