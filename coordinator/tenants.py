"""What tenants have under way in all front ends, as these said themselves; no I/O."""

from collections.abc import Collection

from engine.shared.messages import TenantsInUse, TenantUse

Process = tuple[int, int]
"""Number and incarnation of a front end."""

MAX_USES = 8192
"""Entries in a view; those with the most sequences, which are the ones that limits concern."""


class TenantUsage:
    """The newest word of each front end, and their sums by admission table."""

    def __init__(self) -> None:
        self._said: dict[Process, list[TenantUse]] = {}

    def take(self, message: TenantsInUse) -> bool:
        """Take what a front end says; return whether that is new."""
        process = (message.front_end, message.incarnation)
        if self._said.get(process, []) == message.tenants:
            return False
        self._said[process] = message.tenants
        return True

    def keep(self, front_ends: Collection[Process]) -> bool:
        """Forget what others than these front ends said; return whether there was anything."""
        gone = [process for process in self._said if process not in front_ends]
        for process in gone:
            del self._said[process]
        return bool(gone)

    @property
    def sums(self) -> list[TenantUse]:
        """What each tenant holds in each admission table."""
        sums: dict[tuple[str, int], tuple[int, int]] = {}
        for uses in self._said.values():
            for use in uses:
                sequences, tokens = sums.get((use.table, use.tenant), (0, 0))
                sums[use.table, use.tenant] = (sequences + use.sequences, tokens + use.tokens)
        found = [TenantUse(*key, *amounts) for key, amounts in sums.items()]
        return sorted(found, key=lambda use: (-use.sequences, use.table, use.tenant))[:MAX_USES]
