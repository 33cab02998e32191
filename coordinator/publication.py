"""Publication schedule and incremental views of the cluster: state machines without I/O.

A view of a thousand engines is a megabyte. At ten views a second most of it repeats, or is read
only by /metrics. So front ends get the load of all engines at once, and the rest of their stats in
rotation.
"""

from msgspec.structs import replace

from engine.shared.messages import (
    ClusterView,
    EngineEntry,
    EngineStats,
    LoadChange,
    ProcessEntry,
    ViewChange,
)

FULL_ENTRIES_PER_CHANGE = 64
"""Engines per change that are sent in full in rotation, besides those that changed urgently."""


class Publication:
    """Numbers the views of one coordinator and schedules the next one.

    Args:
        interval: minimum seconds between two views that differ only in load.
        idle_interval: seconds after which an unchanged view is published.
    """

    def __init__(self, interval: float, idle_interval: float) -> None:
        self.version = 0
        """Number of the newest view."""
        self.changed = False
        """A change is pending that can wait for the interval."""
        self.urgent = False
        """A change is pending that must be published immediately."""
        self.urgent_interval = 0.0
        """Minimum seconds between any two views."""
        self._interval = interval
        self._idle_interval = idle_interval
        self._last: float | None = None

    def deadline(self, now: float) -> float:
        """Return when the next view is due if nothing else happens."""
        if self._last is None:
            return now
        if self.urgent:
            return self._last + self.urgent_interval
        return self._last + (self._interval if self.changed else self._idle_interval)

    def take_due(self, now: float) -> bool:
        """Return whether to publish a view now; if so, it counts as published."""
        if now < self.deadline(now):
            return False
        self.urgent = self.changed = False
        self._last = now
        self.version += 1
        return True


class ViewChanges:
    """The view as last sent to front ends, from which the next change is computed."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._engines: dict[int, EngineEntry] = {}
        self._processes: dict[str, ProcessEntry] = {}
        self.partly_sent: dict[int, None] = {}
        """Ranks of engines whose latest stats were sent only in part, oldest first."""

    def record_full(self, view: ClusterView) -> None:
        """Record that a whole view is published."""
        self._version = view.version
        self._engines = {each.rank: each for each in view.engines}
        self._processes = {each.name: each for each in view.processes}
        self.partly_sent = {}

    def since(self, view: ClusterView) -> ViewChange | None:
        """Return the change since the last view and record it as sent; None before a whole view."""
        if self._version is None:
            return None
        after, known, processes = self._version, self._engines, self._processes
        self._version = view.version
        self._engines = {each.rank: each for each in view.engines}
        self._processes = {each.name: each for each in view.processes}
        left = [rank for rank in known if rank not in self._engines]
        changed: dict[int, LoadChange | None] = {}
        for entry in view.engines:
            if entry != (sent := known.get(entry.rank)):
                changed[entry.rank] = None if sent is None else _load_change(sent, entry)
        for rank in left:
            self.partly_sent.pop(rank, None)
        for rank, load in changed.items():
            if load is not None:
                self.partly_sent.setdefault(rank)
            else:
                self.partly_sent.pop(rank, None)
        for rank in [*self.partly_sent][:FULL_ENTRIES_PER_CHANGE]:
            del self.partly_sent[rank]
            changed[rank] = None
        head = replace(
            view,
            engines=[self._engines[rank] for rank, load in changed.items() if load is None],
            processes=[each for each in view.processes if processes.get(each.name) != each],
        )
        return ViewChange(
            after,
            head,
            [load for load in changed.values() if load is not None],
            left,
            [name for name in processes if name not in self._processes],
        )


def _load_change(sent: EngineEntry, entry: EngineEntry) -> LoadChange | None:
    """Return the change of an engine's load; None if more changed or no load was sent before."""
    before, stats = sent.stats, entry.stats
    if before is None or stats is None or replace(sent, stats=stats) != entry:
        return None
    if len(before.received) != len(stats.received):
        return None
    received = []
    for known, each in zip(before.received, stats.received, strict=True):
        if known.front_end_incarnation != each.front_end_incarnation:
            return None
        if known.requests != each.requests or known.prompt_tokens != each.prompt_tokens:
            received.append(each)
    if not _differ_in_load_only(before, stats):
        return None
    return LoadChange(
        entry.rank, stats.version, stats.wave, stats.step, stats.waiting, stats.running,
        stats.kv_usage, stats.queued_prefill_tokens, received,
    )  # fmt: skip


def _differ_in_load_only(before: EngineStats, stats: EngineStats) -> bool:
    return (
        before.topology == stats.topology
        and before.wave_running == stats.wave_running
        and before.hold_epoch == stats.hold_epoch
        and before.halted == stats.halted
        and before.exclusive_request == stats.exclusive_request
        and before.hands_over == stats.hands_over
        and before.sleep_level == stats.sleep_level
        and before.weight_version == stats.weight_version
        and (before.adapters and before.adapters.resident)
        == (stats.adapters and stats.adapters.resident)
    )
