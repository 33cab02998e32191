"""Assigns adapter slots: at most `max_loras` adapters can be used in one step.

An adapter is given a slot when its first sequence starts, and keeps it until another adapter needs
it; the least recently used adapter that is not pinned is evicted. While adapters wait for a slot, a
resident adapter has it for at least `TURN_STEPS` steps. Then as many residents as there are waiting
adapters drain, oldest first: they take no new sequences, and sequences that still run after another
`TURN_STEPS` steps are preempted. Free slots go to waiting adapters in FIFO order, so each waits a
bounded number of steps regardless of the load on the others.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

TURN_STEPS = 64

NO_ADAPTER = -1


@dataclass(slots=True)
class _Resident:
    slot: int
    since: int
    """Step in which its current turn began."""
    users: int = 0
    """Running sequences that use it."""
    drains: bool = False
    """Whether it accepts no new sequences."""


class AdapterSlots:
    """Assigns slots to adapters, identified by version; "" means no adapter."""

    def __init__(self, num_slots: int) -> None:
        self.held: set[str] = set()
        """Versions that the engine has loaded, so that they can be placed in slots."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._residents: dict[str, _Resident] = {}
        """Least recently used first."""
        self._wanted: dict[str, None] = {}
        """Adapters that wait for a slot, in FIFO order."""
        self._pinned: set[str] = set()
        self._placed: dict[int, str] = {}
        self._step = 0

    # -- queries ---------------------------------------------------------------------------------

    @property
    def residents(self) -> list[str]:
        """Adapters that occupy slots."""
        return list(self._residents)

    @property
    def running(self) -> list[str]:
        """Adapters that running sequences use."""
        return [version for version, resident in self._residents.items() if resident.users]

    def admits(self, version: str, *, first: bool = False) -> bool:
        """Return whether a sequence with this adapter can start now; `first` skips the queue."""
        if not version:
            return True
        resident = self._residents.get(version)
        if resident is not None:
            return first or not resident.drains
        if first:
            return self._num_available > 0
        before = 0
        for each in self._wanted:
            if each == version:
                break
            before += 1
        return before < self._num_available

    def overdue(self) -> set[str]:
        """Return the adapters whose sequences have to be preempted."""
        return {
            version
            for version, resident in self._residents.items()
            if resident.drains and self._step - resident.since >= 2 * TURN_STEPS
        }

    # -- steps and sequences ---------------------------------------------------------------------

    def begin_step(self, waiting: Collection[str]) -> None:
        """Begin planning a step, given the adapters of all waiting sequences."""
        self._step += 1
        if not waiting and not self._wanted:
            return
        waiting_versions = {version for version in waiting if version not in self._residents}
        self._wanted = {version: None for version in self._wanted if version in waiting_versions}
        self._wanted.update(
            dict.fromkeys(version for version in waiting if version in waiting_versions)
        )
        missing = len(self._wanted) - self._num_available
        by_age = sorted(self._residents.items(), key=lambda item: item[1].since)
        for version, resident in by_age:
            has_turn = self._step - resident.since < TURN_STEPS
            resident.drains = (
                missing > 0 and resident.users > 0 and not has_turn and version not in self._pinned
            )
            missing -= resident.drains

    def take(self, version: str) -> int:
        """Start a sequence and return its adapter's slot; the adapter must be admitted."""
        if not version:
            return NO_ADAPTER
        resident = self._residents.pop(version, None)
        if resident is None:
            if not self._free:
                self._evict(next(iter(self._evictable())))
            resident = _Resident(self._free.pop(), self._step)
            self._placed[resident.slot] = version
            self._wanted.pop(version, None)
        elif not resident.users and not self._wanted:
            resident.since = self._step
        self._residents[version] = resident  # now the most recently used
        resident.users += 1
        return resident.slot

    def release(self, version: str) -> None:
        """Record that a sequence no longer uses its adapter."""
        if version:
            self._residents[version].users -= 1

    def take_placed(self) -> dict[int, str]:
        """Return and clear the adapters to place with the step being planned, by slot."""
        placed, self._placed = self._placed, {}
        return placed

    def vacate(self) -> None:
        """Clear all slots, after the executor has dropped their contents; none may be in use."""
        assert not self.running
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._residents.clear()
        self._placed.clear()

    # -- loading, pinning and removal ------------------------------------------------------------

    def hold(self, version: str) -> None:
        """Allow requests to use a loaded adapter; idempotent."""
        self.held.add(version)

    def pin(self, version: str) -> bool:
        """Pin an adapter to its slot, once it has one; return False if too many are pinned."""
        if version not in self._pinned and len(self._pinned) + 1 >= self._num_slots:
            return False
        self._pinned.add(version)
        return True

    def unpin(self, version: str) -> None:
        """Allow the adapter to be evicted."""
        self._pinned.discard(version)

    def drop(self, version: str) -> None:
        """Remove an adapter permanently; no sequence may use it."""
        self.held.discard(version)
        self.unpin(version)
        self._wanted.pop(version, None)
        if version in self._residents:
            self._evict(version)

    @property
    def _num_available(self) -> int:
        return len(self._free) + sum(1 for _ in self._evictable())

    def _evictable(self) -> Iterable[str]:
        return (
            version
            for version, resident in self._residents.items()
            if not resident.users and version not in self._pinned
        )

    def _evict(self, version: str) -> None:
        resident = self._residents.pop(version)
        assert not resident.users, "sequences use it"
        self._placed.pop(resident.slot, None)
        self._free.append(resident.slot)

    def check_integrity(self, versions: Iterable[str]) -> None:
        """Raise AssertionError if a slot is leaked, shared or counted wrongly."""
        users = Counter(version for version in versions if version)
        held = {version: each.users for version, each in self._residents.items() if each.users}
        assert users == held, "users of adapters are counted wrongly"
        slots = [each.slot for each in self._residents.values()] + self._free
        assert sorted(slots) == list(range(self._num_slots)), "slots of adapters are leaked"
