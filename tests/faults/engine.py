"""An engine in virtual time: the production machines of its threads, with a network for sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.core.outbox import CoreStep
from engine.core.steps import StepFailed
from engine.executor.interface import PendingResult
from engine.executor.simulated import SimulatedExecutor
from engine.process import reception, turns
from engine.process.events import Drain, InboxItem, Stop, Welcomed
from engine.process.reception import Reception
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
from engine.shared.membership import Identity
from engine.shared.messages import (
    CoordinatorReply,
    EngineDead,
    EngineInput,
    EngineOutput,
    EngineStats,
    FrontEndEntry,
    GroupOrder,
    RouteHello,
    StepOutputs,
    UtilityCall,
    UtilityValue,
)
from tests.faults.front import Front, Line
from tests.faults.network import Process
from tests.faults.oracle import EOS, MAX_MODEL_LEN, POISON, VOCABULARY
from tests.faults.parts import DRAIN_TIMEOUT, HEARTBEAT, STEP_TIMEOUT, TIMEOUT

if TYPE_CHECKING:
    from tests.faults.world import World

BLOCK_SIZE = 4
NUM_BLOCKS = 30
STEP_SECONDS = 0.04
LATENESS = 0.0001
"""Seconds by which whoever waits for something goes on late."""


class _Poisoned(SimulatedExecutor):
    """Fails for prompts that begin with `POISON`."""

    def submit(self, plan: BatchPlan) -> PendingResult:
        if any(start.token_ids[0] == POISON for start in plan.starting):
            raise RuntimeError("poison")
        return super().submit(plan)


class Engine(Process):
    """One engine process.

    `Reception` decides for its receiver and `Turns` for its loop, as in production. What is here is
    what threads and sockets do there: messages are handed over, and a step takes its time.
    """

    def __init__(self, world: World, rank: int, incarnation: int) -> None:
        super().__init__(world.clock, f"engine {rank}", incarnation)
        self._world = world
        self.rank = rank
        self.is_subscribed = False
        self.is_announced = False
        """Whether it was said to be ready to whoever started it."""
        self.slowness = 1.0
        self.hung = False
        """Steps never end, while the other threads go on."""
        self.alone_in_step = ""
        """Name of the request that the newest step computed alone."""
        self.is_draining = False
        self.links: dict[int, tuple[Front, Line]] = {}
        self._step_watch = StepWatch(STEP_TIMEOUT)
        self._throttle = StatsThrottle(STATS_INTERVAL)
        self._inbox: list[InboxItem] = []
        self.is_busy = True
        """The loop takes nothing: it loads its model, or a step."""
        self._turn_at = float("inf")
        self._tick_at = float("inf")
        config = _config(world)
        executor = _Poisoned(
            config, vocab_size=VOCABULARY, eos_token_ids=(EOS,), timing="virtual", check=True
        )
        parts = world.parts
        self.core = parts.core(config, executor, rank=rank, incarnation=incarnation)
        self._turns = parts.turns(self.core, DRAIN_TIMEOUT)
        identity = Identity(
            kind="engine", index=rank, incarnation=incarnation, host="node", pid=1,
            group_config={"model": "m"},
        )  # fmt: skip
        self._reception: Reception = parts.reception(
            parts.membership(identity, HEARTBEAT),
            parts.links(incarnation, "node", TIMEOUT, HEARTBEAT),
        )
        self.after(0.0, self._receive, reception.Tick())

    # -- the receiver's thread -------------------------------------------------------------------

    def reply(self, reply: CoordinatorReply) -> None:
        """An answer of the coordinator."""
        self._receive(reply)

    def order_arrived(self, order: GroupOrder) -> None:
        """An order of the coordinator."""
        self._receive(order)

    def input_arrived(self, line: Line, message: EngineInput) -> None:
        """A message of a front end, on one of the connections of this engine to it."""
        if any(line is each for _, each in self.links.values()):
            self._receive(message)

    def _receive(self, event: reception.Event) -> None:
        for action in self._reception.handle(event, self.clock.now):
            self._obey(action)
        due = self._reception.deadline
        if due != self._tick_at:
            self._tick_at = due
            self.after(due - self.clock.now + LATENESS, self._tick, due)

    def _tick(self, due: float) -> None:
        if due == self._tick_at:
            self._tick_at = float("inf")
            self._receive(reception.Tick())

    def _obey(self, action: reception.Action) -> None:
        match action:
            case reception.Register(message):
                self._world.to_hub(self, message)
            case reception.Follow():
                self.is_subscribed = True
                hub = self._world.hub
                self._send(hub, "subscription", hub.subscribed, "engine")
            case reception.Connect(entry):
                self._connect(entry)
            case reception.Disconnect(index):
                front, line = self.links.pop(index)
                self._send(front, "closing", setattr, line, "up", False)
                line.closed = True
            case reception.Greet(index, hello):
                self._greet(index, hello)
            case reception.Deliver(Welcomed()):
                self.after(self._world.plan.loading, self._loaded)
            case reception.Deliver(item):
                self._put(item)
            case reception.Announce():
                self.is_announced = True
            case reception.Close():
                self._world.ended(self)

    def _connect(self, entry: FrontEndEntry) -> None:
        self.links[entry.index] = self._world.front_process(entry.incarnation), Line(self)

    @property
    def identity(self) -> bytes:
        """Under which front ends know this engine's connections."""
        return b"%d-%d" % (self.rank, self.incarnation)

    def _greet(self, index: int, hello: RouteHello) -> None:
        front, line = self.links[index]
        self._send(front, "hellos", front.greeting_arrived, self.identity, line, hello)

    def _send(
        self, target: Process, channel: str, function: Callable[..., None], *arguments: object
    ) -> None:
        self._world.network.send(self, target, channel, function, *arguments, control=False)

    # -- the loop's thread -----------------------------------------------------------------------

    def _loaded(self) -> None:
        self._receive(reception.Serve(self.core.setup))
        self.is_busy = False
        self._turn()

    def _put(self, item: InboxItem) -> None:
        self._inbox.append(item)
        if not self.is_busy:
            self._turn_after(0.0)

    def _turn_after(self, seconds: float) -> None:
        due = self.clock.now + seconds
        if due < self._turn_at:
            self._turn_at = due
            self.after(seconds + LATENESS, self._due_turn, due)

    def _due_turn(self, due: float) -> None:
        if due == self._turn_at and not self.is_busy:
            self._turn()

    def _turn(self) -> None:
        self._turn_at = float("inf")
        items, self._inbox = self._inbox, []
        try:
            self._do(self._turns.turn(items, self.clock.now))
        except StepFailed as error:
            self._die(str(error))

    def _do(self, actions: Sequence[turns.Action]) -> None:
        pause = None
        for action in actions:
            match action:
                case turns.Say(step):
                    self._say(step)
                case turns.RefuseNew():
                    self._receive(reception.WantNothingNew())
                case turns.Settle(seconds):
                    pause = seconds
                case turns.Compute(tokens):
                    self._compute(tokens)
                case turns.Rest(seconds):
                    self._turn_after(seconds)
                case turns.End(stop):
                    self._end(stop)
        if pause is not None:
            self.is_busy = True
            self.after(pause, self._next_turn)

    def _compute(self, tokens: int) -> None:
        self.is_busy = True
        self.alone_in_step = self.alone
        self._step_watch.begin(tokens, self.clock.now)
        step = self.core.step()
        self._world.check_step(self)
        self.after(STEP_SECONDS * self.slowness, self._computed, step)

    def _computed(self, step: CoreStep) -> None:
        if self.hung:
            return
        self._step_watch.end()
        self.is_busy = False
        self._do(self._turns.computed(step, self.clock.now))
        if not self.is_busy:
            self._turn()

    def _next_turn(self) -> None:
        self.is_busy = False
        self._turn()

    def _end(self, stop: Stop) -> None:
        assert stop.error is None, stop.error
        self.leave()

    @property
    def alone(self) -> str:
        """Name of the request that nobody else is planned beside; empty if there is none."""
        scheduler = self.core._scheduler
        return scheduler._books.all[scheduler.alone].request_id if scheduler.alone else ""

    # -- the sender's work -----------------------------------------------------------------------

    def _say(self, step: CoreStep) -> None:
        for index, of_front_end in step.outputs.items():
            if index in self.links:
                self._tell(index, StepOutputs(step.stats, of_front_end))
        self._report(step.stats)

    def _tell(self, index: int, message: EngineOutput) -> None:
        front, _ = self.links[index]
        self._send(front, "outputs", front.output_arrived, message)

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

    # -- what happens to it ----------------------------------------------------------------------

    @property
    def is_overdue(self) -> bool:
        """Whether its step takes longer than any step may."""
        return self._step_watch.hung_for(self.clock.now) is not None

    def halt(self, seconds: float, *, hand_over: bool) -> None:
        """An operator pauses the engine for a while."""
        mode: dict[str, UtilityValue] = {"mode": "move" if hand_over else "keep"}
        self._operate("pause", mode, lambda: self.after(seconds, self._operate, "resume", {}))

    def _operate(
        self,
        name: str,
        arguments: dict[str, UtilityValue],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        front_end = next(iter(self.links), None)
        if front_end is None:  # nobody who could pass it on
            self.after(0.1, self._operate, name, arguments, then)
        else:
            self._receive(UtilityCall(0, front_end, name, arguments))
            then()

    def drain(self) -> None:
        """SIGTERM: finish what there is, and end."""
        self.is_draining = True
        self._put(Drain())

    def leave(self) -> None:
        """End in order."""
        self._receive(reception.Leave())

    def _die(self, reason: str) -> None:
        for index in self.links:
            self._tell(index, EngineDead(self.rank, self.incarnation, reason))
        self.leave()


def _config(world: World) -> EngineConfig:
    plan = world.plan
    return EngineConfig(
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
