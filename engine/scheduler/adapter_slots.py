"""Which adapters, at most `max_loras`, the next step can use.

An adapter takes a slot with its first sequence that runs and keeps it afterwards until another
needs it: the least recently used one goes, unless it is pinned. While adapters wait for a slot,
those that have one have it for a turn of `TURN_STEPS` steps. Then as many as are waited for, those
first that came first, take no new sequences, and what still runs of them after as many steps again
is preempted. Free slots go to adapters in the order in which they began to wait, so that each
waits for a bounded number of steps, however many requests there are for the others.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

TURN_STEPS = 64

NO_ADAPTER = -1


@dataclass(slots=True)
class _Resident:
    """An adapter that has a slot."""

    slot: int
    since: int
    """The step in which its turn began."""
    users: int = 0
    """Sequences that hold a slot with it."""
    drains: bool = False
    """Whether it takes no new sequences."""


class AdapterSlots:
    """Hands out the slots of adapters, which are known by their versions; "" is none."""

    def __init__(self, num_slots: int) -> None:
        self.held: set[str] = set()
        """Versions that the engine has, so that they can be put into slots."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._residents: dict[str, _Resident] = {}
        """The least recently used one first."""
        self._wanted: dict[str, None] = {}
        """Wait for a slot, in the order in which they began to."""
        self._pinned: set[str] = set()
        self._placed: dict[int, str] = {}
        self._step = 0

    # -- what is there ---------------------------------------------------------------------------

    @property
    def residents(self) -> list[str]:
        """The adapters that have slots."""
        return list(self._residents)

    @property
    def running(self) -> list[str]:
        """Those of them that sequences use."""
        return [version for version, resident in self._residents.items() if resident.users]

    def admits(self, version: str, *, first: bool = False) -> bool:
        """Whether a sequence with this adapter may start now, or `first` before all that wait."""
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
        """Return the adapters whose sequences have to give way."""
        return {
            version
            for version, resident in self._residents.items()
            if resident.drains and self._step - resident.since >= 2 * TURN_STEPS
        }

    # -- steps and sequences ---------------------------------------------------------------------

    def begin_step(self, waiting: Collection[str]) -> None:
        """Begin to plan a step, with the adapters of all sequences that wait."""
        self._step += 1
        if not waiting and not self._wanted:
            return
        wanted = {version for version in waiting if version not in self._residents}
        self._wanted = {version: None for version in self._wanted if version in wanted}
        self._wanted.update(dict.fromkeys(version for version in waiting if version in wanted))
        missing = len(self._wanted) - self._num_available
        by_age = sorted(self._residents.items(), key=lambda item: item[1].since)
        for version, resident in by_age:
            has_turn = self._step - resident.since < TURN_STEPS
            resident.drains = (
                missing > 0 and resident.users > 0 and not has_turn and version not in self._pinned
            )
            missing -= resident.drains

    def take(self, version: str) -> int:
        """A sequence starts: return the slot of its adapter, which has to be admitted."""
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
        self._residents[version] = resident  # as the one that was used last
        resident.users += 1
        return resident.slot

    def release(self, version: str) -> None:
        """A sequence needs its adapter no longer."""
        if version:
            self._residents[version].users -= 1

    def take_placed(self) -> dict[int, str]:
        """Return which slots get other adapters with the step that is being planned."""
        placed, self._placed = self._placed, {}
        return placed

    def vacate(self) -> None:
        """Forget what is in the slots, which nobody may use: the executor has."""
        assert not self.running
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._residents.clear()
        self._placed.clear()

    # -- what operators want ---------------------------------------------------------------------

    def pin(self, version: str) -> bool:
        """Let an adapter keep its slot from when it gets one; False if too many do already."""
        if version not in self._pinned and len(self._pinned) + 1 >= self._num_slots:
            return False
        self._pinned.add(version)
        return True

    def unpin(self, version: str) -> None:
        """Let others have its slot."""
        self._pinned.discard(version)

    def drop(self, version: str) -> None:
        """An adapter is gone for good; no sequence may use it."""
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
