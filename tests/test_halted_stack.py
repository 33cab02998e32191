"""Engines that an operator halts, on a whole stack."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import ADMIN_KEY, call, complete
from tests.support.lockstep import utility
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

FLAGS = (
    "--executor", "simulated", "--simulated-step-us", "5000", "--admin-key", ADMIN_KEY,
    "--data-parallel-size", "2", "--api-server-count", "2", "--min-ready-engines", "2",
)  # fmt: skip


def halted(url: str) -> set[int]:
    """Return which engines are halted, as the front end that answers sees it."""
    engines = call(f"{url}/admin/engines")["engines"]
    return {engine["rank"] for engine in engines if engine["halted"]}


def ask(url: str, pool: ThreadPoolExecutor, count: int) -> "list[Future[str]]":
    return [pool.submit(complete, url, f"To be {number}", 20) for number in range(count)]


def test_requests_are_not_routed_to_a_halted_engine_and_wait_while_all_are() -> None:
    with RunningStack(*FLAGS) as stack, ThreadPoolExecutor(16) as pool:
        utility(stack.url, "pause", rank=0)
        until(lambda: all(halted(stack.url) == {0} for _ in range(8)), "every front end knows")
        for answer in ask(stack.url, pool, 6):
            assert answer.result(timeout=PATIENCE)
        utility(stack.url, "sleep", rank=1)
        until(lambda: all(halted(stack.url) == {0, 1} for _ in range(8)), "every front end knows")
        waiting = ask(stack.url, pool, 4)
        until(lambda: call(f"{stack.url}/load")["server_load"] == 4, "they have come")
        assert not any(answer.done() for answer in waiting)
        utility(stack.url, "resume", rank=0)
        for answer in waiting:
            assert answer.result(timeout=PATIENCE)
        utility(stack.url, "wake_up", rank=1)


def test_what_an_engine_holds_moves_when_its_operator_says_so() -> None:
    with RunningStack(*FLAGS) as stack, ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(complete, stack.url, f"Long {n}", 500) for n in range(6)]
        until(
            lambda: (
                sum(i["running"] for i in utility(stack.url, "info").values()) == 6
                or any(answer.done() for answer in answers)
            ),
            "they run",
        )
        results = call(
            f"{stack.url}/admin/utilities",
            {"name": "pause", "rank": 0, "arguments": {"mode": "move"}},
        )
        assert results["answers"][0]["error"] is None
        for answer in answers:
            assert answer.result(timeout=PATIENCE)
