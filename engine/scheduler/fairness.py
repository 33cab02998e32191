"""The fairness policy of an engine: scheduling order, preemption, and limits per flow.

Requests are ordered by priority, then between tenants by work received (`Shares`), then by arrival.
While others decode, one flow (a client's request, which can have thousands of sequences, or a
tenant) can lengthen a step only by a fraction (`FlowLimits`); a tenant's prefill is limited by its
credit (`PrefillQuota`). Costs of rows, prompt tokens and grammar masks are measured (`StepCosts`).
If slots or blocks run short, requests that hold many are preempted for others
(`engine.scheduler.preemption`). A tenant or request without competitors is not limited.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from engine.scheduler.flow_limits import FlowLimits
from engine.scheduler.preemption import Capacity, FreeCapacity, choose_heaviest, choose_victims
from engine.scheduler.request import Request, precedence
from engine.scheduler.shares import Shares, decrement, increment
from engine.scheduler.step_costs import StepCosts

_COSTLY_US = 100
"""Mask times below this many microseconds are ignored."""

_MAX_BURST = 1.0
"""Maximum cost of all tenants' prompt tokens in one step with decodes, as a fraction of its cost:
otherwise saved-up credit could make a step many times as long."""

_arrival = attrgetter("arrival")
_priority = attrgetter("priority")


class Fairness:
    """Per-step limits of one engine's requests.

    Args:
        costs: measured costs of steps.
        capacity: slots and KV blocks to share.
        max_prefill: maximum prompt tokens per tenant and step while other tenants are present.
        max_slowdown: factor by which a flow can lengthen steps for others; None is unlimited.
        by_priority: whether requests are ordered by priority.
    """

    def __init__(
        self,
        costs: StepCosts,
        capacity: Capacity,
        *,
        max_prefill: int = sys.maxsize,
        max_slowdown: float | None = None,
        by_priority: bool = False,
    ) -> None:
        self.shares = Shares(max_prefill)
        self._costs = costs
        self._capacity = capacity
        self._by_priority = by_priority
        self._fraction = None if max_slowdown is None else max_slowdown - 1
        self._groups = FlowLimits(attrgetter("group"), costs, self._fraction or 0.0)
        self._tenants = FlowLimits(attrgetter("tenant"), costs, self._fraction or 0.0)
        self._quota = self.shares.quota()
        self._running: dict[int, int] = {}
        """Running sequences by group."""
        self._num_followers = 0
        """Sequences other than the first of their request."""
        self.mask_us: dict[int, int] = {}
        """Smoothed mask time in microseconds, by request id; only of expensive masks."""
        self.num_masked = 0
        """Running sequences with a grammar."""
        self._masked_followers: set[int] = set()
        """Ids of those that are not the first of their request."""
        self._step = 0
        self._heavy: set[int] = set()
        """Tenants that hold more blocks than the average, while blocks may run short."""
        self._short = False

    # -- arrival and departure -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a sequence that has arrived."""
        self.shares.add(request.tenant)
        self._num_followers += not request.is_first_sequence

    def remove(self, request: Request) -> None:
        """Remove a sequence that has ended."""
        self.shares.remove(request.tenant)
        self._num_followers -= not request.is_first_sequence

    def start(self, request: Request) -> None:
        """Record that a sequence has started to run."""
        self.shares.start(request.tenant)
        increment(self._running, request.group)
        if request.sampling.grammar is not None:
            self.num_masked += 1
            if not request.is_first_sequence:
                self._masked_followers.add(request.id)

    def stop(self, request: Request) -> None:
        """Record that a sequence has stopped running."""
        self.shares.stop(request.tenant)
        decrement(self._running, request.group)
        if request.sampling.grammar is not None:
            self.num_masked -= 1
            self._masked_followers.discard(request.id)
            self.mask_us.pop(request.id, None)

    def masked(self, request: Request, mask_us: int) -> None:
        """Record the time of a running sequence's newest masks; 0 if negligible."""
        mask_us = max(mask_us, self.mask_us.pop(request.id, 0) // 2)
        if mask_us >= _COSTLY_US:
            self.mask_us[request.id] = mask_us

    # -- order -----------------------------------------------------------------------------------

    def begin_step(self, running: Iterable[Request], *, is_short: bool) -> None:
        """Begin a step: find the tenants that hold many blocks if blocks are short (`is_short`).

        They are ordered last, so that their requests are preempted first.
        """
        self._heavy = set()
        self._short = is_short
        if not is_short or not self.shares.contended:
            return
        num_blocks: Counter[int] = Counter()
        for request in running:
            num_blocks[request.tenant] += request.table.num_blocks
        average = num_blocks.total() / max(1, len(num_blocks))
        self._heavy = {tenant for tenant, blocks in num_blocks.items() if blocks > average}

    def preemption_key(self, request: Request) -> tuple[int, bool, int]:
        """Return the sort key of a running request: the largest is preempted first."""
        return request.priority, request.tenant in self._heavy, request.arrival

    def in_order(self, running: Iterable[Request]) -> list[Request]:
        """Return running requests, given in order of admission, in the order of `preemption_key`.

        Without priorities the order matters only if a request may be preempted: it must then come
        after all that stay, since planned requests cannot be preempted.
        """
        ordered = list(running)
        if not self._by_priority and not self._short:
            return ordered
        ordered.sort(key=_arrival)  # stable sorts by one field each cost less than one by three
        heavy = self._heavy
        if heavy:
            ordered.sort(key=lambda each: each.tenant in heavy)
        if self._by_priority:
            ordered.sort(key=_priority)
        return ordered

    def sort_prefills(self, partials: list[Request]) -> None:
        """Sort partial prefills: tenants with the least work so far come first."""
        if len(partials) > 1 and self.shares.contended:
            served = self.shares.served
            partials.sort(key=lambda each: (each.priority, served(each.tenant), each.arrival))

    def precedes(self, waiting: Request, begun: Request) -> bool:
        """Return whether a waiting request is scheduled before the rest of a partial prefill."""
        if waiting.priority == begun.priority and waiting.tenant != begun.tenant:
            return self.shares.served(waiting.tenant) < self.shares.served(begun.tenant)
        return precedence(waiting) < precedence(begun)

    # -- preemption ------------------------------------------------------------------------------

    def victims(
        self,
        waiting: Iterable[Request],
        running: Iterable[Request],
        room: FreeCapacity,
        blocks_needed: Callable[[Request], int],
        *,
        is_short: bool,
    ) -> list[Request]:
        """Return the running requests to preempt for waiting ones, in reverse order.

        `is_short`: waiting requests have no slot, or were skipped by the last plan.
        """
        by_share = is_short and self.shares.contended
        if not self._by_priority and not by_share:
            return []
        ordered = self.in_order(running)
        if self._by_priority:
            victims = choose_victims(waiting, ordered, room, blocks_needed)
            if victims or not by_share:
                return victims
        return choose_heaviest(waiting, ordered, room, blocks_needed, self._capacity)

    def saturated_groups(self) -> Collection[int]:
        """Return the groups with as many running sequences as can be decoded next to others."""
        if not self._num_followers:
            return ()
        limit = self._max_when_shared
        return {group for group, running in self._running.items() if running >= limit > 1}

    def victims_for_newcomer(
        self,
        newcomer: Request,
        running: Iterable[Request],
        room: FreeCapacity,
        blocks_needed: Callable[[Request], int],
    ) -> list[Request]:
        """Return sequences of saturated groups to preempt for another request's first one.

        If they kept running, they would only alternate with it. Return none if it would still
        not fit.
        """
        slots, blocks = room.slots - 1, room.blocks - blocks_needed(newcomer)
        saturated, num_running = self.saturated_groups(), self._running.copy()
        victims: list[Request] = []
        for each in reversed(self.in_order(running)):
            if slots >= 0 and blocks >= room.headroom:
                return victims
            gives_way = each.group in saturated and each.priority >= newcomer.priority
            if gives_way and num_running[each.group] > self._max_when_shared:
                victims.append(each)
                num_running[each.group] -= 1
                slots += 1
                blocks += each.table.num_blocks
        return victims if slots >= 0 and blocks >= room.headroom else []

    @property
    def _max_when_shared(self) -> int:
        """Maximum sequences of a group decoded in a step together with one of another group."""
        if self._fraction is None:
            return sys.maxsize
        return max(1, int(self._fraction * self._costs.base))

    # -- one step --------------------------------------------------------------------------------

    def begin_decodes(self, ready: Sequence[Request]) -> Collection[int]:
        """Begin the decodes of a step; return the ids of ready sequences that are held back."""
        self._step += 1
        limited = self._fraction is not None
        weights = dict.fromkeys(self._masked_followers, 1 + self._costs.masked)
        for id, us in self.mask_us.items():
            weights[id] = weights.get(id, 1.0) + self._costs.of_masks(us)
        held: set[int] = set()
        if limited and (self._num_followers or self.mask_us):
            held = self._groups.begin_step(ready, weights, self._step)
        else:
            self._groups.begin_unlimited_step()
        if limited and self.shares.contended:
            not_held = [each for each in ready if each.id not in held] if held else ready
            held |= self._tenants.begin_step(not_held, weights, self._step, limit_single=True)
        else:
            self._tenants.begin_unlimited_step()
        return held

    def begin_prefill(self, rows: int) -> None:
        """Begin the prefill of a step with this many decodes.

        Prompts of N tenants in debt can add sqrt(N) times as much to steps as one tenant's: the sum
        grows with the number of tenants, but sublinearly.
        """
        refill = max_together = sys.maxsize
        mixed = self.mixed_tokens(rows)
        if self._fraction is not None:
            decode_cost = (self._costs.base + rows) / self._costs.prefill
            in_debt = len(self.shares.credit) if self.shares.contended else 0
            tenant_factor = math.sqrt(max(1, in_debt))
            refill = int(self._fraction * decode_cost / tenant_factor)
            burst = max(_MAX_BURST, self._fraction * tenant_factor) * decode_cost
            max_together = max(1, int(burst - mixed), int(burst / 4))
        self.shares.begin_step(max(1, refill), mixed, max_together)
        if not rows and self._fraction is not None:
            self.shares.has_decodes = False
        self._quota = self.shares.quota()

    def mixed_tokens(self, rows: int) -> int:
        """Return the fixed cost of adding prefill to this many decodes, in prompt tokens."""
        if self._fraction is None or not rows:
            return 0
        return int(self._costs.mixed / self._costs.prefill)

    def begin_exclusive(self) -> None:
        """Begin a step of one isolated request, whose tenant is not charged for it."""
        self._quota = self.shares.quota(by_credit=False)

    def tenant_tokens(self, request: Request, num_tokens: int) -> int:
        """Return how many of `num_tokens` prompt tokens the tenant of a sequence can have."""
        return self._quota.available(request.tenant, num_tokens)

    def group_tokens(self, request: Request) -> int:
        """Return how many prompt tokens the group of a sequence can have.

        A request's first sequence is not limited; the others share the request's credit.
        """
        return sys.maxsize if request.is_first_sequence else self._groups.tokens(request)

    def prefill(self, request: Request, tokens: int) -> None:
        """Charge `tokens` prompt tokens of a sequence."""
        self.shares.prefill(request.tenant, tokens)
        if not request.is_first_sequence:
            self._groups.prefill(request, tokens)
        self._quota.take(request.tenant, tokens)

    def drafts(self, request: Request, num_rows: int) -> int:
        """Reserve up to `num_rows` rows for drafts of a decoding sequence; return the number."""
        count = min(num_rows, self._groups.rows(request), self._tenants.rows(request))
        self._groups.take(request, count)
        self._tenants.take(request, count)
        return count

    def check_integrity(self, present: Collection[Request], running: Collection[Request]) -> None:
        """Compare the counts with all requests, and with those that run.

        Raises:
            AssertionError: a count is wrong.
        """
        self.shares.check_integrity(present, running)
        assert self._num_followers == sum(not each.is_first_sequence for each in present)
        assert self._running == Counter(each.group for each in running)
        with_grammar = [each for each in running if each.sampling.grammar is not None]
        assert self.num_masked == len(with_grammar)
        assert self._masked_followers == {
            each.id for each in with_grammar if not each.is_first_sequence
        }
        assert self.mask_us.keys() <= {each.id for each in with_grammar}
