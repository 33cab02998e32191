"""Overload as an answer: what a node takes on, decided before a prompt is rendered or tokenized.

A request reserves its sequences and an estimate of its prompt tokens over all front ends of the
node; the estimate is replaced once the prompt is tokenized, and everything goes back when the
request ends, for whatever reason. What the engines can run at once is not counted against
`max_queue`: only what waits beyond it is.

Where there are several tenants, none may fill the node. What one of them holds has to fit into what
is left free once sequences wait: alone it gets half of all places, two get a third each, and so
on, so that there is always room for one more. A tenant that holds nothing else gets its request in
as long as the node takes it.

Front ends of one node count together in shared memory. Those of other nodes or pods hear of each
other through the coordinator: each tells what its tenants use when that changes, and reads the sum
of the others in the cluster view. What is read there is as old as two such messages, some 0.2 s;
until then several nodes may each give a tenant what is left. Without a coordinator the last sums
count for `MAX_AGE` seconds.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Literal

from engine.shared.messages import ClusterView, TenantsInUse, TenantUse
from server.access.admission_table import NOTHING, AdmissionTable, Room, Totals
from server.config import OverloadConfig, TenantConfig

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
        uses = []
        for place, tenant in list(self._ids.items()):
            own = self._table.own(place)
            if own == NOTHING:
                del self._ids[place]
            else:
                uses.append(TenantUse(self._table.name, tenant, own.requests, own.tokens))
        uses.sort(key=lambda use: (-use.sequences, use.tenant))
        del uses[MAX_TENANTS:]
        if uses == self._said and now < self._repeat_at:
            return None
        self._said, self._repeat_at = uses, now + REPEAT_INTERVAL
        return TenantsInUse(self._front_end, self._incarnation, uses)


BYTES_PER_TOKEN = 4
"""Bytes of a request's body per prompt token, for estimates."""

RATE_WINDOW = 10.0
"""Seconds over which the drain rate is measured."""

_SAMPLE_INTERVAL = 0.5

LONGEST_RETRY_AFTER = 60
"""Most seconds that a refused client is asked to wait."""


RejectionReason = Literal["queue", "queue_tokens", "key", "key_tokens", "share", "share_tokens"]
"""Which limit a refused request met: the node's, its key's, or its fair share of the node's; each
in sequences or in waiting prompt tokens."""


class Overloaded(Exception):
    """A queue is full; the client may come again after `retry_after` seconds (HTTP 429).

    `what` is full of requests or of prompt tokens.
    """

    def __init__(self, limit: RejectionReason, reason: str, retry_after: int) -> None:
        super().__init__(f"{reason} Try again in {retry_after} s.")
        self.what = "prompt tokens" if limit.endswith("tokens") else "requests"
        self.retry_after = retry_after


_Limit = tuple[RejectionReason, str]
"""What a request does not fit into, and how that is told."""


class DrainRate:
    """How many sequences end per second, from a counter that is read now and then."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float, ended: int) -> None:
        """Note the counter."""
        samples = self._samples
        samples.append((now, ended))
        while now - samples[0][0] > RATE_WINDOW:
            samples.popleft()

    def seconds_for(self, count: int, now: float, ended: int) -> float:
        """Return how long `count` sequences take at the measured rate, at least one being done."""
        if not self._samples:
            return 0.0
        began, before = self._samples[0]
        return count * (now - began) / max(1, ended - before)


class Reservation:
    """The place of one request; `release` must be called whatever happens."""

    __slots__ = ("_admission", "_place", "_requests", "_tokens")

    def __init__(self, admission: "Admission", requests: int, tokens: int, place: int) -> None:
        self._admission = admission
        self._place = place
        self._requests = requests
        self._tokens = tokens

    def recount(self, tokens: int, now: float) -> None:
        """Replace the estimate by the number of prompt tokens that there are.

        Raises:
            Overloaded: there are more than estimated, and they do not fit.
        """
        if not self._admission.counts_tokens:
            return
        more = tokens - self._tokens
        if more > 0:
            self._admission.grow(more, tokens, now, self._place)
        elif more < 0:
            self._admission.table.add(0, more, self._place)
        self._tokens = tokens

    def computed(self, tokens: int) -> None:
        """These prompt tokens have been computed: they wait no longer."""
        if not self._tokens:
            return
        tokens = min(tokens, self._tokens)
        self._tokens -= tokens
        self._admission.table.add(0, -tokens, self._place)

    def release(self) -> None:
        """Give everything back; idempotent."""
        requests, tokens = self._requests, self._tokens
        self._requests = self._tokens = 0
        self._admission.table.end(requests, tokens, self._place)


class Admission:
    """Reserves places in a node's queue."""

    def __init__(
        self,
        table: AdmissionTable,
        limits: OverloadConfig,
        num_slots: Callable[[], int],
        tenants: TenantConfig = TenantConfig(),
        *,
        several: Callable[[], bool] = lambda: False,
        elsewhere: TenantsElsewhere | None = None,
        on_rejection: Callable[[RejectionReason], None] = lambda reason: None,
    ) -> None:
        """`num_slots` says how many sequences the engines can run at once.

        `several` says whether there are more tenants than one. `elsewhere` knows what they hold in
        other nodes' front ends; None: nothing that counts. `on_rejection` is called for every
        request that is refused.
        """
        self.table = table
        self._max_queue = limits.max_queue
        self._max_tokens = limits.max_queue_tokens
        self._tenants = tenants
        self._several = several
        self._elsewhere = elsewhere
        self._on_rejection = on_rejection
        bounds = limits.max_queue_tokens, tenants.max_queue_tokens_per_key
        self.counts_tokens = bounds != (None, None)
        self._num_slots = num_slots
        self._rate = DrainRate()
        self._next_sample = 0.0

    def reserve(
        self, requests: int, tokens: int, now: float, place: int = 0, tenant: int = 0
    ) -> Reservation:
        """Admit a request with `requests` sequences and `tokens` (estimated) prompt tokens.

        `place` is where its tenant is counted.

        Raises:
            Overloaded: they do not fit into the queue, or into the tenant's part of it.
        """
        table = self.table
        if not self.counts_tokens:
            tokens = 0
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_INTERVAL
            self._rate.sample(now, table.ended())
        if self._elsewhere is not None:
            self._elsewhere.seen(place, tenant)
        others = self._others(place, now)

        def room(totals: Totals, own: Totals) -> bool:
            return self._limit(totals, own, others, requests, tokens) is None

        if not self._try_add(requests, tokens, room, place):
            raise self._overloaded(requests, tokens, now, place)
        return Reservation(self, requests, tokens, place)

    def grow(self, more: int, tokens: int, now: float, place: int = 0) -> None:
        """Reserve `more` prompt tokens for a request that then has `tokens` of them.

        Raises:
            Overloaded: they do not fit.
        """
        others = self._others(place, now)

        def room(totals: Totals, own: Totals) -> bool:
            return self._limit_of_tokens(totals, own, others, tokens) is None

        if not self._try_add(0, more, room, place):
            raise self._overloaded(0, tokens, now, place)

    def _try_add(self, requests: int, tokens: int, room: Room, place: int) -> bool:
        """Add to the table if there is room, at the latest without front ends that have died."""
        table = self.table
        return table.try_add(requests, tokens, room, place) or (
            table.drop_dead() and table.try_add(requests, tokens, room, place)
        )

    # What is larger than a whole queue is taken when nothing else is there, unless it would shut
    # other tenants out. The slots are counted only when they matter.

    def _others(self, place: int, now: float) -> Totals:
        return NOTHING if self._elsewhere is None else self._elsewhere.of(place, now)

    def _limit(
        self, totals: Totals, own: Totals, others: Totals, requests: int, tokens: int
    ) -> _Limit | None:
        """Return what does not fit; the newcomer is part of `totals` and `own`."""
        alone = totals.requests == requests and not self._several()
        if totals.requests > self._max_queue and not alone:
            places = self._max_queue + self._num_slots()
            if totals.requests > places:
                return "queue", _FULL.format(self._max_queue, "requests")
        most = self._tenants.max_sequences_per_key
        if most is not None and own.requests + others.requests > most:
            return "key", _PER_KEY.format("sequences", "max_sequences_per_key", most)
        if self._several() and own.requests > requests:
            slots = self._num_slots()
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
        most = self._tenants.max_queue_tokens_per_key
        if most is not None and own.tokens + others.tokens > max(most, tokens):
            return "key_tokens", _PER_KEY.format(what, "max_queue_tokens_per_key", most)
        if self._several() and self._max_tokens is not None:
            free = self._max_tokens - totals.tokens
            if own.tokens > max(tokens, free):
                return "share_tokens", _UNFAIR.format(what)
        return None

    def _overloaded(self, requests: int, tokens: int, now: float, place: int) -> Overloaded:
        table = self.table
        totals, own = table.totals(), table.of_tenant(place)
        waiting = max(1, totals.requests - self._num_slots())
        # Half of the queue, so that those who come again neither find it full nor leave it empty.
        seconds = self._rate.seconds_for(waiting, now, table.ended()) / 2
        retry_after = min(LONGEST_RETRY_AFTER, max(1, math.ceil(seconds)))
        limit = self._limit(
            Totals(totals.requests + requests, totals.tokens + tokens),
            Totals(own.requests + requests, own.tokens + tokens),
            self._others(place, now),
            requests,
            tokens,
        )
        # None: a request has ended meanwhile.
        name, reason = limit or ("queue", _FULL.format(self._max_queue, "requests"))
        self._on_rejection(name)
        return Overloaded(name, reason, retry_after)


_FULL = "The server is overloaded: its queue of {} {} is full."
_PER_KEY = "Limit reached for this API key: too many {} ({} is {})."
_UNFAIR = "This API key has reached its fair share of the queue: too many {}."
