"""Whether operators have an engine halted."""

from engine.shared.messages import ASLEEP_TAGS, FleetOrder, UtilityCall

FLEET = -1
"""Stands for the front end in calls that follow from an order for the whole fleet."""


def calls_of(before: FleetOrder, after: FleetOrder) -> list[UtilityCall]:
    """Return what an engine has to do that has followed one order when it hears of the next."""

    def call(name: str, **arguments: str | int) -> UtilityCall:
        return UtilityCall(after.revision, FLEET, name, dict(arguments))

    calls = []
    if after.sleep_revision > before.sleep_revision:
        level = after.sleep_level
        if level is None:
            calls.append(call("wake_up"))
        else:
            goes_on = level == before.sleep_level and set(before.woken) < set(after.woken)
            if not goes_on:
                calls.append(call("sleep", level=level, mode=after.sleep_mode))
            if after.woken:
                calls.append(call("wake_up", tags=",".join(after.woken)))
    if after.pause_revision > before.pause_revision:
        calls.append(call("resume") if after.pause is None else call("pause", mode=after.pause))
    return calls


class Halting:
    """Why one engine launches no step, so that its requests wait or go to others."""

    def __init__(self) -> None:
        self.is_paused = False
        """Until `resume`."""
        self.is_sleeping = False
        """Until `wake_up`, if only at level 0, which gives nothing back."""
        self.sleep_level = 0
        self.asleep: set[str] = set()
        """Which of `ASLEEP_TAGS` have been given back."""
        self.lacks_weights = False
        """Until a trainer has sent those that the others compute with."""
        self.hands_over = False
        """Requests go to other engines instead of waiting here."""
        self.order = FleetOrder(0)
        """The newest order for the whole fleet that has been taken up."""
        self.settled = 0
        """The revision of the newest that has been carried out."""
        self.error = ""
        """Why it could not be."""

    def take_up(self, order: FleetOrder) -> list[UtilityCall]:
        """Take up an order for the whole fleet; return what has to be done for it."""
        before = self.order
        if order.revision <= before.revision:
            return []
        self.order = order
        calls = calls_of(before, order)
        if not calls:
            self.settled = order.revision
        return calls

    @property
    def is_halted(self) -> bool:
        """Whether no step may be launched."""
        return self.is_paused or self.is_sleeping or self.lacks_weights

    def have_weights(self) -> None:
        """There are weights that the others have, too."""
        self.lacks_weights = False
        self.hands_over &= self.is_halted

    def pause(self, *, hand_over: bool = False) -> None:
        """All requests keep what they have, or go to other engines."""
        self.is_paused = True
        self.hands_over |= hand_over

    def resume(self) -> None:
        """End a pause."""
        self.is_paused = False
        self.hands_over &= self.is_halted

    def sleep(self, level: int, *, hand_over: bool = False) -> None:
        """The executor's memory is given back; requests wait, or go to other engines."""
        self.is_sleeping = True
        self.sleep_level = max(level, self.sleep_level)
        if level:
            self.asleep.update(ASLEEP_TAGS)
        self.hands_over |= hand_over

    def wake_up(self, tags: set[str]) -> None:
        """Some of what was given back is there again; with the last of it a sleep ends."""
        self.asleep -= tags
        if not self.asleep:
            self.is_sleeping = False
            self.sleep_level = 0
            self.hands_over &= self.is_halted
