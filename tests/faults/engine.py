"""An engine in virtual time: its production shells, with a network instead of sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.batch.batch import BatchPlan
from engine.batch.executor import PendingResult
from engine.core.events import Drain, InboxItem, PrerequisitesSettled, Stop, Welcomed
from engine.core.front_ends import CoreStep
from engine.core.loop import EngineLoop
from engine.core.sender import LATE_INTERVAL, Sender
from engine.core.steps import StepFailed
from engine.core.watchdog import StepWatch
from engine.kv.block_store import MODEL_SIZE
from engine.kv.tiers import KvTiers
from engine.lockstep.grouping import GroupConnection
from engine.process.receiver import Receiver
from engine.process.reception import Leave, Serve, StartDrain
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import (
    CoordinatorReply,
    EngineDead,
    EngineInput,
    GroupOrder,
    Hello,
    KvRole,
    UtilityCall,
    UtilityValue,
    encode,
)
from tests.faults.blocks import Blocks
from tests.faults.network import Process
from tests.faults.oracle import EOS, MAX_MODEL_LEN, POISON, VOCABULARY
from tests.faults.parts import DRAIN_TIMEOUT, HEARTBEAT, STEP_TIMEOUT, TIMEOUT
from tests.faults.sockets import HUB, Context, Line, Socket, Transport
from tests.support.checked_executor import CheckedExecutor

if TYPE_CHECKING:
    from tests.faults.world import World

BLOCK_SIZE = 4
NUM_BLOCKS = 30
STEP_SECONDS = 0.04
LATENESS = 0.0001
"""Seconds by which timers fire late."""


class _Poisoned(CheckedExecutor):
    """Fails for prompts that begin with `POISON`."""

    def submit(self, plan: BatchPlan) -> PendingResult:
        if any(start.token_ids[0] == POISON for start in plan.starting):
            raise RuntimeError("poison")
        return super().submit(plan)


class _VirtualTime(EngineLoop):
    """A loop whose steps and pauses take virtual time."""

    engine: Engine

    def compute(self, tokens: int) -> None:
        self.watch.begin(tokens, self.clock())
        self.engine.computing(self.core.step())

    def settle(self, seconds: float) -> None:
        self.engine.settling(seconds)


class Engine(Process):
    """One engine process.

    Its receiver, loop and sender are the production classes. This class replaces threads, sockets
    and the model: it passes messages on, wakes up on time, and makes steps take time.
    """

    def __init__(self, world: World, rank: int, incarnation: int) -> None:
        super().__init__(world.clock, f"engine {rank}", incarnation)
        self.world = world
        self.rank = rank
        self.is_announced = False
        """Whether it was reported as ready to its supervisor."""
        self.slowness = 1.0
        self.hung = False
        """Whether steps never end, while the other threads keep running."""
        self.alone_in_step = ""
        """Name of the request that ran alone in the newest step."""
        self.is_draining = False
        self.registration: Socket | None = None
        self.orders: Socket | None = None
        self.lines: list[Line] = []
        self._step_watch = StepWatch(STEP_TIMEOUT)
        self._inbox: list[InboxItem] = []
        self.is_busy = True
        """The loop handles no messages: it loads the model, or runs a step."""
        self._turn_at = float("inf")
        self._tick_at = float("inf")
        config = _config(world)
        executor = _Poisoned(config, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
        parts = world.parts
        self.blocks: Blocks | None = None
        """Its port for KV blocks, if blocks are transferred."""
        self.tiers: KvTiers | None = None
        role: KvRole = ""
        if world.plan.splits:
            role = "decode" if rank else "prefill"
            if world.plan.prefix_caching:
                self._open_port(executor, offers=role == "prefill")
        self.core = parts.core(
            config,
            executor,
            rank=rank,
            incarnation=incarnation,
            tiers=self.tiers,
            kv_role=role,
            kv_address="" if self.blocks is None else self.blocks.address,
        )
        identity = Hello(
            kind="engine", index=rank, incarnation=incarnation, host="node", pid=1,
            group_config={"model": "m"},
        )  # fmt: skip
        self._reception = parts.reception(
            parts.membership(identity, HEARTBEAT),
            parts.links(incarnation, "node", TIMEOUT, HEARTBEAT),
        )
        transport: Any = Transport(self)
        inbox: Any = self

        def clock() -> float:
            return self.clock.now

        self._sender = Sender(transport, clock)
        self._receiver = Receiver(
            HUB,
            incarnation,
            transport,
            Context(self),  # type: ignore[arg-type]
            reception=self._reception,
            inbox=inbox,
            outputs=self._sender,
            connection=GroupConnection(),
            on_routed=self._routed,
            clock=clock,
        )
        loop: type[_VirtualTime] = type("Loop", (_VirtualTime, parts.loop), {})
        self._loop = loop(
            self.core,
            inbox,
            self._sender,
            self._step_watch,
            drain_timeout=DRAIN_TIMEOUT,
            on_iteration=lambda: None,
            on_drain=lambda: self._receiver.submit(StartDrain()),
            clock=clock,
        )
        self._loop.engine = self
        self.after(0.0, self._ticked)

    def _open_port(self, executor: CheckedExecutor, *, offers: bool) -> None:
        self.blocks = Blocks(self, executor, offers=offers)
        self.tiers = self.world.parts.tiers(
            (), "all", executor.read_block, executor.write_block, peers=self.blocks
        )
        self.tiers.model = bytes(MODEL_SIZE)
        self.tiers.on_settled = lambda: self.put(PrerequisitesSettled())

    # -- the receiver's thread -------------------------------------------------------------------

    @property
    def is_subscribed(self) -> bool:
        """Whether it receives a coordinator's orders."""
        return self.orders is not None

    @property
    def links(self) -> dict[int, Line]:
        """Open connections, by front end."""
        return {line.front.index: line for line in self.lines if not line.closed}

    def reply(self, reply: CoordinatorReply) -> None:
        """Receive a reply of the coordinator."""
        assert self.registration is not None
        self.arrived(self.registration, encode(reply))

    def order_arrived(self, order: GroupOrder) -> None:
        """Receive an order of the coordinator."""
        assert self.orders is not None
        self.arrived(self.orders, encode(order))

    def input_arrived(self, line: Line, message: EngineInput) -> None:
        """Receive a message of a front end, on one of this engine's connections to it."""
        if not line.closed:
            self.arrived(line, encode(message))

    def arrived(self, socket: Socket, frame: bytes) -> None:
        """Receive a frame on a socket."""
        socket.put(frame)
        self._receiver.sockets.read(socket)  # type: ignore[arg-type]
        self._received()

    def _ticked(self) -> None:
        self._receiver.tick()
        self._received()

    def _received(self) -> None:
        """Schedule the receiver's next deadline; it may have ended."""
        due = self._reception.deadline
        if due != self._tick_at:
            self._tick_at = due
            self.after(due - self.clock.now + LATENESS, self._tick, due)
        if self._receiver.is_closed:
            self.world.ended(self)

    def _tick(self, due: float) -> None:
        if due == self._tick_at:
            self._tick_at = float("inf")
            self._ticked()

    def _routed(self) -> None:
        self.is_announced = True

    def send(
        self, target: Process, channel: str, function: Callable[..., None], *arguments: object
    ) -> None:
        """Send a message that is lost only with its connection."""
        self.world.network.send(self, target, channel, function, *arguments, control=False)

    # -- the loop's thread -----------------------------------------------------------------------

    def put(self, item: InboxItem) -> None:
        """Put an item of the receiver into the inbox."""
        if isinstance(item, Welcomed):
            self.after(self.world.plan.loading, self._loaded)
            return
        self._inbox.append(item)
        if not self.is_busy:
            self._turn_after(0.0)

    def _loaded(self) -> None:
        self._receiver.submit(Serve(self.core.setup))
        self.is_busy = False
        self._turn()

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
            self._loop.run_once(items)
        except StepFailed as error:
            if isinstance(error.__cause__, AssertionError):  # its model has detected a wrong read
                raise error.__cause__ from None
            self._sender.send_failure(EngineDead(self.rank, self.incarnation, str(error)))
            self.leave()
            return
        self._end_turn()
        if not self.is_busy:
            self._turn_after(self._loop.wait)

    def computing(self, step: CoreStep) -> None:
        """Let a step that was begun take time."""
        self.is_busy = True
        self.world.check_step(self)
        self.after(STEP_SECONDS * self.slowness, self._computed, step)

    def _computed(self, step: CoreStep) -> None:
        if self.hung:
            return
        self.is_busy = False
        self._loop.computed(step)
        self._end_turn()
        if not self.is_busy:
            self._turn()

    def settling(self, seconds: float) -> None:
        """Let the loop pause for a while."""
        self.is_busy = True
        self.after(seconds, self._settled)

    def _settled(self) -> None:
        self.is_busy = False
        self._turn()

    def _end_turn(self) -> None:
        """Handle what a turn has left: stats held back, or the end of the loop."""
        if self._sender.has_pending:
            self.after(LATE_INTERVAL, self._sender.send_pending)
        stop: Stop | None = self._loop.stopped
        if stop is not None:
            assert stop.error is None, stop.error
            self.leave()

    @property
    def alone(self) -> str:
        """Name of the request that is planned alone; empty if there is none."""
        scheduler = self.core._scheduler
        exclusive = scheduler.exclusive_request
        return scheduler._requests.all[exclusive].request_id if exclusive else ""

    # -- what happens to it ----------------------------------------------------------------------

    @property
    def is_overdue(self) -> bool:
        """Whether its step exceeds the step timeout."""
        return self._step_watch.hung_for(self.clock.now) is not None

    def halt(self, seconds: float, *, hand_over: bool) -> None:
        """Have an operator pause the engine for a while."""
        mode: dict[str, UtilityValue] = {"mode": "move" if hand_over else "keep"}
        self._operate("pause", mode, lambda: self.after(seconds, self._operate, "resume", {}))

    def _operate(
        self,
        name: str,
        arguments: dict[str, UtilityValue],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        front_end = next(iter(self.links), None)
        if front_end is None:  # no front end to pass it on
            self.after(0.1, self._operate, name, arguments, then)
        else:
            self.input_arrived(self.links[front_end], UtilityCall(0, front_end, name, arguments))
            then()

    def drain(self) -> None:
        """Handle SIGTERM: finish all requests, and exit."""
        self.is_draining = True
        self.put(Drain())

    def leave(self) -> None:
        """Exit in order."""
        self._receiver.submit(Leave())


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
