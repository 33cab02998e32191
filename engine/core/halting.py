"""Pause and sleep state of an engine."""

from engine.shared.messages import ASLEEP_TAGS, FleetOrder, UtilityCall

FLEET = -1
"""Value of `front_end` in calls that result from a fleet order."""


def calls_between(before: FleetOrder, after: FleetOrder) -> list[UtilityCall]:
    """Return the calls by which an engine that followed one order follows the next."""

    def call(name: str, **arguments: str | int) -> UtilityCall:
        return UtilityCall(after.revision, FLEET, name, dict(arguments))

    calls = []
    if after.sleep_revision > before.sleep_revision:
        level = after.sleep_level
        if level is None:
            calls.append(call("wake_up"))
        else:
            continues = level == before.sleep_level and set(before.woken) < set(after.woken)
            if not continues:
                calls.append(call("sleep", level=level, mode=after.sleep_mode))
            if after.woken:
                calls.append(call("wake_up", tags=",".join(after.woken)))
    if after.pause_revision > before.pause_revision:
        calls.append(call("resume") if after.pause is None else call("pause", mode=after.pause))
    return calls


class Halting:
    """Why an engine launches no steps, so that its requests wait or move to other engines."""

    def __init__(self) -> None:
        self.is_paused = False
        """Until `resume`."""
        self.is_sleeping = False
        """Until `wake_up`; also at level 0, which releases no memory."""
        self.sleep_level = 0
        self.asleep: set[str] = set()
        """Subset of `ASLEEP_TAGS` whose memory is released."""
        self.lacks_weights = False
        """Until a trainer has sent the weights that the other engines have."""
        self.hands_over = False
        """Requests move to other engines instead of waiting here."""
        self.order = FleetOrder(0)
        """The newest fleet order accepted."""
        self.settled = 0
        """Revision of the newest order carried out."""
        self.error = ""
        """Why that failed."""

    def accept(self, order: FleetOrder) -> list[UtilityCall]:
        """Accept a fleet order; return the calls that carry it out."""
        before = self.order
        if order.revision <= before.revision:
            return []
        self.order = order
        calls = calls_between(before, order)
        if not calls:
            self.settled = order.revision
        return calls

    @property
    def is_halted(self) -> bool:
        """Whether launching steps is forbidden."""
        return self.is_paused or self.is_sleeping or self.lacks_weights

    def have_weights(self) -> None:
        """Record that the engine has the same weights as the others."""
        self.lacks_weights = False
        self.hands_over &= self.is_halted

    def pause(self, *, hand_over: bool = False) -> None:
        """Start a pause; requests keep their state, or move to other engines."""
        self.is_paused = True
        self.hands_over |= hand_over

    def resume(self) -> None:
        """End a pause."""
        self.is_paused = False
        self.hands_over &= self.is_halted

    def sleep(self, level: int, *, hand_over: bool = False) -> None:
        """Record that the executor's memory is released; requests wait, or move to other
        engines."""
        self.is_sleeping = True
        self.sleep_level = max(level, self.sleep_level)
        if level:
            self.asleep.update(ASLEEP_TAGS)
        self.hands_over |= hand_over

    def wake_up(self, tags: set[str]) -> None:
        """Record that the memory of these tags is restored; the last tag ends the sleep."""
        self.asleep -= tags
        if not self.asleep:
            self.is_sleeping = False
            self.sleep_level = 0
            self.hands_over &= self.is_halted
