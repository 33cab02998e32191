"""Limits on a resource, per tenant and in total."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Literal


class TenantBudget:
    """Counts usage per tenant; a tenant may exceed the limits if nothing else is in use."""

    def __init__(self, max_of_one: int, max_of_all: int) -> None:
        self._max_of_one = max_of_one
        self._max_of_all = max_of_all
        self._held: Counter[Hashable] = Counter()

    def exceeded(self, tenant: Hashable, amount: int) -> Literal["own", "all"] | None:
        """Return which limit `amount` more would exceed: the tenant's own or the total."""
        own, everyone = self._held[tenant], self._held.total()
        if own and own + amount > self._max_of_one:
            return "own"
        return "all" if everyone and everyone + amount > self._max_of_all else None

    def take(self, tenant: Hashable, amount: int) -> None:
        """Add usage unconditionally."""
        self._held[tenant] += amount

    def release(self, tenant: Hashable, amount: int) -> None:
        """Subtract usage."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def holding(self, tenant: Hashable, amount: int) -> Iterator[None]:
        """Add usage unconditionally for the duration of the context."""
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.release(tenant, amount)
