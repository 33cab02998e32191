"""How much of something bounded tenants may hold: each of them, and all together."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Literal


class TenantBudget:
    """Counts what tenants hold; a tenant that holds nothing may exceed the bound if all is free."""

    def __init__(self, max_of_one: int, max_of_all: int) -> None:
        self._max_of_one = max_of_one
        self._max_of_all = max_of_all
        self._held: Counter[Hashable] = Counter()

    def exceeded(self, tenant: Hashable, amount: int) -> Literal["own", "all"] | None:
        """Return which bound this much more would exceed, the tenant's own or that of all."""
        own, everyone = self._held[tenant], self._held.total()
        if own and own + amount > self._max_of_one:
            return "own"
        return "all" if everyone and everyone + amount > self._max_of_all else None

    def take(self, tenant: Hashable, amount: int) -> None:
        """Count this much more, whether there is room or not."""
        self._held[tenant] += amount

    def give_back(self, tenant: Hashable, amount: int) -> None:
        """Count this much less."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def holding(self, tenant: Hashable, amount: int) -> Iterator[None]:
        """Count this much more meanwhile, whether there is room or not."""
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.give_back(tenant, amount)
