"""No client brings a server down, or takes much of it from others."""

from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from benchmarks.hostile.trial import Row, Trial

pytestmark = pytest.mark.stack

KEY = "hostile-but-known"
SIMULATED = (
    "--executor", "simulated", "--simulated-step-us", "300", "--simulated-token-us", "0",
)  # fmt: skip


def rows(trial: Trial, attacks: Callable[[], Iterator[str]]) -> list[Row]:
    """Make attacks; return what they came to, each of them within its bounds."""
    with trial:
        for _ in attacks():
            pass
    assert [(row.name, row.wrong) for row in trial.rows if row.wrong] == []
    assert trial.left == []
    assert trial.rows
    return trial.rows


def test_requests_of_anybody_cost_no_more_than_their_share() -> None:
    trial = Trial(bystanders=0)
    rows(trial, lambda: chain(trial.costly(), trial.fields(0.01)))


def test_connections_of_anybody_cost_no_more_than_their_share() -> None:
    trial = Trial(*SIMULATED, bystanders=0)
    rows(trial, trial.connections)


def test_requests_with_a_key_cost_no_more_than_their_share() -> None:
    trial = Trial(*SIMULATED, key=KEY, bystanders=0)
    rows(trial, lambda: chain(trial.large(), trial.shown()))


def test_of_a_stranger_nothing_is_read() -> None:
    trial = Trial(*SIMULATED, key=KEY, with_key=False, bystanders=0)
    for row in rows(trial, lambda: chain(trial.large(), trial.shown())):
        if not row.name.startswith("GET "):
            assert row.outcome.startswith("401, "), row.name
            assert row.cost.memory <= 2**22, row.name
