"""Overload as an answer: what a node takes on, decided before a prompt is rendered or tokenized.

A request reserves its sequences and an estimate of its prompt tokens over all front ends of the
node; the estimate is replaced once the prompt is tokenized, and everything goes back when the
request ends, for whatever reason. What the engines can run at once is not counted against
`max_queue`: only what waits beyond it is.
"""

import math
from collections import deque
from collections.abc import Callable

from server.access.admission_table import AdmissionTable, Totals
from server.config import OverloadConfig

BYTES_PER_TOKEN = 4
"""Bytes of a request's body per prompt token, for estimates."""

RATE_WINDOW = 10.0
"""Seconds over which the drain rate is measured."""

_SAMPLE_INTERVAL = 0.5

LONGEST_RETRY_AFTER = 60
"""Most seconds that a refused client is asked to wait."""


class Overloaded(Exception):
    """The queue is full; the client may come again after `retry_after` seconds (HTTP 429)."""

    def __init__(self, what: str, limit: int, retry_after: int) -> None:
        super().__init__(
            f"The server is overloaded: its queue of {limit} {what} is full. "
            f"Try again in {retry_after} s."
        )
        self.what = what
        self.retry_after = retry_after


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

    __slots__ = ("_admission", "_requests", "_tokens")

    def __init__(self, admission: "Admission", requests: int, tokens: int) -> None:
        self._admission = admission
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
            self._admission.grow(more, tokens, now)
        elif more < 0:
            self._admission.table.add(0, more)
        self._tokens = tokens

    def computed(self, tokens: int) -> None:
        """These prompt tokens have been computed: they wait no longer."""
        if not self._tokens:
            return
        tokens = min(tokens, self._tokens)
        self._tokens -= tokens
        self._admission.table.add(0, -tokens)

    def release(self) -> None:
        """Give everything back; idempotent."""
        requests, tokens = self._requests, self._tokens
        self._requests = self._tokens = 0
        self._admission.table.end(requests, tokens)


class Admission:
    """Reserves places in a node's queue."""

    def __init__(
        self, table: AdmissionTable, limits: OverloadConfig, num_slots: Callable[[], int]
    ) -> None:
        """`num_slots` says how many sequences the engines can run at once."""
        self.table = table
        self._max_queue = limits.max_queue
        self._max_tokens = limits.max_queue_tokens
        self.counts_tokens = limits.max_queue_tokens is not None
        self._num_slots = num_slots
        self._rate = DrainRate()
        self._next_sample = 0.0

    def reserve(self, requests: int, tokens: int, now: float) -> Reservation:
        """Take a request on: so many sequences, so many prompt tokens (estimated).

        Raises:
            Overloaded: they do not fit into the queue.
        """
        table = self.table
        if not self.counts_tokens:
            tokens = 0
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_INTERVAL
            self._rate.sample(now, table.ended())
        room = self._has_room
        if not table.try_add(requests, tokens, room) and not (
            table.drop_dead() and table.try_add(requests, tokens, room)
        ):
            raise self._overloaded(requests, now)
        return Reservation(self, requests, tokens)

    def grow(self, more: int, tokens: int, now: float) -> None:
        """Reserve `more` prompt tokens for a request that then has `tokens` of them.

        Raises:
            Overloaded: they do not fit.
        """

        def has_room(totals: Totals, _requests: int, _tokens: int) -> bool:
            return self._tokens_fit(totals, tokens)

        table = self.table
        if not table.try_add(0, more, has_room) and not (
            table.drop_dead() and table.try_add(0, more, has_room)
        ):
            raise self._overloaded(0, now)

    def _has_room(self, totals: Totals, requests: int, tokens: int) -> bool:
        # What is larger than the whole queue is taken when nothing else is there. The slots are
        # counted only when they matter.
        if (
            totals.requests > self._max_queue
            and totals.requests != requests
            and totals.requests > self._max_queue + self._num_slots()
        ):
            return False
        return self._tokens_fit(totals, tokens)

    def _tokens_fit(self, totals: Totals, own: int) -> bool:
        return self._max_tokens is None or totals.tokens <= max(self._max_tokens, own)

    def _overloaded(self, requests: int, now: float) -> Overloaded:
        table, totals = self.table, self.table.totals()
        waiting = max(1, totals.requests - self._num_slots())
        # Half of the queue, so that those who come again neither find it full nor leave it empty.
        seconds = self._rate.seconds_for(waiting, now, table.ended()) / 2
        retry_after = min(LONGEST_RETRY_AFTER, max(1, math.ceil(seconds)))
        of_requests = totals.requests + requests > self._max_queue + self._num_slots()
        if of_requests or self._max_tokens is None:
            return Overloaded("requests", self._max_queue, retry_after)
        return Overloaded("prompt tokens", self._max_tokens, retry_after)
