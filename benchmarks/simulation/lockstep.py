"""A lockstep group in virtual time: its ranks step together, as slowly as the slowest."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulation.costs import CostModel, StepCost
from benchmarks.simulation.records import Recorder
from benchmarks.simulation.replica import EngineShape, Replica, message
from benchmarks.simulation.workload import NS, Workload, first_arrivals
from engine.scheduler.admission import AdmissionPolicy, Grant, RankState
from engine.scheduler.policies import build_admission_policy
from server.router.routing import EngineLoad, RoutingPolicy

Progress = Callable[[int], None]
"""Told now and then how many requests are complete."""


class Router(Protocol):
    """Chooses the rank of a request from how many requests and prompt tokens each rank has."""

    def __call__(self, requests: list[int], prefill_tokens: list[int]) -> int: ...


class FewestRequests:
    """The rank with the fewest requests; ties go round."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, requests: list[int], prefill_tokens: list[int]) -> int:
        least = min(requests)
        tied = [rank for rank, count in enumerate(requests) if count == least]
        self._turn += 1
        return tied[self._turn % len(tied)]


class ByPolicy:
    """What a routing policy of production chooses when it knows all loads exactly."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy

    def __call__(self, requests: list[int], prefill_tokens: list[int]) -> int:
        return self._policy.choose(
            [
                EngineLoad(rank, count, 0, tokens, 0.0)
                for rank, (count, tokens) in enumerate(zip(requests, prefill_tokens, strict=True))
            ]
        ).rank


@dataclass
class HoldCheck:
    """Looks for violations of what every policy must keep to."""

    longest_hold: int = 0
    """Most steps in a row in which ready prefill of the group was held."""
    held_without_decodes: int = 0
    """Steps in which prefill was held although nothing decoded."""
    late_tokens: int = 0
    """Prefill tokens of requests that came after the step's table was gathered, at least."""
    _in_a_row: int = field(default=0, repr=False)

    def observe(self, table: list[RankState], grants: list[Grant]) -> None:
        """Take one step's table and the grants that followed from it."""
        held = any(
            state.ready_prefill_tokens and (grant.token_cap == 0 or not grant.run_partials)
            for state, grant in zip(table, grants, strict=True)
        )
        self._in_a_row = self._in_a_row + 1 if held else 0
        self.longest_hold = max(self.longest_hold, self._in_a_row)
        if held and not any(state.decodes for state in table):
            self.held_without_decodes += 1

    def began(self, table: list[RankState], costs: list[StepCost]) -> None:
        """Take what the ranks then began to compute."""
        for state, cost in zip(table, costs, strict=True):
            self.late_tokens += max(0, cost.prefill_tokens - state.ready_prefill_tokens)


class LockstepGroup:
    """The ranks of one group, their policies and the requests under way.

    Args:
        ranks: number of engines.
        shape: limits and policy of each.
        costs: duration of a rank's step; the group's step is the longest of them.
        workload: what to serve.
        route: chooses a rank for each request.
        gather_first: take the ranks' states before the arrivals are taken in, which is wrong and
            shows why the order matters.
        sample_every_ns: distance of the timeline's points.
    """

    def __init__(
        self,
        ranks: int,
        shape: EngineShape,
        costs: CostModel,
        workload: Workload,
        *,
        route: Router | None = None,
        gather_first: bool = False,
        sample_every_ns: int = NS,
    ) -> None:
        self.replicas = [Replica(shape, costs) for _ in range(ranks)]
        self.recorder = Recorder(ranks, sample_every_ns)
        self.holds = HoldCheck()
        self._policies = [build_admission_policy(shape.scheduler, ranks) for _ in range(ranks)]
        self._workload = workload
        self._route: Router = FewestRequests() if route is None else route
        self._gather_first = gather_first
        self._requests = [0] * ranks
        self._prefill_tokens = [0] * ranks
        self._num_sent = 0
        self._arrivals = deque(first_arrivals(workload))
        self._step = 0
        self._last_step_us = 0

    def run(self, progress: Progress = lambda finished: None) -> Recorder:
        """Serve the whole workload."""
        now = 0
        workload, recorder = self._workload, self.recorder
        while recorder.finished < len(workload.requests):
            self._arrive(now)
            if not any(replica.has_work for replica in self.replicas):
                now = self._arrivals[0]
                self._step = self._last_step_us = 0
                continue
            duration = self._begin()
            # Whoever comes during the step is routed before its end is known.
            self._arrive(now + duration - 1)
            now += duration
            self._finish(now)
            if recorder.wants_sample(now):
                gauges = [replica.scheduler.gauges() for replica in self.replicas]
                waiting = sum(gauge.waiting for gauge in gauges)
                recorder.sample(now, [gauge.running for gauge in gauges], waiting)
                progress(recorder.finished)
        progress(recorder.finished)
        return recorder

    def _begin(self) -> int:
        """Start a step on all ranks and return its duration in ns."""
        if self._gather_first:
            table = [replica.state(self._last_step_us) for replica in self.replicas]
        for replica in self.replicas:
            replica.drain()
        if not self._gather_first:
            table = [replica.state(self._last_step_us) for replica in self.replicas]
        grants = decide(self._policies, self._step, table)
        self.holds.observe(table, grants)
        costs = [r.begin(grant) for r, grant in zip(self.replicas, grants, strict=True)]
        self.holds.began(table, costs)
        duration = max(cost.ns for cost in costs)
        self._step += 1
        self._last_step_us = duration // 1000
        return duration

    def _finish(self, now: int) -> None:
        recorder = self.recorder
        for rank, replica in enumerate(self.replicas):
            recorder.steps[rank] += 1
            recorder.dummy_steps[rank] += replica.dummy
            self._prefill_tokens[rank] -= replica.prefill_tokens
            outputs = replica.finish().get(0)
            if outputs is None:
                continue
            for _ in recorder.tokens_out(outputs, now):
                self._requests[rank] -= 1
                if self._workload.arrivals_ns is None:
                    self._arrivals.append(now + self._workload.turnaround_ns)

    def _arrive(self, until: int) -> None:
        while self._arrivals and self._arrivals[0] <= until:
            self._send(self._arrivals.popleft())

    def _send(self, now: int) -> None:
        """Send the next request, if there is one."""
        if self._num_sent == len(self._workload.requests):
            return
        spec = self._workload.requests[self._num_sent]
        self._num_sent += 1
        rank = self._route(self._requests, self._prefill_tokens)
        self._requests[rank] += 1
        self._prefill_tokens[rank] += spec.prompt_tokens
        self.replicas[rank].inbox.append(message(self.recorder.arrived(spec, rank, now), spec, 0))


def decide(policies: list[AdmissionPolicy], step: int, table: list[RankState]) -> list[Grant]:
    """Return every rank's grant, decided by its own policy from its own copy of the table.

    Raises:
        AssertionError: ranks that saw the same table came to different grants.
    """
    if not policies[0].exchanges:
        return [p.decide(step, (own,)) for p, own in zip(policies, table, strict=True)]
    grants = [policy.decide(step, tuple(table)) for policy in policies]
    assert all(grant == grants[0] for grant in grants), f"grants differ: {grants}"
    return grants
