"""Operators' orders to all engines of a group, including those that join later."""

from typing import Literal

import msgspec

from engine.shared.messages.wire import Message

PauseMode = Literal["keep", "wait", "abort", "move"]
"""What happens to an engine's requests: keep: they wait; wait: running ones finish first;
abort: all are aborted; move: they go to engines that are not halted."""

SleepMode = Literal["keep", "abort", "move"]

ASLEEP_TAGS = ("weights", "kv_cache")
"""Memory released by sleep levels 1 and 2, by vLLM's tags."""


PUSHED = "<trainer>"
"""`WeightsSource.model` of weights sent by a trainer."""


class WeightsSource(msgspec.Struct, frozen=True, array_like=True):
    """The source of weights, and their version name."""

    model: str
    """Directory or hub id, or `PUSHED`."""
    revision: str | None = None
    version: str = ""
    """Empty for the configured weights."""


class FleetOrder(msgspec.Struct, frozen=True, array_like=True):
    """The current order, valid until the next one; `revision` grows with every change.

    Engines that start later follow it too.
    """

    revision: int
    pause: PauseMode | None = None
    """None: not paused."""
    pause_revision: int = 0
    """The revision that set `pause`; engines act on it once."""
    sleep_level: int | None = None
    """0: no memory is released; 1: weights are kept in host memory; 2: weights are dropped; None:
    engines are awake."""
    sleep_mode: SleepMode = "keep"
    woken: list[str] = []
    """Tags that sleeping engines have reloaded."""
    sleep_revision: int = 0
    tickets: list[int] = []
    """Tickets of the newest requests that this order includes."""
    weights: WeightsSource | None = None
    """What starting engines load instead of the configured model, or wait for from a trainer;
    running engines are sent it separately."""


class FleetRequest(Message, frozen=True, tag="FleetWish"):
    """An operator's request to all engines, repeated until an order contains its ticket."""

    ticket: int
    action: Literal["pause", "resume", "sleep", "wake_up", "weights"]
    mode: PauseMode = "keep"
    level: int = 1
    tags: list[str] = []
    """For `wake_up`; empty: all."""
    weights: WeightsSource | None = None
    group: str = ""
