"""Admission control: whether a node accepts a request, decided before rendering and tokenization.

A request reserves its sequences and an estimate of its prompt tokens, counted over all front ends
of the node; the estimate is replaced once the prompt is tokenized, and the reservation is released
when the request ends for any reason. What the engines can run concurrently does not count against
`max_queue`, only what waits beyond it.

With several tenants, none can fill the node. Once sequences wait, a tenant cannot hold more than is
still free: a single one gets half of all slots, two get a third each, and so on, so that there is
always room for one more. A tenant that holds nothing else has its request admitted as long as the
node has room.

Front ends of a node share counters in memory. Those of different nodes or pods learn each other's
usage through the coordinator: each reports its tenants' usage on change, and reads the sum over the
others in the cluster view. That sum is two messages old, about 0.2 s; until it arrives several
nodes may each admit a tenant's requests. Without a coordinator the last sums are used for `MAX_AGE`
seconds.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from engine.shared.messages import ClusterView, TenantsInUse, TenantUse
from server.access.admission_table import NOTHING, AdmissionTable, Room, Totals
from server.config import OverloadConfig, TenantConfig

MAX_TENANTS = 1024
"""Maximum tenants that a front end reports: those with the most sequences."""

REPORT_INTERVAL = 0.05
"""Minimum seconds between checks for changes to report."""

REPEAT_INTERVAL = 1.0
"""Seconds between repeated reports, in case one was lost."""

MAX_AGE = 10.0
"""Seconds for which the coordinator's sums are valid; it sends at least every three."""


class RemoteTenants:
    """Reports this front end's tenant usage to the coordinator, and knows that of other nodes."""

    def __init__(self, table: AdmissionTable, front_end: int, incarnation: int) -> None:
        self._table = table
        self._front_end = front_end
        self._incarnation = incarnation
        self._ids: dict[int, int] = {}
        self._used: dict[int, Totals] = {}
        self._used_at = float("-inf")
        self._is_counted = False
        self._last_report: list[TenantUse] = []
        self._repeat_at = float("-inf")

    def record(self, slot: int, tenant: int) -> None:
        """Record which tenant a slot of the table belongs to."""
        self._ids[slot] = tenant

    def of(self, slot: int, now: float) -> Totals:
        """Return the usage of a slot on other nodes, at `now` (seconds, monotonic)."""
        if now - self._used_at > MAX_AGE:
            return NOTHING
        return self._used.get(self._ids.get(slot, -1), NOTHING)

    def take(self, view: ClusterView, now: float) -> None:
        """Store the coordinator's newest view."""
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
        """Return the report to send to the coordinator, if tenants are counted and it is due."""
        if not self._is_counted:
            return None
        uses = []
        for slot, tenant in list(self._ids.items()):
            own = self._table.own(slot)
            if own == NOTHING:
                del self._ids[slot]
            else:
                uses.append(TenantUse(self._table.name, tenant, own.requests, own.tokens))
        uses.sort(key=lambda use: (-use.sequences, use.tenant))
        del uses[MAX_TENANTS:]
        if uses == self._last_report and now < self._repeat_at:
            return None
        self._last_report, self._repeat_at = uses, now + REPEAT_INTERVAL
        return TenantsInUse(self._front_end, self._incarnation, uses)


BYTES_PER_TOKEN = 4
"""Estimated bytes of request body per prompt token."""

RATE_WINDOW = 10.0
"""Seconds over which the rate of ended sequences is measured."""

_SAMPLE_INTERVAL = 0.5

LONGEST_RETRY_AFTER = 60
"""Maximum Retry-After in seconds."""


RejectionReason = Literal["queue", "queue_tokens", "key", "key_tokens", "share", "share_tokens"]
"""Limit that a refused request exceeded: the node's, its key's, or its fair share of the node's;
each in sequences or in waiting prompt tokens."""


class Overloaded(Exception):
    """The queue is full; the client can retry after `retry_after` seconds (HTTP 429).

    `what` is the exceeded quantity: requests or prompt tokens.
    """

    def __init__(self, limit: RejectionReason, reason: str, retry_after: int) -> None:
        super().__init__(f"{reason} Try again in {retry_after} s.")
        self.what = "prompt tokens" if limit.endswith("tokens") else "requests"
        self.retry_after = retry_after


_Limit = tuple[RejectionReason, str]
"""The exceeded limit, and its error message."""


class DrainRate:
    """The rate at which sequences end, from periodic samples of a counter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float, ended: int) -> None:
        """Record a sample of the counter."""
        samples = self._samples
        samples.append((now, ended))
        while now - samples[0][0] > RATE_WINDOW:
            samples.popleft()

    def seconds_for(self, count: int, now: float, ended: int) -> float:
        """Return the seconds that `count` sequences take at the measured rate, of at least one."""
        if not self._samples:
            return 0.0
        started_at, before = self._samples[0]
        return count * (now - started_at) / max(1, ended - before)


class Reservation:
    """The reservation of one request; `release` must always be called."""

    __slots__ = ("_admission", "_requests", "_slot", "_tokens")

    def __init__(self, admission: "Admission", requests: int, tokens: int, slot: int) -> None:
        self._admission = admission
        self._slot = slot
        self._requests = requests
        self._tokens = tokens

    def recount(self, tokens: int, now: float) -> None:
        """Replace the estimate by the actual number of prompt tokens.

        Raises:
            Overloaded: there are more than estimated, and they do not fit.
        """
        if not self._admission.counts_tokens:
            return
        more = tokens - self._tokens
        if more > 0:
            self._admission.grow(more, tokens, now, self._slot)
        elif more < 0:
            self._admission.table.add(0, more, self._slot)
        self._tokens = tokens

    def computed(self, tokens: int) -> None:
        """Report that these prompt tokens have been computed and no longer wait."""
        if not self._tokens:
            return
        tokens = min(tokens, self._tokens)
        self._tokens -= tokens
        self._admission.table.add(0, -tokens, self._slot)

    def release(self) -> None:
        """Release everything; idempotent."""
        requests, tokens = self._requests, self._tokens
        self._requests = self._tokens = 0
        self._admission.table.end(requests, tokens, self._slot)


@dataclass(eq=False)
class Admission:
    """Makes reservations in a node's queue."""

    table: AdmissionTable
    limits: OverloadConfig
    num_slots: Callable[[], int]
    """Returns the number of sequences that the engines can run concurrently."""
    tenants: TenantConfig = field(default_factory=TenantConfig)
    _: KW_ONLY
    several: Callable[[], bool] = lambda: False
    """Returns whether there are several tenants."""
    remote_tenants: RemoteTenants | None = None
    """Their usage on other nodes; None to ignore it."""
    on_rejection: Callable[[RejectionReason], None] = lambda reason: None
    """Called for every refused request."""

    def __post_init__(self) -> None:
        self._max_queue = self.limits.max_queue
        self._max_tokens = self.limits.max_queue_tokens
        bounds = self._max_tokens, self.tenants.max_queue_tokens_per_key
        self.counts_tokens = bounds != (None, None)
        self._rate = DrainRate()
        self._next_sample = 0.0

    def reserve(
        self, requests: int, tokens: int, now: float, slot: int = 0, tenant: int = 0
    ) -> Reservation:
        """Admit a request with `requests` sequences and `tokens` (estimated) prompt tokens.

        `slot` is the tenant's slot in the table.

        Raises:
            Overloaded: they do not fit into the queue, or into the tenant's share.
        """
        table = self.table
        if not self.counts_tokens:
            tokens = 0
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_INTERVAL
            self._rate.sample(now, table.ended())
        if self.remote_tenants is not None:
            self.remote_tenants.record(slot, tenant)
        others = self._others(slot, now)

        def room(totals: Totals, own: Totals) -> bool:
            return self._limit(totals, own, others, requests, tokens) is None

        if not self._try_add(requests, tokens, room, slot):
            raise self._overloaded(requests, tokens, now, slot)
        return Reservation(self, requests, tokens, slot)

    def grow(self, more: int, tokens: int, now: float, slot: int = 0) -> None:
        """Reserve `more` prompt tokens for a request that then has `tokens` in total.

        Raises:
            Overloaded: they do not fit.
        """
        others = self._others(slot, now)

        def room(totals: Totals, own: Totals) -> bool:
            return self._limit_of_tokens(totals, own, others, tokens) is None

        if not self._try_add(0, more, room, slot):
            raise self._overloaded(0, tokens, now, slot)

    def _try_add(self, requests: int, tokens: int, room: Room, slot: int) -> bool:
        """Add to the table if there is room, possibly after clearing rows of dead front ends."""
        table = self.table
        return table.try_add(requests, tokens, room, slot) or (
            table.drop_dead() and table.try_add(requests, tokens, room, slot)
        )

    # A request larger than the whole queue is accepted if the queue is empty, unless it would lock
    # out other tenants. Slots are only computed when needed.

    def _others(self, slot: int, now: float) -> Totals:
        return NOTHING if self.remote_tenants is None else self.remote_tenants.of(slot, now)

    def _limit(
        self, totals: Totals, own: Totals, others: Totals, requests: int, tokens: int
    ) -> _Limit | None:
        """Return the exceeded limit, if any; `totals` and `own` include the new request."""
        is_only = totals.requests == requests and not self.several()
        if totals.requests > self._max_queue and not is_only:
            capacity = self._max_queue + self.num_slots()
            if totals.requests > capacity:
                return "queue", _FULL.format(self._max_queue, "requests")
        limit = self.tenants.max_sequences_per_key
        if limit is not None and own.requests + others.requests > limit:
            return "key", _PER_KEY.format("sequences", "max_sequences_per_key", limit)
        if self.several() and own.requests > requests:
            slots = self.num_slots()
            free = self._max_queue + slots - totals.requests
            if totals.requests > slots and own.requests > free:
                return "share", _UNFAIR.format("sequences")
        return self._limit_of_tokens(totals, own, others, tokens)

    def _limit_of_tokens(
        self, totals: Totals, own: Totals, others: Totals, tokens: int
    ) -> _Limit | None:
        what = "prompt tokens"
        if self._max_tokens is not None and totals.tokens > max(self._max_tokens, tokens):
            return "queue_tokens", _FULL.format(self._max_tokens, what)
        key_limit = self.tenants.max_queue_tokens_per_key
        if key_limit is not None and own.tokens + others.tokens > max(key_limit, tokens):
            return "key_tokens", _PER_KEY.format(what, "max_queue_tokens_per_key", key_limit)
        if self.several() and self._max_tokens is not None:
            free = self._max_tokens - totals.tokens
            if own.tokens > max(tokens, free):
                return "share_tokens", _UNFAIR.format(what)
        return None

    def _overloaded(self, requests: int, tokens: int, now: float, slot: int) -> Overloaded:
        table = self.table
        totals, own = table.totals(), table.of_tenant(slot)
        waiting = max(1, totals.requests - self.num_slots())
        # Half of the queue, so that retries neither find it full nor leave it empty.
        seconds = self._rate.seconds_for(waiting, now, table.ended()) / 2
        retry_after = min(LONGEST_RETRY_AFTER, max(1, math.ceil(seconds)))
        limit = self._limit(
            Totals(totals.requests + requests, totals.tokens + tokens),
            Totals(own.requests + requests, own.tokens + tokens),
            self._others(slot, now),
            requests,
            tokens,
        )
        # None: a request has ended in the meantime.
        name, reason = limit or ("queue", _FULL.format(self._max_queue, "requests"))
        self.on_rejection(name)
        return Overloaded(name, reason, retry_after)


_FULL = "The server is overloaded: its queue of {} {} is full."
_PER_KEY = "Limit reached for this API key: too many {} ({} is {})."
_UNFAIR = "This API key has reached its fair share of the queue: too many {}."
