"""An engine that waits for a coordinator logs that, and for how long."""

import logging
from queue import Empty, SimpleQueue

import pytest

from engine.core.events import InboxItem, Welcomed
from engine.process import main


class Clock:
    """Stands for `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class SilentInbox(SimpleQueue[InboxItem]):
    """Never receives a message; waiting advances the clock at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def get(self, block: bool = True, timeout: float | None = None) -> InboxItem:
        assert timeout is not None
        self._clock.now += timeout
        raise Empty


def test_absence_of_coordinator_is_logged_periodically(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(main, "time", clock)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(main.CannotStart, match=r"no coordinator answered at tcp://head:1 within"),
    ):
        main.wait_for_rank(SilentInbox(clock), 3.5 * main.WAITING_INTERVAL, "tcp://head:1")
    lines = [each for each in caplog.messages if "no coordinator answers at tcp://head:1" in each]
    assert len(lines) == 3
    inbox: SimpleQueue[InboxItem] = SimpleQueue()
    inbox.put(Welcomed(3, 0))
    assert main.wait_for_rank(inbox, 0.1, "tcp://head:1").rank == 3
