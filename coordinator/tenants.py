"""What tenants have in flight over all front ends, from their reports. No I/O."""

from collections.abc import Collection

from engine.shared.messages import TenantsInUse, TenantUse

Process = tuple[int, int]
"""Index and incarnation of a front end."""

MAX_USES = 8192
"""Maximum entries in a view; those with the most sequences are kept, where limits matter."""


class TenantUsage:
    """The newest report of each front end, and their sums by admission table."""

    def __init__(self) -> None:
        self._reports: dict[Process, list[TenantUse]] = {}

    def take(self, message: TenantsInUse) -> bool:
        """Record a front end's report; return whether it changed."""
        process = (message.front_end, message.incarnation)
        if self._reports.get(process, []) == message.tenants:
            return False
        self._reports[process] = message.tenants
        return True

    def keep(self, front_ends: Collection[Process]) -> bool:
        """Drop reports of all other front ends; return whether there were any."""
        departed = [process for process in self._reports if process not in front_ends]
        for process in departed:
            del self._reports[process]
        return bool(departed)

    @property
    def sums(self) -> list[TenantUse]:
        """Usage of each tenant in each admission table, summed, most sequences first."""
        sums: dict[tuple[str, int], tuple[int, int]] = {}
        for uses in self._reports.values():
            for use in uses:
                sequences, tokens = sums.get((use.table, use.tenant), (0, 0))
                sums[use.table, use.tenant] = (sequences + use.sequences, tokens + use.tokens)
        totals = [TenantUse(*key, *amounts) for key, amounts in sums.items()]
        return sorted(totals, key=lambda use: (-use.sequences, use.table, use.tenant))[:MAX_USES]
