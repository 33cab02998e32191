"""What tenants have under way in front ends that do not share the admission table, by the view.

Front ends of one node count together in shared memory. Those of other nodes or pods hear of each
other through the coordinator: each tells what its tenants use when that changes, and reads the sum
of the others in the cluster view. What is read here is as old as two such messages, some 0.2 s;
until then several nodes may each give a tenant what is left. Without a coordinator the last sums
count for `MAX_AGE` seconds.
"""

from engine.shared.messages import ClusterView, TenantsInUse, TenantUse
from server.access.admission_table import NOTHING, AdmissionTable, Totals

MAX_TENANTS = 1024
"""Tenants that a front end tells of: those with the most sequences."""

SAY_INTERVAL = 0.05
"""Seconds between two looks at what has changed."""

REPEAT_INTERVAL = 1.0
"""Seconds after which it is told again, in case it was lost."""

MAX_AGE = 10.0
"""Seconds for which the coordinator's sums count; it sends at least every three."""


class TenantsElsewhere:
    """Tells the coordinator what this front end's tenants use, and knows what they use elsewhere.

    Args:
        table: where this front end counts.
        front_end: its number.
        incarnation: of its process.
    """

    def __init__(self, table: AdmissionTable, front_end: int, incarnation: int) -> None:
        self._table = table
        self._front_end = front_end
        self._incarnation = incarnation
        self._ids: dict[int, int] = {}
        self._used: dict[int, Totals] = {}
        self._used_at = float("-inf")
        self._is_counted = False
        self._said: list[TenantUse] = []
        self._repeat_at = float("-inf")

    def seen(self, place: int, tenant: int) -> None:
        """A request of a tenant is counted at a place of the table."""
        self._ids[place] = tenant

    def of(self, place: int, now: float) -> Totals:
        """Return what the tenant of a place holds elsewhere, at `now` (seconds, monotonic)."""
        if now - self._used_at > MAX_AGE:
            return NOTHING
        return self._used.get(self._ids.get(place, -1), NOTHING)

    def take(self, view: ClusterView, now: float) -> None:
        """Take the coordinator's newest view."""
        self._is_counted = view.tenants is not None
        used: dict[int, Totals] = {}
        for each in view.tenants or ():
            if each.table != self._table.name:
                known = used.get(each.tenant, NOTHING)
                used[each.tenant] = Totals(
                    known.requests + each.sequences, known.tokens + each.tokens
                )
        self._used, self._used_at = used, now

    def notice(self, now: float) -> TenantsInUse | None:
        """Return what to tell the coordinator now, if it counts and something is new."""
        if not self._is_counted:
            return None
        uses = self._uses()
        if uses == self._said and now < self._repeat_at:
            return None
        self._said, self._repeat_at = uses, now + REPEAT_INTERVAL
        return TenantsInUse(self._front_end, self._incarnation, uses)

    def _uses(self) -> list[TenantUse]:
        uses = []
        for place, tenant in list(self._ids.items()):
            own = self._table.own(place)
            if own == NOTHING:
                del self._ids[place]
            else:
                uses.append(TenantUse(self._table.name, tenant, own.requests, own.tokens))
        uses.sort(key=lambda use: (-use.sequences, use.tenant))
        return uses[:MAX_TENANTS]
