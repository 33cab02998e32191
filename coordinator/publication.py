"""When the cluster's view is published, and what is new in it: state machines without I/O.

A view of a thousand engines is a megabyte, and most of it is the same ten times a second, or is
read by nobody but /metrics. So front ends are told the load of all engines at once, and the rest
of their stats in turns.
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

WHOLE_IN_TURN = 64
"""Engines in a change whose stats are told whole, beside those whose are needed at once."""


class Publication:
    """Numbers the views of one coordinator, and says when the next is due.

    Args:
        interval: minimum seconds between two views of which only the load is new.
        idle_interval: seconds after which a view is published although nothing is new.
    """

    def __init__(self, interval: float, idle_interval: float) -> None:
        self.version = 0
        """Number of the newest view."""
        self.changed = False
        """Something is new, which may wait for the interval."""
        self.urgent = False
        """Something is new that everybody has to know at once."""
        self.urgent_interval = 0.0
        """Minimum seconds between two views in any case."""
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
        """Return whether a view is to be published now, which then counts as published."""
        if now < self.deadline(now):
            return False
        self.urgent = self.changed = False
        self._last = now
        self.version += 1
        return True


class ViewChanges:
    """What front ends know of the newest view, and what they have to be told of the next."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._engines: dict[int, EngineEntry] = {}
        self._processes: dict[str, ProcessEntry] = {}
        self._partly: dict[int, None] = {}
        """Ranks of engines whose stats were told in part only, the longest first."""

    @property
    def is_due(self) -> bool:
        """Whether there is more to tell of the view that was told last."""
        return bool(self._partly)

    def told(self, view: ClusterView) -> None:
        """A whole view is published."""
        self._version = view.version
        self._engines = {each.rank: each for each in view.engines}
        self._processes = {each.name: each for each in view.processes}
        self._partly = {}

    def since(self, view: ClusterView) -> ViewChange | None:
        """Return what is new in a view, which then counts as told; None before any whole one."""
        if self._version is None:
            return None
        after, known, processes = self._version, self._engines, self._processes
        self._version = view.version
        self._engines = {each.rank: each for each in view.engines}
        self._processes = {each.name: each for each in view.processes}
        left = [rank for rank in known if rank not in self._engines]
        changed: dict[int, LoadChange | None] = {}
        for entry in view.engines:
            if entry != (told := known.get(entry.rank)):
                changed[entry.rank] = None if told is None else _load_change(told, entry)
        for rank in left:
            self._partly.pop(rank, None)
        for rank, load in changed.items():
            if load is not None:
                self._partly.setdefault(rank)
            else:
                self._partly.pop(rank, None)
        for rank in [*self._partly][:WHOLE_IN_TURN]:
            del self._partly[rank]
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


def _load_change(told: EngineEntry, entry: EngineEntry) -> LoadChange | None:
    """Return how an engine's load has changed; None if more has, or the load is not known yet."""
    before, stats = told.stats, entry.stats
    if before is None or stats is None or replace(told, stats=stats) != entry:
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
    """Whether nothing else is new that has to be known at once."""
    return (
        before.topology == stats.topology
        and before.wave_running == stats.wave_running
        and before.hold_epoch == stats.hold_epoch
        and before.halted == stats.halted
        and before.alone == stats.alone
        and before.hands_over == stats.hands_over
        and before.sleep_level == stats.sleep_level
        and before.weight_version == stats.weight_version
        and (before.adapters and before.adapters.resident)
        == (stats.adapters and stats.adapters.resident)
    )
