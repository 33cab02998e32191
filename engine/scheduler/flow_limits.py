"""Fair sharing of steps between flows (requests of clients, or tenants), for `Fairness`."""

import math
import sys
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter

from engine.scheduler.request import Request
from engine.scheduler.step_costs import StepCosts


class FlowLimits:
    """Flows of one kind, and the remaining credit of each in the step being planned.

    While others decode, a flow's rows can add only a fraction to the step's cost without them; its
    sequences then alternate, longest-waiting first. N flows that want more rows than the smallest
    one can together add sqrt(N) times that fraction to the cost of a step without them: the
    slowdown grows with their number, but sublinearly. For a row that costs more than a flow's
    share of one step, the flow saves up credit, as in deficit round robin (Shreedhar and Varghese,
    1996). A flow without competitors is not limited, and none gets fewer rows than the smallest
    other flow.

    Args:
        key: returns the flow id of a sequence.
        fraction: maximum cost that a flow adds to a step, relative to the cost without it.
    """

    def __init__(self, key: Callable[[Request], int], costs: StepCosts, fraction: float) -> None:
        self._key = key
        self._costs = costs
        self._fraction = fraction
        self._credit: dict[int, float] = {}
        """Credit per flow, in rows: its share of this step plus savings."""
        self._refilled: set[int] = set()
        """Flows that have received their share of this step."""
        self._saving: set[int] = set()
        """Flows with held sequences, whose credit carries over to the next step."""
        self._mixing: set[int] = set()
        """Flows with prompt tokens in this step, already charged the mixed cost."""
        self._rows_of_smallest = 0.0
        """Rows granted to flows that want no more than the smallest one."""
        self._num_larger = 0
        """Number of flows that want more rows than the smallest one."""
        self._ready: Collection[int] = ()

    def begin_unlimited_step(self) -> None:
        """Begin a step without limits, discarding all credit."""
        self._ready = ()
        self._refilled.clear()
        self._credit.clear()
        self._saving.clear()
        self._mixing.clear()

    def begin_step(
        self,
        ready: Sequence[Request],
        weights: dict[int, float],
        step: int,
        *,
        limit_single: bool = False,
    ) -> set[int]:
        """Begin a step; return the ids of ready sequences that are held back in it.

        Args:
            ready: sequences that can be decoded.
            weights: cost in rows, by request id; 1 if absent.
            step: step number.
            limit_single: whether a flow is limited even if no other is ready.
        """
        flows: dict[int, list[Request]] = {}
        for request in ready:
            flows.setdefault(self._key(request), []).append(request)
        self._begin(flows)
        wants = {
            flow: sum([weights.get(each.id, 1.0) for each in members])
            for flow, members in flows.items()
        }
        smallest_first = sorted(flows, key=wants.__getitem__)
        smallest = wants[smallest_first[0]] if smallest_first else 0.0
        if len(flows) == 1 and not limit_single:
            self._rows_of_smallest = smallest
            return set()
        self._num_larger = sum([each > smallest for each in wants.values()])
        held: set[int] = set()
        for index, flow in enumerate(smallest_first):
            smallest_other = smallest_first[:1] if index else smallest_first[1:2]
            minimum = wants[smallest_other[0]] if smallest_other else 1.0
            credit, members = self._refill(flow, minimum), flows[flow]
            if wants[flow] > credit:
                members = _longest_waiting(members, weights, credit)
                if not members and not smallest_other:
                    members = flows[flow][:1]  # avoids an empty step
                for each in members:
                    each.last_limited_step = step
                held.update({each.id for each in flows[flow]} - {each.id for each in members})
                self._saving.add(flow)
            granted = sum([weights.get(each.id, 1.0) for each in members])
            self._credit[flow] -= granted
            if wants[flow] == smallest:
                self._rows_of_smallest += granted
        return held

    def tokens(self, request: Request) -> int:
        """Return how many prompt tokens can be computed now for the flow of a sequence.

        A flow that would spend most of its credit on the mixed cost saves up instead.
        """
        if not self._limits(request):
            return sys.maxsize
        flow = self._key(request)
        if flow in self._saving:
            return 0
        mixed = self._mixed_cost(flow)
        credit = self._refill(flow) - 1 - mixed
        if mixed and credit < mixed:
            self._saving.add(flow)
            return 0
        return max(0, int(credit / self._costs.prefill))

    def prefill(self, request: Request, tokens: int) -> None:
        """Charge the flow of a sequence for prompt tokens."""
        flow = self._key(request)
        self.take(request, 1 + self._mixed_cost(flow) + tokens * self._costs.prefill)
        self._mixing.add(flow)

    def rows(self, request: Request) -> int:
        """Return how many rows the flow of a sequence can have in addition to its decodes."""
        if not self._limits(request):
            return sys.maxsize
        return max(0, int(self._refill(self._key(request))))

    def take(self, request: Request, rows: float) -> None:
        """Charge the flow of a sequence for rows in addition to its decode."""
        if self._limits(request):
            self._refill(self._key(request))
            self._credit[self._key(request)] -= rows

    def _limits(self, request: Request) -> bool:
        """Return whether sequences of other flows are decoded in this step."""
        return any(flow != self._key(request) for flow in self._ready)

    def _begin(self, ready: Collection[int]) -> None:
        max_kept = 1.0 + self._costs.prefill
        self._credit = {
            flow: self._credit[flow] if flow in self._saving else min(self._credit[flow], max_kept)
            for flow in self._refilled
        }
        self._ready = ready
        self._rows_of_smallest = 0.0
        self._num_larger = 0
        self._refilled.clear()
        self._saving.clear()
        self._mixing.clear()

    def _mixed_cost(self, flow: int) -> float:
        """Return the extra cost of a flow's first prompt tokens in a step."""
        return 0.0 if flow in self._mixing else self._costs.mixed

    def _refill(self, flow: int, minimum: float = 0.0) -> float:
        """Return a flow's credit; add its share, at least `minimum` rows, once per step."""
        if flow not in self._refilled:
            self._refilled.add(flow)
            cost_without = self._costs.base + self._rows_of_smallest
            share = self._fraction * cost_without / math.sqrt(max(1, self._num_larger))
            self._credit[flow] = self._credit.get(flow, 0.0) + max(share, minimum)
        return self._credit[flow]


def _longest_waiting(
    members: list[Request], weights: dict[int, float], credit: float
) -> list[Request]:
    """Return a flow's longest-waiting sequences that fit the credit."""
    running: list[Request] = []
    for request in sorted(members, key=attrgetter("last_limited_step")):
        credit -= weights.get(request.id, 1.0)
        if credit < 0:
            break
        running.append(request)
    return running
