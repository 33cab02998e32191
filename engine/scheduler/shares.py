"""Work received and slots used by each tenant, for `Fairness`.

Every tenant has a counter of work done for it (a virtual token counter): computed prompt tokens and
decoded tokens. The tenant with the lowest counter goes next. A tenant that arrives or returns
starts at the *virtual time*: the work it would have received if all present tenants had had equal
shares. So no tenant accumulates credit while absent, and the work by which others can overtake a
waiting tenant is bounded, regardless of their number. While a tenant is alone nothing is counted.
"""

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from engine.scheduler.request import Request

DECODE_WEIGHT = 2
"""Work of a decoded token in prompt tokens: it reads all weights for few rows."""

GUARDED_STEPS = 256
"""Steps for which prefill stays limited after another tenant's last request, so that a tenant that
sends requests occasionally does not wait for a long step."""

_NOTHING: Mapping[int, int] = MappingProxyType({})

_MAX_ABSENT = 256
"""Number of absent tenants above which obsolete counters are dropped."""


def increment(counts: dict[int, int], key: int) -> None:
    """Increment a count; zero counts are absent."""
    counts[key] = counts.get(key, 0) + 1


def decrement(counts: dict[int, int], key: int) -> None:
    """Decrement a count."""
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1


class PrefillQuota:
    """Remaining prompt tokens of each tenant in one step.

    A prompt covered by its tenant's credit is computed at once. One that must be split waits for a
    step without prompt tokens of other tenants, whose first tokens it would delay, and until most
    of the credit pays for the prompt rather than the fixed cost; meanwhile its tenant's credit
    grows. One longer than the limit for all tenants together is split into pieces of that length,
    each in a step without prompts of other tenants; one that fits, but not next to other prompts,
    waits.

    Args:
        limit: maximum tokens per tenant.
        credit: credits of the tenants whose limit is lower.
        mixed_cost: fixed cost to a tenant of having any prompt tokens in this step, in tokens.
        together: maximum tokens of all tenants in this step, regardless of credit.
    """

    def __init__(
        self,
        limit: int,
        credit: Mapping[int, int] = _NOTHING,
        mixed_cost: int = 0,
        together: int = sys.maxsize,
    ) -> None:
        self._limit = limit
        self.credit = credit
        self._mixed_cost = mixed_cost
        self._together = together
        self._taken: dict[int, int] = {}
        self._total = 0

    def available(self, tenant: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` prompt tokens a tenant can have."""
        taken = self._taken.get(tenant, 0)
        room, piece = self._limit - taken, self._together - self._total
        others_took = self._total > taken
        if tenant in self.credit:
            room = min(room, self.credit[tenant] - self._mixed_cost - taken)
            if num_tokens > room and (room < self._mixed_cost or others_took):
                return 0
        if num_tokens > piece and others_took:
            return 0
        return max(0, min(num_tokens, room, piece))

    def take(self, tenant: int, num_tokens: int) -> int:
        """Reserve what `available` returns for a tenant; return the number of tokens."""
        count = self.available(tenant, num_tokens)
        if count:
            self._taken[tenant] = self._taken.get(tenant, 0) + count
            self._total += count
        return count


class Shares:
    """The counters of one engine's tenants.

    While other tenants are present, a tenant has a credit of prompt tokens. Each step adds a few
    tokens; prompt tokens computed together with decodes are charged, plus a fixed cost. So an
    occasional short prompt does not wait, and an endless series of long ones does not make all
    steps long.

    Args:
        max_prefill: maximum prompt tokens per tenant and step while others are present, and the
            maximum credit.
    """

    def __init__(self, max_prefill: int = sys.maxsize) -> None:
        self._max_prefill = max_prefill
        self._quiet_steps = GUARDED_STEPS
        self._time = 0.0
        self._served: dict[int, float] = {}
        self._present: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self.credit: dict[int, int] = {}
        """Prompt-token credit by tenant; absent tenants have the maximum."""
        self._mixed_cost = 0
        self._together = sys.maxsize
        self.has_decodes = True
        """Prompts in a step without decodes delay no tokens: they need no credit, but use up any
        positive credit. One that must be split still waits for others' if its tenant is in debt."""
        self._mixing: set[int] = set()
        """Tenants with prompt tokens in this step, already charged the fixed cost."""

    @property
    def contended(self) -> bool:
        """Whether more than one tenant has requests, running or waiting."""
        return len(self._present) > 1

    def served(self, tenant: int) -> float:
        """Return a tenant's work counter."""
        return self._served.get(tenant, 0.0)

    def holds(self, tenant: int) -> bool:
        """Return whether any request of the tenant runs."""
        return tenant in self._running

    def add(self, tenant: int) -> None:
        """Add a request that has arrived."""
        if tenant not in self._present:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._time)
        increment(self._present, tenant)

    def remove(self, tenant: int) -> None:
        """Remove a request that has ended."""
        decrement(self._present, tenant)
        if len(self._served) > 2 * len(self._present) + _MAX_ABSENT:
            present, time = self._present, self._time
            self._served = {
                each: served
                for each, served in self._served.items()
                if each in present or served > time
            }

    def start(self, tenant: int) -> None:
        """Record that a request has started to run."""
        increment(self._running, tenant)

    def stop(self, tenant: int) -> None:
        """Record that a request has stopped running."""
        decrement(self._running, tenant)

    def charge(self, tenant: int, tokens: int) -> None:
        """Add work to a tenant's counter, if contended."""
        if self.contended:
            self._served[tenant] += tokens
            self._time += tokens / len(self._present)

    def prefill(self, tenant: int, tokens: int) -> None:
        """Charge a tenant for computed prompt tokens."""
        self.charge(tenant, tokens)
        if not self._guarded:
            return
        credit = self.credit.get(tenant, self._max_prefill)
        if not self.has_decodes:
            self.credit[tenant] = max(credit - tokens, min(credit, 0))
            return
        if tenant not in self._mixing:
            tokens += self._mixed_cost
            self._mixing.add(tenant)
        self.credit[tenant] = credit - tokens

    def quota(self, *, by_credit: bool = True) -> PrefillQuota:
        """Return each tenant's prefill limits for a step, optionally without credit."""
        if not self._guarded:
            return PrefillQuota(sys.maxsize)
        if not by_credit:
            return PrefillQuota(self._max_prefill)
        if not self.has_decodes:
            return PrefillQuota(self._max_prefill, dict.fromkeys(self.credit, sys.maxsize))
        together = self._together if self.contended else sys.maxsize
        return PrefillQuota(self._max_prefill, self.credit.copy(), self._mixed_cost, together)

    @property
    def _guarded(self) -> bool:
        return self.contended or self._quiet_steps < GUARDED_STEPS

    def begin_step(
        self, refill: int = sys.maxsize, mixed_cost: int = 0, together: int = sys.maxsize
    ) -> None:
        """Count a step's decodes: one token for each running request.

        Args:
            refill: prompt tokens added to each tenant's credit.
            mixed_cost: fixed cost of having any prompt tokens in this step, in tokens.
            together: maximum prompt tokens of all tenants in this step, if contended.
        """
        self.has_decodes = True
        self._together = together
        # The maximum credit must exceed this cost, however low it is.
        self._mixed_cost = min(mixed_cost, self._max_prefill // 4)
        self._mixing.clear()
        self.credit = {
            tenant: tokens + refill
            for tenant, tokens in self.credit.items()
            if tokens + refill < self._max_prefill
        }
        if not self.contended:
            self._quiet_steps += 1
            return
        self._quiet_steps = 0
        for tenant, running in self._running.items():
            self.charge(tenant, DECODE_WEIGHT * running)

    def check_integrity(self, present: Iterable[Request], running: Iterable[Request]) -> None:
        """Compare the counts with all requests, and with those that run.

        Raises:
            AssertionError: a tenant is miscounted.
        """
        for requests, counts in ((present, self._present), (running, self._running)):
            found: dict[int, int] = {}
            for request in requests:
                found[request.tenant] = found.get(request.tenant, 0) + 1
            assert found == counts, "tenants' requests are counted wrongly"
        assert self._present.keys() <= self._served.keys()
