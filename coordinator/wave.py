"""The engines' wave number and running flag, and which engines to wake, from their reports.

One interface, two kinds of groups. Independent engines block on their own queues and need no
waking; for them the wave only counts how often the whole group went from running to paused.
The engines of a lockstep group step together (see `engine.lockstep.wave`), and the coordinator
wakes paused engines when others have started.

The number is a logical clock: it only grows, and a larger one that a member brings from before a
restart of the coordinator is adopted.
"""

from typing import NamedTuple

from engine.shared.messages import EngineStats, StartDpWave, StartWave, WakeUp, WaveComplete

ORDER_INTERVAL = 0.025
"""Seconds between repetitions of an order that some engine is not known to have followed."""

NEVER = float("inf")


class _Wave:
    """The wave of all engines together. Methods that return a bool return whether a view is due."""

    def __init__(self) -> None:
        self.wave = 0
        self.wakeups = {"front_end": 0, "engine": 0}
        """How often the group went from paused to running, by the sender of the first message:
        "front_end" (always, for independent engines) or "engine"."""

    def adopt(self, wave: int) -> None:
        """Adopt a wave number that a member remembers, if larger."""
        self.wave = max(self.wave, wave)


class IndependentWave(_Wave):
    """Derives (wave, running) from the set of engines that have work."""

    orders_due = NEVER

    def __init__(self) -> None:
        super().__init__()
        self._busy: set[int] = set()
        self._steps: dict[int, int] = {}
        """Newest step of each engine, by rank."""
        self._queued: list[StartDpWave] = []

    @property
    def running(self) -> bool:
        """Whether any engine has reported work."""
        return bool(self._busy)

    def take_members(self, ranks: frozenset[int]) -> None:
        """Set the ranks of the ready engines."""
        self._settle(self._busy & ranks)

    def stats(self, stats: EngineStats) -> bool:
        """Process an engine's stats."""
        own = {stats.rank}
        has_work = stats.waiting + stats.running > 0
        known = self._steps.get(stats.rank, stats.step)
        self._steps[stats.rank] = stats.step
        if self.running and has_work == (stats.rank in self._busy):
            return False
        if not has_work and not self.running and stats.step > known:
            self._settle(own)  # it ran and paused between two of its reports
            self._settle(set())
            return True
        return self._settle(self._busy | own if has_work else self._busy - own)

    def report(self, report: StartWave | WaveComplete) -> bool:
        """Process an engine's report that a wave started or ended."""
        self.adopt(report.wave)
        return isinstance(report, StartWave) and self._forward(report.rank)

    def notice(self, notice: WakeUp) -> bool:
        """Process a front end's notice that it sent a request to a paused engine."""
        return self._forward(notice.rank)

    def orders(self, now: float) -> list[StartDpWave]:
        """Return the orders to send to engines at `now` (seconds, monotonic)."""
        queued, self._queued = self._queued, []
        return queued

    def _forward(self, rank: int) -> bool:
        # No engine depends on this to make progress, so one message is enough.
        if self.running:
            return False
        self._queued.append(StartDpWave(self.wave, rank))
        return True

    def _settle(self, busy: set[int]) -> bool:
        changed = bool(busy) != self.running
        if changed and not busy:
            self.wave += 1
        elif changed:
            # Counted by stats: notices come once per request, before or after the engine's stats.
            self.wakeups["front_end"] += 1
        self._busy = busy
        return changed


class Clock(NamedTuple):
    """A logical time of a lockstep group; later ones compare larger."""

    topology: int
    wave: int


class LockstepWave(_Wave):
    """Tracks a lockstep group from its engines' reports and wakes it until all have started.

    Each report is (clock, running). For one engine it only grows: it is paused in a wave, then runs
    it, then is paused in the next. So reports of an earlier clock are void, within one clock
    "running" is final, and late, repeated or reordered reports do no harm. An order is repeated
    until reports show that every engine follows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = Clock(0, 0)
        self._members: frozenset[int] = frozenset()
        self._started: set[int] = set()
        """Ranks that reported running at `_clock`."""
        self._start_requested = False
        """A front end requested a start; cleared once the group has run."""
        self._hold_epoch = 0
        self._excluded_rank = -1
        self._order_at = NEVER

    @property
    def running(self) -> bool:
        """Whether any engine has reported that it runs."""
        return bool(self._started)

    @property
    def orders_due(self) -> float:
        """Latest time of the next call of `orders`."""
        return self._order_at if self._needs_order() else NEVER

    def take_members(self, ranks: frozenset[int]) -> None:
        """Set the ranks of the ready engines."""
        was_needed = self._needs_order()
        self._members = ranks
        self._started &= ranks
        if not ranks:
            self._hold_epoch = 0
        if self._needs_order() and not was_needed:
            self._order_now(excluded_rank=-1)

    def stats(self, stats: EngineStats) -> bool:
        """Process an engine's stats."""
        clock = Clock(stats.topology, stats.wave)
        return self._observe(stats.rank, clock, stats.wave_running, stats.hold_epoch)

    def report(self, report: StartWave | WaveComplete) -> bool:
        """Process an engine's report that a wave started or ended."""
        starts = isinstance(report, StartWave)
        clock = Clock(report.topology, report.wave if starts else report.wave + 1)
        return self._observe(report.rank, clock, starts, report.hold_epoch)

    def notice(self, notice: WakeUp) -> bool:
        """Process a front end's notice that it sent a request to a paused engine."""
        # A notice from an earlier wave is void: its request has run, or will start a wave itself.
        is_late = notice.wave < self.wave
        if self.running or self._start_requested or is_late or self._is_held():
            return False
        self.adopt(notice.wave)
        self._start_requested = True
        self.wakeups["front_end"] += 1
        self._order_now(excluded_rank=notice.rank)
        return True

    def orders(self, now: float) -> list[StartDpWave]:
        """Return the orders to send to engines at `now` (seconds, monotonic)."""
        if not self._needs_order() or now < self._order_at:
            return []
        order = StartDpWave(self.wave, self._excluded_rank, self._hold_epoch, self._clock.topology)
        # Only the first order excludes the rank that was notified directly: a repetition has to
        # reach it if that message is lost.
        self._excluded_rank = -1
        self._order_at = now + ORDER_INTERVAL
        return [order]

    def _observe(self, rank: int, clock: Clock, running: bool, hold_epoch: int) -> bool:
        if clock < self._clock:
            return False
        before = (self.wave, self.running)
        was_needed = self._needs_order()
        if clock > self._clock:
            # Starts and requests of the earlier clock are void.
            if clock.topology > self._clock.topology:
                self._hold_epoch = 0
            self._clock = clock
            self._started = set()
            self._start_requested = was_needed = False
        if running:
            if not self._started and not self._start_requested:
                self.wakeups["engine"] += 1  # otherwise counted with the front end's notice
            self._started.add(rank)
            self._start_requested = False
        self._hold_epoch = max(self._hold_epoch, hold_epoch)
        self.adopt(clock.wave)
        if self._needs_order() and not was_needed:
            self._order_now(excluded_rank=rank)
        return before != (self.wave, self.running)

    def _order_now(self, *, excluded_rank: int) -> None:
        self._excluded_rank = excluded_rank
        self._order_at = -NEVER

    def _needs_order(self) -> bool:
        if self.running:
            return not self._started >= self._members
        return self._start_requested and not self._is_held()

    def _is_held(self) -> bool:
        return self._hold_epoch % 2 == 1
