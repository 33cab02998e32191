"""Whether operators have an engine halted."""


class Halting:
    """Pauses and sleeps of one engine; while either lasts no step is launched, requests wait."""

    def __init__(self) -> None:
        self.is_paused = False
        """Until `resume`."""
        self.sleep_level = 0
        """1 or 2 until `wake_up`: the executor's memory is given back."""
        self.hands_over = False
        """Requests go to other engines instead of waiting here."""

    @property
    def is_sleeping(self) -> bool:
        """Whether the executor's memory is given back."""
        return self.sleep_level > 0

    @property
    def is_halted(self) -> bool:
        """Whether no step may be launched."""
        return self.is_paused or self.is_sleeping

    def pause(self, *, hand_over: bool = False) -> None:
        """All requests keep what they have, or go to other engines."""
        self.is_paused = True
        self.hands_over |= hand_over

    def resume(self) -> None:
        """End a pause."""
        self.is_paused = False
        self.hands_over &= self.is_sleeping

    def sleep(self, level: int, *, hand_over: bool = False) -> None:
        """The executor's memory is given back; requests wait, or go to other engines."""
        self.sleep_level = level
        self.hands_over |= hand_over

    def wake_up(self) -> None:
        """End a sleep."""
        self.sleep_level = 0
        self.hands_over &= self.is_paused
