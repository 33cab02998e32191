"""How much of an engine each tenant has used, and uses now.

Every tenant has a count of the work that was done for it (a virtual token counter): prompt tokens
as they are computed, and each token decoded. The one that has had least comes next. Whoever comes
anew, or back, starts at the *virtual time*: what each would have had by now if all who were there
had had equal parts. So nobody saves up while away, and a tenant that waits is overtaken by others
for a bounded amount of work only, however many they are. A tenant alone is not counted at all.
"""

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from engine.scheduler.request import Request
from engine.scheduler.tally import add_one, take_one

DECODE_WEIGHT = 2
"""Work of a decoded token in prompt tokens: it has to read all weights for few rows."""

GUARDED_STEPS = 256
"""Steps for which an engine keeps its steps short after the last request of another tenant: who
sends now and then does not find it in the middle of a long one."""

_NOTHING: Mapping[int, int] = MappingProxyType({})

_FEW = 256
"""Number of absent tenants from which on their counts are searched for ones to forget."""


class PrefillParts:
    """How many prompt tokens each tenant may still have in one step.

    A prompt that the tenant has saved enough for is computed at once. One that has to be cut waits
    for a step without prompt tokens of others, whose first tokens it would hold up, and until
    a good part of what it costs goes into the prompt itself; its tenant goes on saving meanwhile.

    Args:
        most: what each may have.
        saved: what some may have, where that is less.
        mixed: what it costs a tenant to have any prompt tokens in this step, in tokens.
    """

    def __init__(self, most: int, saved: Mapping[int, int] = _NOTHING, mixed: int = 0) -> None:
        self._max = most
        self._saved = saved
        self._mixed = mixed
        self._taken: dict[int, int] = {}

    def left(self, tenant: int, wanted: int) -> int:
        """Return how many of the tokens that a tenant wants for a prompt it may have."""
        taken = self._taken.get(tenant, 0)
        room = self._max - taken
        if tenant in self._saved:
            room = min(room, self._saved[tenant] - self._mixed - taken)
            if wanted > room and (room < self._mixed or len(self._taken) > (taken > 0)):
                return 0
        return max(0, min(wanted, room))

    def take(self, tenant: int, wanted: int) -> int:
        """Take for a tenant what is left for it; return how many tokens."""
        count = self.left(tenant, wanted)
        if count:
            self._taken[tenant] = self._taken.get(tenant, 0) + count
        return count


class Shares:
    """The books of one engine about its tenants.

    While there are others a tenant has a purse of prompt tokens: it is filled a little with every
    step, and what is computed is taken out, with what it costs to have prompt tokens beside decodes
    at all. So short prompts now and then do not wait, and long ones without end make no step long.

    Args:
        max_prefill: prompt tokens of one tenant in a step, while there are others; also what its
            purse holds.
    """

    def __init__(self, max_prefill: int = sys.maxsize) -> None:
        self._max_prefill = max_prefill
        self._quiet_steps = GUARDED_STEPS
        self._time = 0.0
        self._served: dict[int, float] = {}
        self._present: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._purses: dict[int, int] = {}
        """Prompt tokens that each may have; who is not in it has as many as a purse holds."""
        self._mixed = 0
        self._mixing: set[int] = set()
        """Tenants that have prompt tokens in this step: what any cost is taken from them."""

    @property
    def contended(self) -> bool:
        """Whether more than one tenant has requests here, running or waiting."""
        return len(self._present) > 1

    def served(self, tenant: int) -> float:
        """Return the work done for a tenant, as far as it counts against others."""
        return self._served.get(tenant, 0.0)

    def holds(self, tenant: int) -> bool:
        """Whether requests of a tenant run."""
        return tenant in self._running

    def come(self, tenant: int) -> None:
        """A request of a tenant has arrived."""
        here = self._present.get(tenant, 0)
        self._present[tenant] = here + 1
        if not here:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._time)

    def leave(self, tenant: int) -> None:
        """A request of a tenant has ended."""
        take_one(self._present, tenant)
        if len(self._served) > 2 * len(self._present) + _FEW:
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
        if self._guarded:
            if tenant not in self._mixing:
                tokens += self._mixed
                self._mixing.add(tenant)
            self._purses[tenant] = self._purses.get(tenant, self._max_prefill) - tokens

    def parts(self, *, saved: bool = True) -> PrefillParts:
        """Return what each tenant may have of a step's prefill, purses left out if not `saved`."""
        if not self._guarded:
            return PrefillParts(sys.maxsize)
        if not saved:
            return PrefillParts(self._max_prefill)
        return PrefillParts(self._max_prefill, self._purses.copy(), self._mixed)

    @property
    def _guarded(self) -> bool:
        return self.contended or self._quiet_steps < GUARDED_STEPS

    def begin_step(self, refill: int = sys.maxsize, mixed: int = 0) -> None:
        """Count a step's decodes: one token for each request that runs.

        Args:
            refill: prompt tokens that each tenant's purse gets.
            mixed: what it costs to have any prompt tokens in this step, in tokens.
        """
        # A full purse has to be worth more than that, however small it is.
        self._mixed = min(mixed, self._max_prefill // 4)
        self._mixing.clear()
        self._purses = {
            tenant: tokens + refill
            for tenant, tokens in self._purses.items()
            if tokens + refill < self._max_prefill
        }
        if not self.contended:
            self._quiet_steps += 1
            return
        self._quiet_steps = 0
        for tenant, running in self._running.items():
            self.charge(tenant, DECODE_WEIGHT * running)

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
