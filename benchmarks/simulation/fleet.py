"""Independent engines behind many front ends, in virtual time.

The schedulers, the front ends' members, loads and balancers and the coordinator's state are those
of production; this module is the network and the clock. A request takes `hop_ns` to its engine, a
cluster view as long to the front ends; tokens and stats are delivered when their step ends.
"""

import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.simulation.costs import CostModel
from benchmarks.simulation.front_end import BalancingFrontEnd
from benchmarks.simulation.records import Recorder
from benchmarks.simulation.replica import EngineShape, Replica, message
from benchmarks.simulation.workload import NS, Workload, first_arrivals
from coordinator.events import Action, FromMember, PublishView, Tick
from coordinator.state import CoordinatorParameters, CoordinatorState
from engine.process.sender import STATS_INTERVAL, StatsThrottle
from engine.scheduler.admission import UNLIMITED, AdmitAll
from engine.scheduler.outputs import Outputs
from engine.scheduler.policies import build_admission_policy
from engine.shared.messages import (
    AddRequest,
    ClusterView,
    EngineStats,
    FrontEndAddresses,
    Hello,
    Ready,
    Received,
)
from engine.shared.version import PROTOCOL_VERSION
from server.router.routing import POLICIES

Progress = Callable[[int], None]

ROSTER_GRACE = 10.0
"""Seconds for which front ends keep engines that a new coordinator has not listed; none restarts
here."""


class FleetShape(NamedTuple):
    """How many of what, and how fast they talk."""

    engines: int
    front_ends: int
    engine: EngineShape
    costs: CostModel
    hop_ns: int = 200_000
    publish_interval: float = 0.1
    """Seconds between two cluster views."""
    routing_policy: str = "least-loaded"


class _Engine:
    """One engine process: its books about front ends, and whether a step is under way."""

    def __init__(self, rank: int, shape: FleetShape) -> None:
        self.replica = Replica(shape.engine, shape.costs)
        self.policy = build_admission_policy(shape.engine.scheduler, 1)
        self.throttle = StatsThrottle(STATS_INTERVAL)
        self.stepping = False
        self._rank = rank
        self._steps = 0
        self._step_us = 0
        self._received = [Received(index, index + 1, 0, 0) for index in range(shape.front_ends)]

    def begin(self) -> int:
        """Take what has arrived, start a step and return its duration in ns."""
        for request in self.replica.inbox:
            known = self._received[request.front_end]
            self._received[request.front_end] = Received(
                known.front_end,
                known.front_end_incarnation,
                known.requests + 1,
                known.prompt_tokens + len(request.prompt_token_ids),
            )
        self.replica.drain()
        grant = UNLIMITED
        if not isinstance(self.policy, AdmitAll):
            grant = self.policy.decide(self._steps, (self.replica.state(self._step_us),))
        duration = self.replica.begin(grant).ns
        self._step_us = duration // 1000
        self.stepping = True
        return duration

    def finish(self) -> tuple[Outputs, EngineStats]:
        """End the step; return its tokens by front end and the stats that go out with them."""
        self.stepping = False
        outputs = self.replica.finish()
        self._steps += 1
        gauges = self.replica.scheduler.gauges()
        stats = EngineStats(
            rank=self._rank,
            incarnation=self._rank + 1,
            version=self._steps,
            wave=0,
            step=self._steps,
            waiting=gauges.waiting,
            running=gauges.running,
            kv_usage=gauges.kv_usage,
            queued_prefill_tokens=gauges.queued_prefill_tokens,
            received=self._received.copy(),
        )
        return outputs, stats


class Fleet:
    """All processes of a fleet and the events between them.

    Args:
        shape: sizes, limits and speeds.
        workload: what to serve; requests come to the front ends at random.
        seed: of the choice of front ends.
        sample_every_ns: distance of the timeline's points.
    """

    def __init__(
        self, shape: FleetShape, workload: Workload, *, seed: int = 0, sample_every_ns: int = NS
    ) -> None:
        self.recorder = Recorder(shape.engines, sample_every_ns)
        self._shape = shape
        self._workload = workload
        self._rng = random.Random(seed)
        self._engines = [_Engine(rank, shape) for rank in range(shape.engines)]
        self._front_ends = [
            BalancingFrontEnd(index, POLICIES[shape.routing_policy](index), ROSTER_GRACE)
            for index in range(shape.front_ends)
        ]
        self._coordinator = CoordinatorState(
            CoordinatorParameters(
                epoch=1,
                front_publish="",
                back_publish="",
                back_output="",
                publish_interval=shape.publish_interval,
                publish_idle_interval=10 * shape.publish_interval,
                member_timeout=float("inf"),
            )
        )
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._num_events = 0
        self._num_sent = 0
        self._next_tick = 0

    def run(self, progress: Progress = lambda finished: None) -> Recorder:
        """Serve the whole workload."""
        recorder, events = self.recorder, self._events
        self._register()
        for at in first_arrivals(self._workload):
            self._at(at, self._arrive)
        total = len(self._workload.requests)
        while recorder.finished < total:
            now, _, event = heapq.heappop(events)
            event(now)
            if now >= self._next_tick:
                self._tick(now)
            if recorder.wants_sample(now):
                self._sample(now)
                progress(recorder.finished)
        progress(recorder.finished)
        return recorder

    # -- the clock and the coordinator -----------------------------------------------------------

    def _at(self, when: int, event: Callable[[int], None]) -> None:
        # Events of one moment happen in the order in which they were announced.
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, event))

    def _register(self) -> None:
        """All members join before the first request, and every front end has their view."""
        handle = self._coordinator.handle
        for index in range(self._shape.front_ends):
            addresses = FrontEndAddresses("", "")
            hello = Hello(
                "front_end",
                index,
                index + 1,
                "node",
                0,
                addresses=addresses,
                protocol=PROTOCOL_VERSION,
            )
            handle(FromMember(b"", hello), 0.0)
            handle(FromMember(b"", Ready("front_end", index, index + 1)), 0.0)
        for rank in range(self._shape.engines):
            handle(
                FromMember(
                    b"", Hello("engine", rank, rank + 1, "node", 0, protocol=PROTOCOL_VERSION)
                ),
                0.0,
            )
            handle(FromMember(b"", Ready("engine", rank, rank + 1)), 0.0)
        view = self._coordinator.view()
        for front_end in self._front_ends:
            for rank in range(self._shape.engines):
                front_end.open_route(rank, rank + 1)
            front_end.take_view(view, 0.0)

    def _tick(self, now: int) -> None:
        self._carry_out(self._coordinator.handle(Tick(), now / NS), now)
        deadline = self._coordinator.next_deadline(now / NS)
        self._next_tick = max(now + 1, round(deadline * NS))

    def _carry_out(self, actions: list[Action], now: int) -> None:
        for action in actions:
            if isinstance(action, PublishView):
                self._publish(action.view, now)

    def _publish(self, view: ClusterView, now: int) -> None:
        def deliver(at: int) -> None:
            for front_end in self._front_ends:
                front_end.take_view(view, at / NS)

        self._at(now + self._shape.hop_ns, deliver)

    # -- requests and steps ----------------------------------------------------------------------

    def _arrive(self, now: int) -> None:
        """The next request comes to a front end, which sends it to an engine."""
        if self._num_sent == len(self._workload.requests):
            return
        spec = self._workload.requests[self._num_sent]
        self._num_sent += 1
        index = self._rng.randrange(len(self._front_ends))
        rank = self._front_ends[index].send((), spec.prompt_tokens)
        request = message(self.recorder.arrived(spec, rank, now), spec, index)
        self._at(now + self._shape.hop_ns, lambda at: self._receive(rank, request, at))

    def _receive(self, rank: int, request: AddRequest, now: int) -> None:
        engine = self._engines[rank]
        engine.replica.inbox.append(request)
        if not engine.stepping:
            self._begin(rank, engine, now)

    def _begin(self, rank: int, engine: _Engine, now: int) -> None:
        duration = engine.begin()
        self.recorder.steps[rank] += 1
        self._at(now + duration, lambda at: self._end(rank, engine, at))

    def _end(self, rank: int, engine: _Engine, now: int) -> None:
        """A step is over: its tokens and stats go out, and the next step begins."""
        by_front_end, stats = engine.finish()
        seconds = now / NS
        for index, outputs in by_front_end.items():
            self._front_ends[index].observe(stats, seconds)
            done = self.recorder.tokens_out(outputs, now)
            if done and self._workload.arrivals_ns is None:
                for _ in done:
                    self._at(now + self._workload.turnaround_ns, self._arrive)
        due = engine.throttle.offer(stats, seconds)
        if due is not None:
            self._carry_out(self._coordinator.handle(due, seconds), now)
        if engine.replica.has_work:
            self._begin(rank, engine, now)

    def _sample(self, now: int) -> None:
        gauges = [engine.replica.scheduler.gauges() for engine in self._engines]
        inboxes = sum(len(engine.replica.inbox) for engine in self._engines)
        waiting = inboxes + sum(gauge.waiting for gauge in gauges)
        self.recorder.sample(now, [gauge.running for gauge in gauges], waiting)
