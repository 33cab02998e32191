"""How many engines are expected, and which of them are missing, why, and for how long.

A state machine without I/O. Engines that fall silent leave the view of the cluster, and those that
die before they join, or wait for a machine, never enter it. So missing engines are tracked here: up
to the number that the setting or the nodes' supervisors give; without a number, engines that ended
unasked, until their ranks are taken again.
"""

from collections.abc import Collection

from engine.shared.messages import AbsenceReason, MissingEngine

MEMORY = 3600.0
"""Seconds for which an engine that died counts as missing if no number is expected."""


class Expected:
    """The engines of one group that are expected.

    Args:
        number: how many, None if that is not known.
        planned: how many will be there once all nodes have joined, if the head's settings say so.
    """

    def __init__(self, number: int | None = None, planned: int | None = None) -> None:
        self.number = planned if number is None else number
        self.planned = planned
        self._reasons: dict[int, AbsenceReason] = {}
        self._since: dict[int, float] = {}

    def follow(self, wanted: int | None) -> None:
        """The supervisors of the nodes that have joined run this many engines together."""
        self.number = wanted if self.planned is None else max(self.planned, wanted or 0)

    def left(self, rank: int, reason: AbsenceReason) -> None:
        """An engine has gone."""
        self._reasons[rank] = reason
        self._since.pop(rank, None)

    def missing(self, present: Collection[int], now: float) -> list[MissingEngine]:
        """Return the missing engines, the lowest rank first; `now` is in seconds, monotonic."""
        for rank in present:
            self._reasons.pop(rank, None)
        absent = self._absent(frozenset(present), now)
        self._since = {rank: self._since.get(rank, now) for rank in absent}
        return [
            MissingEngine(rank, self._reasons.get(rank, "not_joined"), now - self._since[rank])
            for rank in sorted(absent)
        ]

    def _absent(self, present: frozenset[int], now: float) -> list[int]:
        if self.number is None:
            for rank, reason in list(self._reasons.items()):
                if reason == "drained" or now - self._since.get(rank, now) > MEMORY:
                    del self._reasons[rank]
            return list(self._reasons)
        short = max(0, self.number - len(present))
        # Whose end was seen comes first, one that was ordered last; the lowest ranks are the usual.
        known = sorted(self._reasons, key=lambda rank: (self._reasons[rank] == "drained", rank))
        never = (rank for rank in range(self.number) if rank not in present)
        chosen = list(dict.fromkeys([*known, *never]))[:short]
        self._reasons = {rank: why for rank, why in self._reasons.items() if rank in chosen}
        return chosen
