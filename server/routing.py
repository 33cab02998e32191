"""Which engine a request goes to: pure policies behind one interface.

Load is counted in work, not in heads only: every request that runs, waits or is on its way
counts one, queued prefill tokens count in proportion, and requests that wait while the KV cache
is nearly full count more, because they will wait longer.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

PREFILL_TOKENS_PER_REQUEST = 512
"""Queued prompt tokens that weigh as much as one running request."""

KV_PRESSURE_FROM = 0.8
"""KV usage above which waiting requests weigh more."""

KV_PRESSURE_WEIGHT = 20.0
"""Weight of a waiting request at full KV usage is 1 + this * (1 - KV_PRESSURE_FROM)."""


class EngineLoad(NamedTuple):
    """One engine that can take requests, with what is known to be there or on its way."""

    rank: int
    requests: int
    """Running, waiting, and sent but not yet received."""
    waiting: int
    prefill_tokens: int
    """Queued prompt tokens, and those of requests not yet received."""
    kv_usage: float


class Choice(NamedTuple):
    """The chosen engine and why, for the routing metric."""

    rank: int
    reason: str


class RoutingPolicy(Protocol):
    """Chooses among engines; keeps no count of its own."""

    def choose(self, loads: Sequence[EngineLoad]) -> Choice:
        """Return the engine for a request; `loads` is not empty and sorted by rank."""
        ...


def cost(load: EngineLoad) -> float:
    """Return an engine's load in requests."""
    pressure = max(0.0, load.kv_usage - KV_PRESSURE_FROM) * KV_PRESSURE_WEIGHT
    queued = load.prefill_tokens / PREFILL_TOKENS_PER_REQUEST
    return load.requests + queued + load.waiting * pressure


class LeastLoaded:
    """The engine with the least work; ties go round within the tied tier only."""

    def __init__(self, start: int = 0) -> None:
        self._turn = start

    def choose(self, loads: Sequence[EngineLoad]) -> Choice:
        costs = [cost(load) for load in loads]
        least = min(costs)
        tied = [load.rank for load, each in zip(loads, costs, strict=True) if each == least]
        if len(tied) == 1:
            return Choice(tied[0], "least_loaded")
        self._turn += 1
        return Choice(tied[self._turn % len(tied)], "tie")
