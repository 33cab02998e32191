"""An engine that waits for a coordinator says so, and for how long it has."""

import logging
from queue import SimpleQueue

import pytest

from engine.core.inbox import InboxItem, Welcomed
from engine.process import main


def test_an_engine_says_now_and_then_that_no_coordinator_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(main, "WAITING_INTERVAL", 0.02)
    inbox: SimpleQueue[InboxItem] = SimpleQueue()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(main.CannotStart, match=r"no coordinator answered at tcp://head:1 within"),
    ):
        main.wait_for_rank(inbox, 0.1, "tcp://head:1")
    lines = [each for each in caplog.messages if "no coordinator answers at tcp://head:1" in each]
    assert 1 < len(lines) < 6
    inbox.put(Welcomed(3, 0))
    assert main.wait_for_rank(inbox, 0.1, "tcp://head:1").rank == 3
