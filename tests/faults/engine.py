"""The engine's shell in virtual time: three threads' work around the production classes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.core.engine_core import CoreStep, StepFailed
from engine.executor.interface import PendingResult
from engine.executor.simulated import SimulatedExecutor
from engine.process.intake import LATE_SENDS_SECONDS
from engine.process.links import LinkChanges
from engine.process.loop import ANNOUNCEMENT_SECONDS, IDLE_STATS_INTERVAL
from engine.process.sender import LATE_INTERVAL, STATS_INTERVAL, StatsThrottle
from engine.process.watchdog import StepWatch
from engine.scheduler.batch import BatchPlan
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.membership import HELLO_INTERVAL, Identity, Joined
from engine.shared.messages import (
    CoordinatorReply,
    EngineDead,
    EngineInput,
    EngineStats,
    FrontEndEntry,
    FrontEnds,
    GroupOrder,
    RouteHello,
    RouteTaken,
    StepOutputs,
)
from tests.faults.front import Front, Line
from tests.faults.network import Process
from tests.faults.oracle import EOS, MAX_MODEL_LEN, POISON, VOCABULARY
from tests.faults.parts import HEARTBEAT, STEP_TIMEOUT, TIMEOUT

if TYPE_CHECKING:
    from tests.faults.world import World

BLOCK_SIZE = 4
NUM_BLOCKS = 30
STEP_SECONDS = 0.04


class _Poisoned(SimulatedExecutor):
    """Fails for prompts that begin with `POISON`."""

    def submit(self, plan: BatchPlan) -> PendingResult:
        if any(start.token_ids[0] == POISON for start in plan.starting):
            raise RuntimeError("poison")
        return super().submit(plan)


class Engine(Process):
    """One engine process; `serves` once it has loaded its model."""

    def __init__(self, world: World, rank: int, incarnation: int) -> None:
        super().__init__(world.clock, f"engine {rank}", incarnation)
        self._world = world
        self.rank = rank
        self.is_subscribed = False
        self.serves = False
        self.is_announced = False
        """Whether it was said to be ready to whoever started it."""
        self.slowness = 1.0
        self.hung = False
        """Steps never end, while the other threads go on."""
        self.stepping_since: float | None = None
        self.alone_in_step = ""
        """Name of the request that the newest step computed alone."""
        self._step_watch = StepWatch(STEP_TIMEOUT)
        self.draining_since: float | None = None
        plan = world.plan
        config = EngineConfig(
            model=ModelConfig(max_model_len=MAX_MODEL_LEN),
            cache=CacheConfig(
                block_size=BLOCK_SIZE,
                num_kv_blocks=NUM_BLOCKS,
                enable_prefix_caching=plan.prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=24,
                scheduling_policy="priority" if plan.by_priority else "fcfs",
                async_scheduling=plan.async_scheduling,
            ),
            executor=ExecutorConfig(executor="simulated", simulated_step_us=0),
        )
        executor = _Poisoned(
            config, vocab_size=VOCABULARY, eos_token_ids=(EOS,), timing="virtual", check=True
        )
        self.core = world.parts.core(config, executor, rank=rank, incarnation=incarnation)
        self._membership = world.parts.membership(
            Identity(
                kind="engine", index=rank, incarnation=incarnation, host="node", pid=1,
                group_config={"model": "m"},
            ),
            HEARTBEAT,
        )  # fmt: skip
        self._links = world.parts.links(incarnation, "node", TIMEOUT, HEARTBEAT)
        self.links: dict[int, tuple[Front, Line]] = {}
        self._throttle = StatsThrottle(STATS_INTERVAL)
        self._inbox: deque[Callable[[], None]] = deque()
        self._had_work = False
        self._idle_since = 0.0
        self.after(0.0, self._membership_tick)

    # -- the receiver's work ---------------------------------------------------------------------

    def _membership_tick(self) -> None:
        now = self.clock.now
        for message in self._membership.tick(now):
            self._world.to_hub(self, message)
        self._change_links(self._links.tick(self.rank, now))
        joining = self._membership.epoch is None
        self.after(HELLO_INTERVAL if joining else HEARTBEAT, self._membership_tick)

    def _send_due(self) -> None:
        for message in self._membership.tick(self.clock.now):
            self._world.to_hub(self, message)

    def reply(self, reply: CoordinatorReply) -> None:
        """An answer of the coordinator."""
        event = self._membership.receive(reply)
        if isinstance(event, Joined):
            welcome = event.welcome
            if not event.again:
                self.is_subscribed = True
                hub = self._world.hub
                self._world.network.send(
                    self, hub, "subscription", hub.subscribed, "engine", control=False
                )
                self.after(self._world.plan.loading, self._loaded)
            self._put(lambda: self._adopt(welcome.wave))
            self._update_front_ends(welcome.epoch, welcome.front_ends)
        self._send_due()

    def _loaded(self) -> None:
        self.serves = True
        self._membership.ready(self.core.setup)
        self._send_due()
        self._links.serve(self.clock.now)
        self._ask_front_ends()
        self.after(IDLE_STATS_INTERVAL, self._idle_stats)
        self._turn()

    def _ask_front_ends(self) -> None:
        self._change_links(self._links.tick(self.rank, self.clock.now))
        unconfirmed = self._links.take_unconfirmed(self.clock.now)
        if unconfirmed is None:
            self.after(self._links.wait, self._ask_front_ends)
            return
        self.is_announced = True

    def order_arrived(self, order: GroupOrder) -> None:
        """An order of the coordinator."""
        if not isinstance(order, FrontEnds):
            wave = order.wave
            self._put(lambda: self._adopt(wave))
        elif order.epoch == self._membership.epoch:
            self._update_front_ends(order.epoch, order.front_ends)

    def _update_front_ends(self, epoch: int, entries: list[FrontEndEntry]) -> None:
        self._change_links(self._links.update(self.rank, epoch, entries, self.clock.now))

    def _change_links(self, changes: LinkChanges) -> None:
        for index in changes.left:
            front, line = self.links.pop(index)
            self._world.network.send(
                self, front, "closing", setattr, line, "up", False, control=False
            )
            line.closed = True
            self._put(lambda index=index: self.core.front_end_left(index))
        for entry in changes.joined:
            front = self._world.front_process(entry.incarnation)
            line = Line(self)
            self.links[entry.index] = front, line
            self._put(lambda e=entry: self.core.front_end_joined(e.index, e.incarnation))
        for index, hello in changes.hellos:
            self._greet(index, hello)

    @property
    def identity(self) -> bytes:
        """Under which front ends know this engine's connections."""
        return b"%d-%d" % (self.rank, self.incarnation)

    def _greet(self, index: int, hello: RouteHello) -> None:
        front, line = self.links[index]
        self._world.network.send(
            self, front, "hellos", front.greeting_arrived, self.identity, line, hello,
            control=False,
        )  # fmt: skip

    def input_arrived(self, line: Line, message: EngineInput) -> None:
        """A message of a front end, on one of the connections of this engine to it."""
        if any(line is each for _, each in self.links.values()):
            if isinstance(message, RouteTaken):
                self._links.answered(message)
            else:
                self._put(lambda: self.core.handle(message))

    def _adopt(self, wave: int) -> None:
        self.core.clock.wave = max(self.core.clock.wave, wave)

    # -- the loop's work -------------------------------------------------------------------------

    def _put(self, item: Callable[[], None]) -> None:
        self._inbox.append(item)
        if self.serves and self.stepping_since is None:
            self._turn()

    def _turn(self) -> None:
        """One turn of the loop: drain the inbox, and begin a step if there is work."""
        if not self.alive or self.stepping_since is not None:
            return
        had_work = self.core.has_work
        try:
            while self._inbox:
                self._inbox.popleft()()
            if self.draining_since is not None and self._has_drained():
                self.leave()
                return
            if not self.core.has_work:
                return
            if not had_work:
                self._report(self.core.stats())
            self.stepping_since = self.clock.now
            self.alone_in_step = self.alone
            self._step_watch.begin(self.core.next_step_tokens, self.clock.now)
            step = self.core.step()
        except StepFailed as error:
            self._die(str(error))
            return
        self._world.check_step(self)
        self.after(STEP_SECONDS * self.slowness, self._stepped, step)

    def _stepped(self, step: CoreStep) -> None:
        if self.hung:
            return
        self._step_watch.end()
        self._idle_since = self.clock.now
        self._send(step)
        self.after(ANNOUNCEMENT_SECONDS if step.changes_alone else 0.0, self._next_turn)

    def _send(self, step: CoreStep) -> None:
        for index, of_front_end in step.outputs.items():
            if index in self.links:
                front, _ = self.links[index]
                self._world.network.send(
                    self, front, "outputs", front.output_arrived,
                    StepOutputs(step.stats, of_front_end), control=False,
                )  # fmt: skip
        self._report(step.stats)

    def _next_turn(self) -> None:
        self.stepping_since = None
        self._turn()

    def _report(self, stats: EngineStats) -> None:
        due = self._throttle.offer(stats, self.clock.now)
        if due is not None:
            self._world.stats_to_hub(self, due)
        elif self._throttle.wait(self.clock.now) is not None:
            self.after(LATE_INTERVAL, self._report_held)

    def _report_held(self) -> None:
        held = self._throttle.take(self.clock.now)
        if held is not None:
            self._world.stats_to_hub(self, held)

    def _idle_stats(self) -> None:
        idle = self.stepping_since is None and not self.core.has_work
        if idle and self.clock.now - self._idle_since >= IDLE_STATS_INTERVAL - 0.01:
            self._report(self.core.stats())
        self.after(IDLE_STATS_INTERVAL, self._idle_stats)

    @property
    def alone(self) -> str:
        """Name of the request that nobody else is planned beside; empty if there is none."""
        scheduler = self.core._scheduler
        return scheduler._books.all[scheduler.alone].request_id if scheduler.alone else ""

    # -- the end ---------------------------------------------------------------------------------

    @property
    def is_overdue(self) -> bool:
        """Whether its step takes longer than any step may."""
        return self._step_watch.hung_for(self.clock.now) is not None

    def halt(self, seconds: float, *, hand_over: bool) -> None:
        """An operator pauses the engine for a while."""
        self._put(lambda: self._said(self.core.pause(hand_over=hand_over)))
        self.after(seconds, self._put, lambda: self._said(self.core.resume()))

    def _said(self, _: None) -> None:
        """An operator's call is answered, and with the answer go the news."""
        answers = self.core.answers()
        if answers is not None and self.stepping_since is None:
            self._send(answers)

    def drain(self) -> None:
        """SIGTERM: finish what there is, and end."""

        def begin() -> None:
            self.draining_since = self.clock.now
            self._membership.drain()
            self._send_due()
            self.after(LATE_SENDS_SECONDS + 0.02, self._look_whether_drained)

        self._put(begin)

    def _look_whether_drained(self) -> None:
        self._turn()
        self.after(0.1, self._look_whether_drained)

    def _has_drained(self) -> bool:
        assert self.draining_since is not None
        late = self.clock.now - self.draining_since > LATE_SENDS_SECONDS
        return not self.core.has_requests and (late or not self.core.has_front_ends)

    def leave(self) -> None:
        """End in order."""
        self._world.to_hub(self, self._membership.goodbye())
        self._world.ended(self)

    def _die(self, reason: str) -> None:
        for front, _ in self.links.values():
            message = EngineDead(self.rank, self.incarnation, reason)
            self._world.network.send(
                self, front, "outputs", front.output_arrived, message, control=False
            )
        self.leave()
