"""No client brings a server down, or takes much of it from others."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from benchmarks.hostile.bystanders import slowdown
from benchmarks.hostile.operations import VALID_INPUTS
from benchmarks.hostile.trial import GAP_BOUND, Row, Trial
from benchmarks.running_stack import RunningStack
from tests.support.waiting import until

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
    assert trial.leftovers == []
    assert trial.rows
    return trial.rows


def test_requests_patterns_and_grammars_of_any_client_have_bounded_cost() -> None:
    trial = Trial(bystanders=0)

    def attacks() -> Iterator[str]:
        yield from chain(trial.requests("costly"), trial.fields((333, 333)))
        yield from chain(trial.requests("patterns", (4, 4)), trial.requests("grammars"))

    made = rows(trial, attacks)
    found = {row.name: row.outcome for row in made}
    assert found["json: ^(a|a)*$ of a text"].startswith("200, ")
    assert found["69 KB of optional letters"].startswith("400, ")


def test_inputs_of_any_client_have_bounded_cost() -> None:
    trial = Trial(*SIMULATED, "--runner", "pooling", bystanders=0)
    rows(
        trial, lambda: chain(trial.requests("inputs"), trial.fields((100, 100), paths=VALID_INPUTS))
    )


def test_connections_of_any_client_have_bounded_cost() -> None:
    trial = Trial(*SIMULATED, bystanders=0)
    rows(trial, lambda: chain(trial.raw("connections"), trial.raw("upgrades")))


def test_requests_with_a_key_have_bounded_cost() -> None:
    trial = Trial(*SIMULATED, key=KEY, bystanders=0)

    def attacks() -> Iterator[str]:
        yield from chain(
            trial.requests("large", (4, 4)), trial.kept(), trial.shown(), trial.admin((20, 20))
        )
        yield from trial.unread((2, 2))

    rows(trial, attacks)


def test_bodies_of_clients_without_key_are_not_read() -> None:
    trial = Trial(*SIMULATED, key=KEY, with_key=False, bystanders=0)
    for row in rows(trial, lambda: chain(trial.requests("large", (10, 10)), trial.shown())):
        if not row.name.startswith("GET "):
            assert row.outcome.startswith("401, "), row.name
            assert row.cost.memory <= 2**22, row.name


SLOW_STEPS = (
    "--executor", "simulated", "--simulated-step-us", "16000", "--simulated-token-us", "500",
    "--api-server-count", "1", "--data-parallel-size", "1",
)  # fmt: skip
"""Steps that sleep, at the proportions of a small model on a processor: what else the machine does
is little beside them."""


@pytest.fixture(scope="module")
def slow_steps() -> Iterator[RunningStack]:
    with RunningStack(*SLOW_STEPS) as stack:
        yield stack


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "ROMEO:", "n": 127, "max_tokens": 20},
        {"prompt": ["a b c d e f g h i j k l m n o p"] * 512, "max_tokens": 1},
    ],
    ids=["127 choices", "512 prompts"],
)
def test_one_request_never_slows_the_streams_of_others_by_more_than_half(
    slow_steps: RunningStack, body: dict[str, Any]
) -> None:
    ask = {**body, "ignore_eos": True}
    # What the request does to others it does each time; what else the machine does passes.
    until(
        lambda: slowdown(slow_steps.url, ask, rounds=3, seconds=0.6) <= GAP_BOUND,
        f"others' gaps are at most {GAP_BOUND} times as long",
    )
