"""Overload as an answer: what a node takes on, decided before a prompt is rendered or tokenized.

A request reserves its sequences and an estimate of its prompt tokens over all front ends of the
node; the estimate is replaced once the prompt is tokenized, and everything goes back when the
request ends, for whatever reason. What the engines can run at once is not counted against
`max_queue`: only what waits beyond it is.

Where there are several tenants, none may fill the node. What one of them holds has to fit into what
is left free once sequences wait: alone it gets half of all places, two get a third each, and so
on, so that there is always room for one more. A tenant that holds nothing else gets its request in
as long as the node takes it.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from server.access.admission_table import AdmissionTable, Totals
from server.config import OverloadConfig, TenantConfig

BYTES_PER_TOKEN = 4
"""Bytes of a request's body per prompt token, for estimates."""

RATE_WINDOW = 10.0
"""Seconds over which the drain rate is measured."""

_SAMPLE_INTERVAL = 0.5

LONGEST_RETRY_AFTER = 60
"""Most seconds that a refused client is asked to wait."""


class Overloaded(Exception):
    """A queue is full; the client may come again after `retry_after` seconds (HTTP 429).

    `what` is full of requests or of prompt tokens.
    """

    def __init__(self, what: str, reason: str, retry_after: int) -> None:
        super().__init__(f"{reason} Try again in {retry_after} s.")
        self.what = what
        self.retry_after = retry_after


class _Limit(NamedTuple):
    """What a request does not fit into: what is counted, and how that is told."""

    what: str
    reason: str


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
    ) -> None:
        """`num_slots` says how many sequences the engines can run at once.

        `several` says whether there are more tenants than one.
        """
        self.table = table
        self._max_queue = limits.max_queue
        self._max_tokens = limits.max_queue_tokens
        self._tenants = tenants
        self._several = several
        self.counts_tokens = (limits.max_queue_tokens, tenants.max_queue_tokens_per_key) != (
            None,
            None,
        )
        self._num_slots = num_slots
        self._rate = DrainRate()
        self._next_sample = 0.0

    def reserve(self, requests: int, tokens: int, now: float, place: int = 0) -> Reservation:
        """Take a request on: so many sequences, so many prompt tokens (estimated).

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

        def room(totals: Totals, own: Totals) -> bool:
            return self._limit(totals, own, requests, tokens) is None

        if not table.try_add(requests, tokens, room, place) and not (
            table.drop_dead() and table.try_add(requests, tokens, room, place)
        ):
            raise self._overloaded(requests, tokens, now, place)
        return Reservation(self, requests, tokens, place)

    def grow(self, more: int, tokens: int, now: float, place: int = 0) -> None:
        """Reserve `more` prompt tokens for a request that then has `tokens` of them.

        Raises:
            Overloaded: they do not fit.
        """

        def room(totals: Totals, own: Totals) -> bool:
            return self._limit_of_tokens(totals, own, tokens) is None

        table = self.table
        if not table.try_add(0, more, room, place) and not (
            table.drop_dead() and table.try_add(0, more, room, place)
        ):
            raise self._overloaded(0, tokens, now, place)

    # What is larger than a whole queue is taken when nothing else is there, unless it would shut
    # other tenants out. The slots are counted only when they matter.

    def _limit(self, totals: Totals, own: Totals, requests: int, tokens: int) -> _Limit | None:
        """Return what does not fit; the newcomer is part of both sums."""
        alone = totals.requests == requests and not self._several()
        if totals.requests > self._max_queue and not alone:
            places = self._max_queue + self._num_slots()
            if totals.requests > places:
                return _Limit("requests", _FULL.format(self._max_queue, "requests"))
        most = self._tenants.max_sequences_per_key
        if most is not None and own.requests > most:
            return _Limit("requests", _PER_KEY.format("sequences", "max_sequences_per_key", most))
        if self._several() and own.requests > requests:
            slots = self._num_slots()
            free = self._max_queue + slots - totals.requests
            if totals.requests > slots and own.requests > free:
                return _Limit("requests", _UNFAIR.format("sequences"))
        return self._limit_of_tokens(totals, own, tokens)

    def _limit_of_tokens(self, totals: Totals, own: Totals, tokens: int) -> _Limit | None:
        what = "prompt tokens"
        if self._max_tokens is not None and totals.tokens > max(self._max_tokens, tokens):
            return _Limit(what, _FULL.format(self._max_tokens, what))
        most = self._tenants.max_queue_tokens_per_key
        if most is not None and own.tokens > max(most, tokens):
            return _Limit(what, _PER_KEY.format(what, "max_queue_tokens_per_key", most))
        if not self._several() or self._max_tokens is None or own.tokens <= tokens:
            return None
        free = self._max_tokens - totals.tokens
        return _Limit(what, _UNFAIR.format(what)) if own.tokens > free else None

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
            requests,
            tokens,
        )
        if limit is None:  # somebody has left meanwhile
            limit = _Limit("requests", _FULL.format(self._max_queue, "requests"))
        return Overloaded(limit.what, limit.reason, retry_after)


_FULL = "The server is overloaded: its queue of {} {} is full."
_PER_KEY = "This API key has as many {} here as one may have ({} is {})."
_UNFAIR = "This API key has as many {} here as are left free to others."
