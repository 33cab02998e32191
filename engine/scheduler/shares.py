"""How much of an engine each tenant has used, and uses now: a part of `Fairness`.

Every tenant has a counter of the work done for it (a virtual token counter): prompt tokens as they
are computed, and each decoded token. The tenant with the lowest counter goes next. A tenant that
arrives or returns starts at the *virtual time*: what each tenant would have had by now if those
present had had equal shares. So no tenant saves up credit while it is away, and the work by which
others can overtake a waiting tenant is bounded, however many they are. While a tenant is alone
nothing is counted.
"""

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from engine.scheduler.request import Request

DECODE_WEIGHT = 2
"""Work of a decoded token in prompt tokens: it has to read all weights for few rows."""

GUARDED_STEPS = 256
"""Steps for which prefill stays limited after the last request of another tenant, so that one that
sends requests now and then does not wait for a long step."""

_NOTHING: Mapping[int, int] = MappingProxyType({})

_MAX_ABSENT = 256
"""Absent tenants beyond which obsolete counters are dropped."""


def add_one(counts: dict[int, int], key: int) -> None:
    """Count one more; keys without a count are absent."""
    counts[key] = counts.get(key, 0) + 1


def take_one(counts: dict[int, int], key: int) -> None:
    """Count one less."""
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1


class PrefillQuota:
    """How many prompt tokens each tenant may still have in one step.

    A prompt that its tenant's credit covers is computed at once. One that has to be cut waits for a
    step without prompt tokens of other tenants, whose first tokens it would delay, and until most
    of the credit pays for the prompt itself; meanwhile its tenant's credit grows. One that is
    longer than what all tenants may have together is cut into pieces of that length, each in a step
    without those of other tenants; one that fits, but not beside those of others, waits.

    Args:
        limit: maximum tokens of one tenant.
        credit: tokens of tenants that may have less.
        mixed_cost: what it costs a tenant to have any prompt tokens in this step, in tokens.
        together: maximum tokens of all tenants in this step, whatever their credit.
    """

    def __init__(
        self,
        limit: int,
        credit: Mapping[int, int] = _NOTHING,
        mixed_cost: int = 0,
        together: int = sys.maxsize,
    ) -> None:
        self._limit = limit
        self._credit = credit
        self._mixed_cost = mixed_cost
        self._together = together
        self._taken: dict[int, int] = {}
        self._total = 0

    def left(self, tenant: int, wanted: int) -> int:
        """Return how many of the tokens that a tenant wants for a prompt it may have."""
        taken = self._taken.get(tenant, 0)
        room, piece = self._limit - taken, self._together - self._total
        others_took = self._total > taken
        if tenant in self._credit:
            room = min(room, self._credit[tenant] - self._mixed_cost - taken)
            if wanted > room and (room < self._mixed_cost or others_took):
                return 0
        if wanted > piece and others_took:
            return 0
        return max(0, min(wanted, room, piece))

    def take(self, tenant: int, wanted: int) -> int:
        """Take for a tenant what is left for it; return how many tokens."""
        count = self.left(tenant, wanted)
        if count:
            self._taken[tenant] = self._taken.get(tenant, 0) + count
            self._total += count
        return count


class Shares:
    """The counters of one engine's tenants.

    While other tenants are present, a tenant has a credit of prompt tokens. Each step adds a few
    tokens; tokens that are computed beside decodes are taken from it, and the cost of having any
    there. So an occasional short prompt does not wait, and an endless series of long ones does not
    make all steps long.

    Args:
        max_prefill: maximum prompt tokens of one tenant in a step while others are present, and
            maximum credit.
    """

    def __init__(self, max_prefill: int = sys.maxsize) -> None:
        self._max_prefill = max_prefill
        self._quiet_steps = GUARDED_STEPS
        self._time = 0.0
        self._served: dict[int, float] = {}
        self._present: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._credit: dict[int, int] = {}
        """Prompt-token credit by tenant; a missing tenant has the maximum."""
        self._mixed_cost = 0
        self._together = sys.maxsize
        self._beside_decodes = True
        self._mixing: set[int] = set()
        """Tenants with prompt tokens in this step, which have paid the mixed cost."""

    @property
    def contended(self) -> bool:
        """Whether more than one tenant has requests here, running or waiting."""
        return len(self._present) > 1

    @property
    def num_in_debt(self) -> int:
        """Tenants that have spent credit and not got it back; none if one has the engine alone."""
        return len(self._credit) if self.contended else 0

    def served(self, tenant: int) -> float:
        """Return the work done for a tenant, as far as it counts against others."""
        return self._served.get(tenant, 0.0)

    def holds(self, tenant: int) -> bool:
        """Whether requests of a tenant run."""
        return tenant in self._running

    def come(self, tenant: int) -> None:
        """A request of a tenant has arrived."""
        if tenant not in self._present:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._time)
        add_one(self._present, tenant)

    def leave(self, tenant: int) -> None:
        """A request of a tenant has ended."""
        take_one(self._present, tenant)
        if len(self._served) > 2 * len(self._present) + _MAX_ABSENT:
            present, time = self._present, self._time
            self._served = {
                each: served
                for each, served in self._served.items()
                if each in present or served > time
            }

    def start(self, tenant: int) -> None:
        """A request of a tenant runs now."""
        add_one(self._running, tenant)

    def stop(self, tenant: int) -> None:
        """A request of a tenant runs no longer."""
        take_one(self._running, tenant)

    def charge(self, tenant: int, tokens: int) -> None:
        """Count work that is done for a tenant."""
        if self.contended:
            self._served[tenant] += tokens
            self._time += tokens / len(self._present)

    def prefill(self, tenant: int, tokens: int) -> None:
        """Count prompt tokens that are computed for a tenant."""
        self.charge(tenant, tokens)
        if not self._guarded:
            return
        credit = self._credit.get(tenant, self._max_prefill)
        if not self._beside_decodes:
            self._credit[tenant] = max(credit - tokens, min(credit, 0))
            return
        if tenant not in self._mixing:
            tokens += self._mixed_cost
            self._mixing.add(tenant)
        self._credit[tenant] = credit - tokens

    def quota(self, *, by_credit: bool = True) -> PrefillQuota:
        """Return what each tenant may have of a step's prefill, credit ignored if asked for."""
        if not self._guarded:
            return PrefillQuota(sys.maxsize)
        if not by_credit:
            return PrefillQuota(self._max_prefill)
        if not self._beside_decodes:
            return PrefillQuota(self._max_prefill, dict.fromkeys(self._credit, sys.maxsize))
        together = self._together if self.contended else sys.maxsize
        return PrefillQuota(self._max_prefill, self._credit.copy(), self._mixed_cost, together)

    @property
    def _guarded(self) -> bool:
        return self.contended or self._quiet_steps < GUARDED_STEPS

    def begin_step(
        self, refill: int = sys.maxsize, mixed_cost: int = 0, together: int = sys.maxsize
    ) -> None:
        """Count a step's decodes: one token for each running request.

        Args:
            refill: prompt tokens added to each tenant's credit.
            mixed_cost: what it costs to have any prompt tokens in this step, in tokens.
            together: maximum prompt tokens of all tenants in this step, if there are several.
        """
        self._beside_decodes = True
        self._together = together
        # The maximum credit has to cover more than this cost, however low it is.
        self._mixed_cost = min(mixed_cost, self._max_prefill // 4)
        self._mixing.clear()
        self._credit = {
            tenant: tokens + refill
            for tenant, tokens in self._credit.items()
            if tokens + refill < self._max_prefill
        }
        if not self.contended:
            self._quiet_steps += 1
            return
        self._quiet_steps = 0
        for tenant, running in self._running.items():
            self.charge(tenant, DECODE_WEIGHT * running)

    def begin_free(self) -> None:
        """Nothing is decoded in the step that has begun: its prompts delay no tokens.

        They need no credit, and cost what there is of it. One that has to be cut still waits for
        those of others if its tenant is in debt.
        """
        self._beside_decodes = False

    def check_integrity(self, present: Iterable[Request], running: Iterable[Request]) -> None:
        """Compare with all requests there are, and with those that run.

        Raises:
            AssertionError: a tenant is counted wrongly.
        """
        for requests, counts in ((present, self._present), (running, self._running)):
            found: dict[int, int] = {}
            for request in requests:
                found[request.tenant] = found.get(request.tenant, 0) + 1
            assert found == counts, "tenants' requests are counted wrongly"
        assert self._present.keys() <= self._served.keys()
