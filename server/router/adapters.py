"""What a front end knows of adapters, and what it says of them: no I/O.

A request that names an adapter holds a lease on its version until it has ended, so that the
coordinator knows from every front end which versions are still needed.
"""

from collections import Counter

from engine.shared.messages import (
    AdapterOutcome,
    AdapterSheet,
    AdaptersInUse,
    AdaptersView,
)

REPEAT_INTERVAL = 1.0
"""Seconds after which what the coordinator may not have heard is said again."""


class Adapters:
    """The newest sheet, and the leases on its versions."""

    def __init__(self, front_end: int, incarnation: int) -> None:
        self._front_end = front_end
        self._incarnation = incarnation
        self.sheet: AdapterSheet | None = None
        """None while no engine has adapters, as far as is known."""
        self._leases: Counter[str] = Counter()
        self._said: AdaptersInUse | None = None
        self._repeat_at = float("-inf")

    def take(self, view: AdaptersView | None) -> list[AdapterOutcome]:
        """Take the coordinator's view; return the outcomes of the wishes of all front ends.

        A restarted coordinator may know less than this front end, which has told it then.
        """
        if view is None or (self.sheet is not None and view.sheet.revision < self.sheet.revision):
            return []
        self.sheet = view.sheet
        return view.outcomes

    @property
    def served(self) -> dict[str, str]:
        """The path of each adapter that requests may name."""
        if self.sheet is None:
            return {}
        return {name: entry.path for name, entry in self.sheet.serving.items()}

    def version(self, name: str) -> str | None:
        """Return which version a request that names an adapter gets; None without one."""
        entry = None if self.sheet is None else self.sheet.serving.get(name)
        return None if entry is None else entry.version

    def name(self, version: str) -> str:
        """Return what a version is, or was, called."""
        entries = [] if self.sheet is None else self.sheet.entries
        names = [entry.name for entry in entries if entry.version == version]
        return names[-1] if names else version

    def lease(self, version: str) -> None:
        """A request with this version begins."""
        if version:
            self._leases[version] += 1

    def release(self, version: str) -> None:
        """It has ended."""
        if version:
            self._leases[version] -= 1
            if not self._leases[version]:
                del self._leases[version]

    def notice(self, now: float) -> AdaptersInUse | None:
        """Return what the coordinator has to be told at `now` (seconds, monotonic)."""
        if self.sheet is None:
            return None
        said = AdaptersInUse(
            self._front_end, self._incarnation, self.sheet.revision, sorted(self._leases)
        )
        if said == self._said and now < self._repeat_at:
            return None
        self._said, self._repeat_at = said, now + REPEAT_INTERVAL
        return said
