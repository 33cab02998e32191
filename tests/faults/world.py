"""A whole cluster in virtual time, including its supervisor, and its invariants.

The processes are the production state machines behind thin shells, connected by
`tests.faults.network`. A run ends when all requests are answered and the cluster has had time to
settle.
"""

import logging
import random
from array import array
from collections import defaultdict

from engine.shared.messages import (
    ALL_BLOCKS,
    AddRequest,
    ClusterView,
    EngineStats,
    Goodbye,
    MemberMessage,
)
from server.fleet.keeper import MAX_BACKOFF, Restarts
from server.router.failover import CONVICTING_DEATHS, MAX_TRIES
from tests.faults.client import Client
from tests.faults.engine import Engine
from tests.faults.front import Front
from tests.faults.hub import Hub
from tests.faults.network import Clock, Network, Process
from tests.faults.parts import TIMEOUT, Parts
from tests.faults.plan import LONG_CUT, Fault, Plan

logger = logging.getLogger(__name__)

LONGEST = 80.0
"""Seconds within which every request must be answered."""
LONGEST_WAIT = 60.0
"""Additional seconds if engines keep dying and are restarted with growing backoff."""
RECOVERY = MAX_BACKOFF + 10.0
"""Seconds within which all processes run and know each other, even with an engine at maximum
restart backoff."""
QUIET = 3.0
"""Seconds to wait before checking."""


HARMLESS = {
    "slow engine", "retire engine", "reset engine and front end", "cut engine from front end",
    "halt engine",
}  # fmt: skip
"""Faults of engines that must not make anyone consider an engine dead."""


UNHEARD = {
    "stop engine", "cut engine from front end", "cut engine from coordinator",
    "reset engine and front end",
}  # fmt: skip
"""Faults after which an engine may have requests that have long moved on."""


class Violation(Exception):
    """An invariant was violated."""


class World:
    """One run of a plan."""

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self.plan = plan
        self.parts = parts
        self.rng = random.Random(plan.seed + 1)
        self.clock = Clock()
        self.network = Network(self.clock, self.rng)
        self.senders: dict[bytes, Process] = {}
        self.engines: dict[int, Engine] = {}
        self.fronts: dict[int, Front] = {}
        self._all_fronts: dict[int, Front] = {}
        self._all_engines: dict[int, Engine] = {}
        self._incarnations = 0
        self._restarts: defaultdict[str, Restarts] = defaultdict(Restarts)
        self._remote: set[str] = set()
        self._retired: set[int] = set()
        self.troubled: set[int] = set()
        """Incarnations of engines that were ever considered dead, rightly or not."""
        self._assigned: defaultdict[str, set[int]] = defaultdict(set)
        self._died_alone: set[str] = set()
        """Requests that ran alone on an engine when it ended."""
        self._poisoned = 0
        self._struck: set[int] = set()
        """Incarnations of engines hit by faults, or given up because of that, and of front ends
        that were unreachable so long that they may have been given up."""
        self._view: ClusterView | None = None
        self.hub = Hub(self, self._new_incarnation())
        for index in range(plan.front_ends):
            self._start_front(index)
        for rank in range(plan.engines):
            self._start_engine(rank)
        self.clients = [Client(self, ask) for ask in plan.asks]
        self._pins = {ask.name: ask.pinned_rank for ask in plan.asks}
        for fault in plan.faults:
            self.clock.at(fault.at, self._strike, fault)
        self.clock.at(0.5, self._watch)

    # -- run -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end and check all invariants.

        Raises:
            Violation: an invariant was violated.
        """
        try:
            over = max(fault.at + fault.seconds for fault in self.plan.faults) + 0.2
            self.clock.run(over)
            # Each poison kills one more engine than it takes to suspect it.
            poisons = sum(ask.is_poison for ask in self.plan.asks)
            trials = poisons * (CONVICTING_DEATHS - 1) * MAX_BACKOFF
            longest = LONGEST + (LONGEST_WAIT + trials if poisons else 0)
            if any(ask.pinned_rank is not None for ask in self.plan.asks):
                longest = max(longest, over + LONGEST_WAIT)  # its engine may be cut off till then
            self.clock.run(longest, lambda: all(client.done for client in self.clients))
            self._check_answers()
            self.clock.run(self.clock.now + RECOVERY, self._is_whole)
            self._check_rest()
            self.clock.run(self.clock.now + QUIET)
            self._check_rest()
        except AssertionError as error:
            raise Violation(str(error)) from error

    def _is_whole(self) -> bool:
        """Return whether all expected processes run, know each other, and have no work."""
        try:
            self._check_rest()
        except AssertionError:
            return False
        return True

    # -- starting --------------------------------------------------------------------------------

    def _new_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def _start_front(self, index: int) -> None:
        front = Front(self, index, self._new_incarnation())
        self.fronts[index] = self._all_fronts[front.incarnation] = front
        self.senders[front.name.encode()] = front

    def _start_engine(self, rank: int) -> None:
        engine = Engine(self, rank, self._new_incarnation())
        self._tell("%s (%d) starts", engine.name, engine.incarnation)
        self.engines[rank] = self._all_engines[engine.incarnation] = engine
        self.senders[engine.name.encode()] = engine

    def front_process(self, incarnation: int) -> Front:
        """Return a front-end process, running or not."""
        return self._all_fronts[incarnation]

    def engine_process(self, incarnation: int) -> Engine:
        """Return an engine process, running or not."""
        return self._all_engines[incarnation]

    # -- ways to the coordinator -----------------------------------------------------------------

    def to_hub(self, member: Process, message: MemberMessage) -> None:
        """Send on the registration socket; a successor gets what a dead coordinator missed."""
        hub = self.hub
        if hub.alive:
            self.network.send(member, hub, "registration", hub.from_member, member, message)

    def stats_to_hub(self, engine: Engine, stats: EngineStats) -> None:
        """Send on the back output socket."""
        hub = self.hub
        if hub.alive:
            self.network.send(engine, hub, "stats", hub.handle, stats)

    def published(self, view: ClusterView) -> None:
        """Check that the coordinator has given up only processes hit by faults."""
        before, self._view = self._view, view
        if before is None:
            return
        left = {each.incarnation for each in before.engines}
        left -= {each.incarnation for each in view.engines}
        if before.epoch == view.epoch:
            for engine in self._untouched():
                assert engine.incarnation not in left, f"the coordinator gives up {engine.name}"
            self._struck |= left
        self.troubled |= left

    def view_taken(self, front: Front, before: set[tuple[int, int]]) -> None:
        """Check that a front end that had routes to `before` forgets none after a view."""
        lost = before - front.open_routes if front.incarnation not in self._struck else set()
        for engine in self._untouched() if lost else ():
            known = (engine.rank, engine.incarnation) not in lost
            assert known, f"{front.name} does not know {engine.name} any more"

    def _untouched(self) -> list[Engine]:
        """Return the engines that must never be considered gone, not even briefly."""
        if any(fault.kind == "lose control messages" for fault in self.plan.faults):
            return []
        return [
            each
            for each in self.engines.values()
            if each.incarnation not in self._struck and not each.is_draining
        ]

    # -- deaths ----------------------------------------------------------------------------------

    def ended(self, engine: Engine) -> None:
        """Handle the exit of an engine process."""
        self._poisoned += not engine.is_draining
        self._kill_engine(engine)

    def _kill_engine(self, engine: Engine, *, with_node: bool = False) -> None:
        """Kill an engine process; without its node, its connections are seen to close."""
        if not engine.alive:
            return
        engine.kill()
        self._note_who_ran_alone(engine)
        self._tell("%s (%d) ends", engine.name, engine.incarnation)
        self.troubled.add(engine.incarnation)
        del self.engines[engine.rank]
        if not with_node:
            for line in engine.links.values():
                self.clock.at(self.clock.now + 0.001, setattr, line, "up", False)
            self.clock.at(self.clock.now + 0.01, self._report, "engine", engine)
            for other in self.engines.values():
                if other.blocks is not None:
                    other.blocks.lose(engine)
        if engine.rank not in self._retired:
            wait = self._restarts[engine.name].wait_after(1.0, was_ready=True)
            assert wait is not None
            self.clock.at(self.clock.now + wait + 0.2, self._start_engine, engine.rank)

    def _report(self, kind: str, process: Process) -> None:
        index = int(process.name.split()[-1])
        goodbye = Goodbye(kind, index, process.incarnation)  # type: ignore[arg-type]
        supervisor = Process(self.clock, "supervisor", 0)
        self.to_hub(supervisor, goodbye)

    def _kill_front(self, front: Front) -> None:
        if not front.alive:
            return
        front.kill()
        del self.fronts[front.index]
        self.clock.at(self.clock.now + 0.01, self._report, "front_end", front)
        self.clock.at(self.clock.now + 0.8, self._start_front, front.index)

    def _kill_hub(self) -> None:
        if not self.hub.alive:
            return
        self.hub.kill()
        self.clock.at(self.clock.now + 0.7, self._restart_hub)

    def _members(self) -> "tuple[Engine | Front, ...]":
        return (*self.engines.values(), *self.fronts.values())

    def _restart_hub(self) -> None:
        self.hub = Hub(self, self._new_incarnation())
        for each in self._members():
            if each.is_subscribed:
                kind = "engine" if isinstance(each, Engine) else "front_end"
                self.network.send(
                    each, self.hub, "subscription", self.hub.subscribed, kind, control=False
                )

    def _watch(self) -> None:
        """Run the supervisor's check for hung steps."""
        for engine in list(self.engines.values()):
            if engine.is_overdue:
                self._kill_engine(engine)
        self.clock.at(self.clock.now + 0.5, self._watch)

    # -- faults ----------------------------------------------------------------------------------

    def _tell(self, what: str, *arguments: object) -> None:
        logger.info("%7.3f " + what, self.clock.now, *arguments)

    def _strike(self, fault: Fault) -> None:
        self._tell("-- %s (%d, %.1f s)", fault.kind, fault.which, fault.seconds)
        engines, fronts = list(self.engines.values()), list(self.fronts.values())
        engine = engines[fault.which % len(engines)] if engines else None
        front = fronts[fault.which % len(fronts)] if fronts else None
        match fault.kind.split():
            case ["kill", "coordinator"]:
                self._kill_hub()
            case ["halt", "all", "engines"]:
                for each in engines:
                    each.halt(fault.seconds, hand_over=fault.which % 2 == 0)
            case ["stop", "coordinator"]:
                self._stop(self.hub, fault.seconds)
            case ["lose", "control", "messages"]:
                self.network.lossy_until = self.clock.now + fault.seconds
            case ["delay", "control", "messages"]:
                self.network.slow_until = self.clock.now + fault.seconds
            case ["cut", "engine", "from", "engine"] | ["damage", "blocks"]:
                self._strike_blocks(engines, fault)
            case [_, "front", "end"] | ["cut", "front", *_]:
                if front is not None:
                    self._strike_front(front, fault)
            case _:
                if engine is not None:
                    self._strike_engine(engine, front, fault)

    def _strike_front(self, front: Front, fault: Fault) -> None:
        if fault.seconds > TIMEOUT / 2:
            self._struck.add(front.incarnation)
        match fault.kind:
            case "kill front end":
                self._kill_front(front)
            case "stop front end":
                self._stop(front, fault.seconds)
            case "cut front end from coordinator":
                self._cut(front.name, self.hub.name, fault)
            case _:
                raise ValueError(fault.kind)

    def _strike_engine(self, engine: Engine, front: Front | None, fault: Fault) -> None:
        self._struck.add(engine.incarnation)
        if fault.kind not in HARMLESS:
            self.troubled.add(engine.incarnation)
        match fault.kind:
            case "kill engine" | "lose node":
                self._kill_engine(engine, with_node=fault.kind == "lose node")
            case "stop engine":
                self._stop(engine, fault.seconds)
            case "hang step":
                engine.hung = True
            case "halt engine":
                engine.halt(fault.seconds, hand_over=fault.which % 2 == 0)
            case "slow engine":
                engine.slowness = 10.0
                engine.after(fault.seconds, setattr, engine, "slowness", 1.0)
            case "retire engine" if len(self._retired) + 1 < self.plan.engines:
                self._retired.add(engine.rank)
                engine.call(engine.drain)
            case "cut engine from coordinator":
                self._cut(engine.name, self.hub.name, fault)
            case "cut engine from front end" if front is not None:
                self._cut(engine.name, front.name, fault)
            case "reset engine and front end" if front is not None:
                self._reset(engine, front)
            case "reset engine and coordinator":
                self.network.reset(engine.name, self.hub.name)
                self._subscribe_again(engine.name)

    def _stop(self, process: Process, seconds: float) -> None:
        if process.alive and not process.stopped:
            process.stop()
            self.clock.at(self.clock.now + seconds, process.go_on)

    def _cut(self, one: str, other: str, fault: Fault) -> None:
        resets = fault.which % 2 == 0
        self.network.cut(one, other, fault.seconds, resets=resets)
        if resets and other == self.hub.name:
            self.clock.at(self.clock.now + fault.seconds + 0.1, self._subscribe_again, one)

    def _strike_blocks(self, engines: list[Engine], fault: Fault) -> None:
        """Cut the path of KV blocks from engine 0, or corrupt them; nothing else notices."""
        prefill = self.engines.get(0)
        others = [each for each in engines if each.rank]
        if prefill is None or prefill.blocks is None or not others:
            return
        if fault.kind == "damage blocks":
            prefill.blocks.damaged_until = self.clock.now + fault.seconds
            return
        other = others[fault.which % len(others)]
        self._cut(prefill.name, other.name, fault)
        if fault.which % 2 == 0 and other.blocks is not None:
            other.blocks.lose(prefill)

    def _subscribe_again(self, name: str) -> None:
        for each in self._members():
            if each.name == name and each.is_subscribed and self.hub.alive:
                kind = "engine" if isinstance(each, Engine) else "front_end"
                self.network.send(
                    each, self.hub, "subscription", self.hub.subscribed, kind, control=False
                )

    def _reset(self, engine: Engine, front: Front) -> None:
        """Break the connections between an engine and a front end; they are re-established."""
        self.network.reset(engine.name, front.name)
        for line in engine.links.values():
            if line.front is front:
                line.up = False
                self.clock.at(self.clock.now + 0.1, setattr, line, "up", engine.alive)

    def is_pinned(self, name: str) -> bool:
        """Return whether only one engine may run a request."""
        return self._pins[name] is not None

    def is_retired(self, rank: int | None) -> bool:
        """Return whether an engine is permanently gone."""
        return rank in self._retired

    # -- invariants ------------------------------------------------------------------------------

    def assigned(self, request: AddRequest, engine: Engine) -> None:
        """Record that a request was sent to an engine."""
        name, how = request.request_id, " to run alone" if request.exclusive_steps else ""
        self._tell("%s to %s (%d)%s", name, engine.name, engine.incarnation, how)
        assert self._pins[name] in (None, engine.rank), f"{name} is sent to {engine.name}"
        if request.exclusive_steps:
            deaths = len(self._assigned[name] & self.troubled)
            assert deaths > self.plan.max_resumes, f"{name} was suspected after {deaths} deaths"
        self._assigned[name].add(engine.incarnation)

    def _note_who_ran_alone(self, engine: Engine) -> None:
        self._died_alone |= {engine.alone, engine.alone_in_step}

    def forget_assignments(self, name: str) -> None:
        """Reset a request that starts over at another front end."""
        self._assigned.pop(name, None)

    def check_step(self, engine: Engine) -> None:
        """Check that nothing runs for a front end that has gone, or together with a suspect."""
        fronts = engine.core._front_ends
        alone = engine.core._scheduler.exclusive_request
        for entry in engine.core._scheduler._in_flight if alone else ():
            assert all(request.id == alone for request in entry.requests), "not alone"
        for request in engine.core._scheduler._requests.all.values():
            assert fronts.is_present(request.front_end), f"{request.request_id} runs for nobody"

    def _check_answers(self) -> None:
        # An unreachable engine may resume with a request before it is notified.
        unheard = sum(fault.kind in UNHEARD for fault in self.plan.faults)
        attempts = sum(client.attempts for client in self.clients if client.next_names.is_poison)
        poisons = sum(ask.is_poison for ask in self.plan.asks)
        # A convicted request also explains deaths that another one caused: these no longer count
        # for the other.
        explained = (poisons - 1) * (self.plan.max_resumes + 1) if poisons else 0
        most = (self.plan.max_resumes + 1 + CONVICTING_DEATHS) * attempts + unheard + explained
        assert self._poisoned <= most, f"poison killed {self._poisoned} engines, not {most}"
        for client in self.clients:
            name = client.next_names.name
            assert client.done, f"{name} was not answered within {LONGEST:.0f} s"
            client.check()
            if client.next_names.is_poison:
                assert client.error is not None, f"{name} is poison and was answered"
            if client.error is not None:
                if self.is_retired(client.next_names.pinned_rank):
                    assert f"engine {client.next_names.pinned_rank}" in client.error, client.error
                elif "alone" not in client.error:
                    # An engine that keeps dying is restarted ever later, or there is none.
                    assert self._may_be_long_without_engines, f"{name}: {client.error}"
                elif name not in self._died_alone:
                    deaths = len(self._assigned[name] & self.troubled)
                    least = self.plan.max_resumes + MAX_TRIES
                    assert deaths > least, f"{name}: {deaths} deaths, {client.error}"

    @property
    def _may_be_long_without_engines(self) -> bool:
        cut = any(fault.seconds == LONG_CUT for fault in self.plan.faults)
        return cut or any(ask.is_poison for ask in self.plan.asks)

    def _check_rest(self) -> None:
        wanted = sorted(set(range(self.plan.engines)) - self._retired)
        assert sorted(self.engines) == wanted, f"engines {sorted(self.engines)}, not {wanted}"
        for process in (self.hub, *self.engines.values(), *self.fronts.values()):
            assert process.alive, f"{process.name} is dead"
            assert not process.stopped, f"{process.name} is stopped"
        self._check_view()
        for engine in self.engines.values():
            self._check_engine(engine)
        for front in self.fronts.values():
            self._check_front(front, wanted)

    def _check_view(self) -> None:
        view = self.hub.state.view()
        listed = {entry.rank: (entry.incarnation, entry.ready) for entry in view.engines}
        there = {rank: (engine.incarnation, True) for rank, engine in self.engines.items()}
        assert listed == there, f"the coordinator lists {listed}, not {there}"
        assert view.num_front_ends == len(self.fronts), f"{view.num_front_ends} front ends listed"
        assert not view.running, "the view says running"

    def _check_engine(self, engine: Engine) -> None:
        core = engine.core
        assert not core.has_work, f"{engine.name} still has work"
        assert not engine.is_busy, f"{engine.name} loads its model, or is in a step"
        assert engine.is_announced, f"{engine.name} was never said to be ready"
        core._scheduler.check_integrity()
        gauges = core._scheduler.gauges()
        assert tuple(gauges) == (0, 0, 0.0, 0), f"{engine.name} leaks: {gauges}"
        if engine.blocks is not None and engine.tiers is not None:
            engine.blocks.check()
            assert engine.tiers._fetched_bytes == 0, f"{engine.name} keeps blocks of nobody"
        fronts = {index: line.front.incarnation for index, line in engine.links.items()}
        there = {index: front.incarnation for index, front in self.fronts.items()}
        assert fronts == there, f"{engine.name} is connected to {fronts}, not {there}"

    def _check_front(self, front: Front, ranks: list[int]) -> None:
        router = front.router
        members, failover = router.members, router.failover
        assert not router.delivery.in_flight, f"{front.name} leaks {router.delivery.in_flight}"
        assert not failover.waiting, f"{front.name} leaks waiting requests"
        assert not failover.probation.suspects, f"{front.name} leaks suspects"
        assert failover.probation.on_trial is None, f"{front.name} tries for ever"
        open_routes = [route for route in members.routes.values() if route.is_open]
        loads = router.loads.of(open_routes)
        assert [load.rank for load in loads] == ranks, f"{front.name} routes to {loads}"
        assert all(load.requests == 0 for load in loads), f"{front.name} counts {loads}"
        assert members.view is not None
        assert not members.view.running, f"{front.name} believes that engines run"
        for route in open_routes:
            rank, incarnation = route.engine
            assert incarnation == self.engines[rank].incarnation, f"{front.name}: old {rank}"
        if router.index is not None:
            assert sorted(router.index._engines) == ranks, f"{front.name} follows other engines"
            for rank, held in router.index._engines.items():
                told = self.engines[rank].core._scheduler.blocks_since(ALL_BLOCKS)
                assert told is not None
                there = set(array("Q", told.stored))
                assert held.names == there, f"{front.name} does not know what engine {rank} holds"
