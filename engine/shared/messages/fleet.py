"""What operators want of all engines of a group, those that are still to come included."""

from typing import Literal

import msgspec

from engine.shared.messages.wire import Message

PauseMode = Literal["keep", "wait", "abort", "move"]
"""What becomes of an engine's requests: they wait there; those that run end first; all are aborted;
they go to engines that are not halted."""

SleepMode = Literal["keep", "abort", "move"]

ASLEEP_TAGS = ("weights", "kv_cache")
"""What a sleep at level 1 or 2 gives back, by vLLM's tags."""


PUSHED = "<trainer>"
"""Where weights come from that a trainer has sent."""


class WeightsSource(msgspec.Struct, frozen=True, array_like=True):
    """Where weights were read from, and what they are called."""

    model: str
    """Directory or hub id, or `PUSHED`."""
    revision: str | None = None
    version: str = ""
    """Empty for those of the settings."""


class FleetOrder(msgspec.Struct, frozen=True, array_like=True):
    """The wish that holds until another one comes; `revision` grows with every change.

    Engines that start while it holds begin with it.
    """

    revision: int
    pause: PauseMode | None = None
    """None: they run."""
    pause_revision: int = 0
    """The revision that brought `pause`: nothing is done about an older one."""
    sleep_level: int | None = None
    """0: nothing is given back, 1: weights wait in the host's memory, 2: they are dropped; None:
    engines are awake."""
    sleep_mode: SleepMode = "keep"
    woken: list[str] = []
    """Tags of what sleeping engines have back."""
    sleep_revision: int = 0
    tickets: list[int] = []
    """Those of the newest wishes that it follows from."""
    weights: WeightsSource | None = None
    """What engines that start load instead of the model of their settings, or wait for a trainer to
    send; those that run have been told by themselves."""


class FleetWish(Message, frozen=True):
    """An operator's wish for all engines, told again until an order shows its ticket."""

    ticket: int
    action: Literal["pause", "resume", "sleep", "wake_up", "weights"]
    mode: PauseMode = "keep"
    level: int = 1
    tags: list[str] = []
    """Of `wake_up`; empty: all."""
    weights: WeightsSource | None = None
    group: str = ""
