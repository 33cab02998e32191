"""One engine's part in the waves of its lockstep group: a state machine without I/O.

The engines of a lockstep group run collectives in every step, so either all of them step or none
does. `EngineWave` decides an engine's next action; the loop obeys:

  match wave.next_action(has_work, load):
    case Park(): block on the input queue, then drain it
    case Gather(row): table = all-gather of row.pack(); wave.gathered(table)
    case Step(): schedule and start to execute (or a dummy batch); wave.launched()
    case Land(drains): wait for the oldest step; wave.landed(); drain the queue if it `drains`

and sends `take_reports()` to the coordinator before each of them. The input queue is drained only
after a park or a landing, never between a gather and its step: so a rank's row in the gather covers
everything that the step can contain.

If steps overlap, the next one is gathered for and launched while one runs. A wave then ends with
two gathers: after the first no step is launched any more, and the second follows when all ranks
have landed theirs. So no rank is paused or held while another still computes.

Whether to continue, pause or hold is decided by `judge`, a pure function of the gathered table, so
all ranks decide alike. The wave number, the hold epoch and the topology are logical clocks: each
rank takes the maximum of what it sees, and none ever decreases.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from engine.core.wave_clock import WaveClock
from engine.scheduler.admission import RankState
from engine.shared.messages import StartDpWave, StartWave, WaveComplete

START_REPEAT_INTERVAL = 0.03
"""Seconds after which an engine that waits for its peers requests them again."""

WaveReport = StartWave | WaveComplete


class LockstepError(Exception):
    """Ranks of one group are not in the same state: they must not continue."""


class Phase(StrEnum):
    """State of an engine."""

    FORMING = "forming"
    """The group is being formed; its first gather synchronizes the ranks' clocks, and ends like the
    last gather of a wave."""
    PAUSED = "paused"
    RUNNING = "running"
    HELD = "held"
    """Paused by an operator: requests are kept, and only a newer hold epoch ends it."""
    APART = "apart"
    """In no group: it was lost, or there was none yet. Ends when another is formed."""


class GatherRow(NamedTuple):
    """One rank's state, sent to all others before a step as `WIDTH` int64 values."""

    topology: int
    tag: int
    """Number of this collective since the group was formed."""
    step: int
    """Steps launched in this wave."""
    wave: int
    hold_epoch: int
    """Odd: the group has to be held; even: it can run."""
    has_work: int
    load: RankState

    def pack(self) -> list[int]:
        """Return the row as a list of integers."""
        return [*self[:-1], *self.load]

    @classmethod
    def unpack(cls, values: Sequence[int]) -> "GatherRow":
        """Return the row packed in `values`."""
        num_control = len(cls._fields) - 1
        topology, tag, step, wave, hold_epoch, has_work = values[:num_control]
        load = RankState(*values[num_control:])
        return cls(topology, tag, step, wave, hold_epoch, has_work, load)


WIDTH = len(GatherRow._fields) - 1 + len(RankState._fields)
"""Integers in a packed row."""


class Park(NamedTuple):
    """Block on the input queue: there is nothing to do."""


class Gather(NamedTuple):
    """All-gather this row with all ranks of the group."""

    row: GatherRow


class Step(NamedTuple):
    """Launch a step together with all ranks of the group.

    A rank without work runs an empty batch, so that its peers' collectives complete.
    """

    number: int
    """Steps launched in this wave before this one."""
    loads: tuple[RankState, ...]
    """All ranks' states from this step's gather, by rank; empty in a step without a gather."""


class Land(NamedTuple):
    """Wait for the oldest step in flight."""

    drains: bool
    """Whether to drain the input queue afterwards: not before the gather that ends a wave, which
    all ranks enter in the state that was judged."""


Action = Park | Gather | Step | Land


class Verdict(NamedTuple):
    """The group's decision after a gather."""

    phase: Phase
    wave: int
    hold_epoch: int


def check_same_state(rows: Sequence[GatherRow]) -> None:
    """Check that all ranks are in the same state.

    Raises:
        LockstepError: two ranks are not; the message names both.
    """
    first = rows[0]
    for rank, row in enumerate(rows):
        for name in ("topology", "tag", "step"):
            here, there = getattr(first, name), getattr(row, name)
            if here != there:
                raise LockstepError(
                    f"rank 0 is at {name} {here} but rank {rank} at {there}: "
                    f"rank 0 sent {first}, rank {rank} sent {row}"
                )


def judge(rows: Sequence[GatherRow]) -> Verdict:
    """Return the whole group's decision, from the rows of all ranks."""
    wave = max(row.wave for row in rows)
    hold_epoch = max(row.hold_epoch for row in rows)
    has_work = any(row.has_work for row in rows)
    if is_hold(hold_epoch):
        phase = Phase.HELD
    elif has_work:
        phase = Phase.RUNNING
    else:
        phase = Phase.PAUSED
    return Verdict(phase, wave, hold_epoch)


def is_hold(hold_epoch: int) -> bool:
    """Return whether an epoch means that the group is held."""
    return hold_epoch % 2 == 1


class EngineWave(WaveClock):
    """One rank's state in its group, which determines its next action."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        wave: int = 0,
        gather_interval: int = 1,
        max_in_flight: int = 1,
        phase: Phase = Phase.FORMING,
    ) -> None:
        """Start in a group that has just been formed, or, with `phase` APART, in none.

        `wave` is known from the coordinator's welcome or the group's last formation. Only every
        `gather_interval`-th step of a wave begins with a gather; 1 for admission policies that use
        the loads. At most `max_in_flight` steps are in flight. Both are equal on all ranks. One
        rank, initially rank 0, leads: it reports the end of waves.
        """
        super().__init__(wave)
        self.phase = phase
        self.step = 0
        self._rank = rank
        self._is_leader = rank == 0
        self._incarnation = incarnation
        self._gather_interval = gather_interval
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._must_land = False
        """No step is launched until all have landed and the ranks have gathered once more."""
        self._tag = 0
        self._held_at = 0
        self._loads: tuple[RankState, ...] | None = None
        self._reports: list[WaveReport] = []
        self._repeat_at: float | None = None

    # -- queries ---------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether this rank steps in `wave` together with its group."""
        return self.phase is Phase.RUNNING

    @property
    def held(self) -> bool:
        """Whether the whole group is held, so that operator calls can proceed."""
        return self.phase is Phase.HELD

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched while another runs."""
        return self._max_in_flight > 1

    @property
    def awaits_peers(self) -> bool:
        """Whether this rank started a wave and no peer is known to follow yet."""
        return self.phase is Phase.RUNNING and self.step == 0 and self._loads is None

    def next_action(self, has_work: bool, load: RankState) -> Action:
        """Return the next action.

        `has_work`: whether this rank has requests to step, including waiting ones. `load`: its
        state after the input queue was drained.
        """
        if self._has_to_start(has_work):
            self._start()
        if self.phase in (Phase.PAUSED, Phase.HELD, Phase.APART):
            return Park()
        if self._in_flight and (self._must_land or self._in_flight == self._max_in_flight):
            return Land(drains=not self._must_land)
        if self._loads is None and self._gathers_now():
            return Gather(
                GatherRow(
                    topology=self.topology,
                    tag=self._tag,
                    step=self.step,
                    wave=self.wave,
                    hold_epoch=self.hold_epoch,
                    has_work=int(has_work),
                    load=load,
                )
            )
        return Step(self.step, self._loads or ())

    def take_reports(self) -> list[WaveReport]:
        """Return the pending reports to the coordinator, in order; each is returned once."""
        reports, self._reports = self._reports, []
        return reports

    # -- events ----------------------------------------------------------------------------------

    def group_lost(self) -> None:
        """Leave the group after a member failed or it was superseded, until `regroup`.

        The caller has aborted collectives and abandoned steps in flight.
        """
        self.phase = Phase.APART
        self._loads = None
        self._in_flight = 0
        self._must_land = False

    def regroup(
        self, topology: int, *, is_leader: bool | None = None, gather_interval: int | None = None
    ) -> None:
        """Join a new formation of the group, with this `topology`.

        The rank's wave and hold epoch are kept, and so spread to the group. Leadership and gather
        interval are unchanged unless given.
        """
        self.topology = topology
        self.phase = Phase.FORMING
        self.step = self._tag = 0
        self._loads = None
        if is_leader is not None:
            self._is_leader = is_leader
        if gather_interval is not None:
            self._gather_interval = gather_interval

    def request_received(self, wave: int) -> None:
        """Record the wave of a request that was put into this rank's queue.

        The request itself starts a paused rank through `next_action`'s `has_work`.
        """
        self._adopt(wave)

    def welcomed(self, wave: int) -> None:
        """Adopt a newer wave."""
        self._adopt(wave)

    def start_ordered(self, order: StartDpWave) -> None:
        """Handle the coordinator's order to run, which can arrive late, twice or never."""
        if order.topology != self.topology:
            return
        is_new = order.wave >= self.wave
        self._adopt(order.wave)
        self.hold_epoch = max(self.hold_epoch, order.hold_epoch)
        if self.phase is Phase.PAUSED and is_new and order.excluded_rank != self._rank:
            self._start()

    def pause_requested(self, epoch: int | None = None) -> None:
        """Request a hold of the group, in which requests are kept.

        A request on one rank suffices: the next gather spreads it, and all ranks stop there.
        `epoch` (odd) orders operations that can overtake each other; by default the newest known
        epoch plus one, or no change if that already is a hold.
        """
        newest = self.hold_epoch + (not is_hold(self.hold_epoch))
        self.hold_epoch = max(self.hold_epoch, newest if epoch is None else epoch)

    def resume_requested(self, epoch: int | None = None) -> None:
        """Request the end of a hold; `epoch` (even) as in `pause_requested`.

        Idempotent. A request on one rank suffices here too.
        """
        newest = self.hold_epoch + is_hold(self.hold_epoch)
        self.hold_epoch = max(self.hold_epoch, newest if epoch is None else epoch)

    def gathered(self, table: Sequence[Sequence[int]]) -> None:
        """Process the packed rows of all ranks, in rank order.

        Raises:
            LockstepError: the ranks are not in the same state.
        """
        rows = [GatherRow.unpack(values) for values in table]
        check_same_state(rows)
        verdict = judge(rows)
        self._tag += 1
        self._adopt(verdict.wave)
        self.hold_epoch = max(self.hold_epoch, verdict.hold_epoch)
        self._must_land = self._in_flight > 0 and verdict.phase is not Phase.RUNNING
        if self._must_land:
            return
        if verdict.phase is Phase.RUNNING:
            self._loads = tuple(row.load for row in rows)
            if self.phase is Phase.FORMING:
                self._start()
        else:
            self._stop(verdict)

    def launched(self) -> None:
        """Record that this rank has launched the step."""
        self._tag += 1
        self.step += 1
        self._in_flight += 1
        self._loads = None

    def landed(self) -> None:
        """Record that the oldest step has completed on this rank."""
        self._in_flight -= 1

    def tick(self, now: float) -> None:
        """Process the passing of time while a gather is pending; `now` in seconds, monotonic.

        A rank without followers repeats its report, so that losing it with a crashed coordinator
        costs only an interval.
        """
        if not self.awaits_peers:
            self._repeat_at = None
        elif self._repeat_at is None:
            self._repeat_at = now + START_REPEAT_INTERVAL
        elif now >= self._repeat_at:
            self._repeat_at = now + START_REPEAT_INTERVAL
            self._report_start()

    def _has_to_start(self, has_work: bool) -> bool:
        if self.phase is Phase.PAUSED:
            return has_work or is_hold(self.hold_epoch)
        # Work that arrives while held waits; every newer operation needs a gather.
        return self.phase is Phase.HELD and self.hold_epoch > self._held_at

    def _gathers_now(self) -> bool:
        return self.phase is Phase.FORMING or self.step % self._gather_interval == 0

    def _start(self) -> None:
        self.phase = Phase.RUNNING
        self._repeat_at = None
        self._report_start()

    def _stop(self, verdict: Verdict) -> None:
        self.phase = verdict.phase
        self._held_at = verdict.hold_epoch
        self.step = 0
        if self._is_leader:
            self._reports.append(
                WaveComplete(
                    self._rank, self._incarnation, self.wave, verdict.hold_epoch, self.topology
                )
            )
        self.wave += 1

    def _adopt(self, wave: int) -> None:
        if wave > self.wave:
            self.wave = wave
            if self.phase is Phase.RUNNING:
                self._report_start()

    def _report_start(self) -> None:
        self._reports.append(
            StartWave(self._rank, self._incarnation, self.wave, self.hold_epoch, self.topology)
        )
