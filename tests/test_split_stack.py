"""A stack whose prompts and answers are computed by different engines, which are killed."""

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.failover import STRIKES, split
from benchmarks.running_stack import RunningStack
from tests.support.http import complete
from tests.support.metrics import metric, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

TEXT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar. "
PROMPTS = [f"{n} times: " + TEXT * (4 + n % 3) for n in range(8)]
TOKENS = 60
EXACT = ("--dtype", "float32", "--batch-invariant")
SPLIT = (
    *EXACT, "--data-parallel-size", "3", "--prefill-engines", "1", "--prefill-split-length", "48",
)  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return the answers of one engine that does everything."""
    with RunningStack(*EXACT, "--data-parallel-size", "1") as stack:
        return answers(stack)


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(*SPLIT) as stack:
        yield stack


def answers(stack: RunningStack) -> list[str]:
    """Ask everything at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        ask = partial(complete, stack.url, tokens=TOKENS)
        return list(threads.map(ask, PROMPTS))


def running(stack: RunningStack, rank: int) -> float:
    return metric(stack.url, "num_requests_running").get(str(rank), 0)


def all_ready(stack: RunningStack) -> None:
    until(lambda: total(stack.url, "engines_ready") == 3, "all engines are there")


def test_answers_are_the_same_and_each_engine_does_its_part(
    stack: RunningStack, expected: list[str]
) -> None:
    assert answers(stack) == expected
    generated = metric(stack.url, "engine_generation_tokens_total")
    until(
        lambda: (
            metric(stack.url, "kv_transfer_hits_total").get("0", 0) == 0
            and total(stack.url, "kv_transfer_hits_total") > 300
        ),
        "decode engines have read blocks",
    )
    assert generated["0"] <= len(PROMPTS), "the prefill engine draws a token of each prompt"
    assert total(stack.url, "kv_transfer_failures_total") == 0
    assert total(stack.url, "kv_transfer_bytes_total") > 0


@pytest.mark.parametrize("rank", [0, 2], ids=["of prompts", "of answers"])
def test_answers_are_whole_when_an_engine_is_killed(
    rank: int, stack: RunningStack, expected: list[str]
) -> None:
    all_ready(stack)
    engine = stack.processes()[f"engine {rank}"]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(answers, stack)
        until(lambda: running(stack, rank) > 0 or asked.done(), "it has work", interval=0.002)
        engine.send_signal(signal.SIGKILL)
        assert asked.result() == expected
    engine.wait(30)
    all_ready(stack)
    assert answers(stack) == expected


LINKS = ("link cut", "link silent", "blocks damaged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "over_tcp"), [(STRIKES[1:], False), (LINKS, True)], ids=["ipc", "tcp with CURVE"]
)
def test_nothing_is_lost_with_a_process_or_a_link_while_blocks_are_on_their_way(
    kinds: Sequence[str], over_tcp: bool
) -> None:
    rows, problems = split(2, 20, EXACT, kinds, stop_seconds=6, over_tcp=over_tcp)
    assert problems == []
    assert all(row.right + row.excused == row.answers > 0 for row in rows.values())
    assert all(rows[kind].broken for kind in LINKS)
