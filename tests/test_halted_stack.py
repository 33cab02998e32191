"""Engines that an operator halts, on a whole stack."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import ADMIN_KEY, call, complete, completion, everywhere, fetch
from tests.support.load import settle
from tests.support.lockstep import utility
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

FLAGS = (
    "--executor", "simulated", "--simulated-step-us", "20000", "--admin-key", ADMIN_KEY,
    "--data-parallel-size", "2", "--api-server-count", "2", "--min-ready-engines", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """A stack whose engines go on when a test is over."""
    with RunningStack(*FLAGS) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as clients:
        yield clients


def halted(url: str) -> set[int]:
    """Return which engines are halted, as the front end that answers sees it."""
    engines = call(f"{url}/admin/engines")["engines"]
    return {engine["rank"] for engine in engines if engine["halted"]}


def paused(url: str) -> set[int]:
    """Return which engines say that they are paused; one that dies meanwhile does not."""
    answers = call(f"{url}/admin/utilities", {"name": "info", "rank": None})["answers"]
    return {each["rank"] for each in answers if each["result"] and each["result"]["is_paused"]}


def ask(url: str, pool: ThreadPoolExecutor, count: int) -> "list[Future[str]]":
    return [pool.submit(complete, url, f"To be {number}", 20) for number in range(count)]


def test_requests_are_not_routed_to_a_halted_engine_and_wait_while_all_are(
    stack: RunningStack, pool: ThreadPoolExecutor
) -> None:
    utility(stack.url, "pause", rank=0)
    until(lambda: everywhere(lambda: halted(stack.url) == {0}), "every front end knows")
    for answer in ask(stack.url, pool, 6):
        assert answer.result(timeout=PATIENCE)
    utility(stack.url, "sleep", rank=1)
    until(lambda: everywhere(lambda: halted(stack.url) == {0, 1}), "every front end knows")
    waiting = ask(stack.url, pool, 4)
    until(lambda: call(f"{stack.url}/load")["server_load"] == 4, "they have come")
    assert not any(answer.done() for answer in waiting)
    utility(stack.url, "resume", rank=0)
    for answer in waiting:
        assert answer.result(timeout=PATIENCE)
    utility(stack.url, "wake_up", rank=1)


def num_running(url: str) -> int:
    """Return how many requests the engines run, as they say themselves."""
    return sum(info["running"] for info in utility(url, "info").values())


def test_requests_move_when_operator_requests_it(
    stack: RunningStack, pool: ThreadPoolExecutor
) -> None:
    answers = [pool.submit(complete, stack.url, f"Long {n}", 150) for n in range(6)]
    until(
        lambda: num_running(stack.url) == 6 or any(answer.done() for answer in answers),
        "they run",
    )
    results = call(
        f"{stack.url}/admin/utilities",
        {"name": "pause", "rank": 0, "arguments": {"mode": "move"}},
    )
    assert results["answers"][0]["error"] is None
    for answer in answers:
        assert answer.result(timeout=PATIENCE)
    utility(stack.url, "resume", rank=0)


def ordered(url: str, path: str) -> dict[str, object]:
    """POST to a path for operators."""
    answer: dict[str, object] = call(f"{url}{path}", {})
    return answer


def test_fleet_pause_survives_engines_and_coordinator(pool: ThreadPoolExecutor) -> None:
    with RunningStack(*FLAGS, "--halted-timeout", "2") as stack:
        assert ordered(stack.url, "/pause?mode=wait") == {"status": "paused"}
        assert call(f"{stack.url}/is_paused") == {"is_paused": True}
        stack.processes()["coordinator"].kill()
        restarted = stack.processes()["engine 0"]
        restarted.kill()
        until(
            lambda: (
                stack.processes().get("engine 0") not in (None, restarted)
                and paused(stack.url) == {0, 1}
            ),
            "it is replaced, and hears of the order",
        )
        until(lambda: everywhere(lambda: halted(stack.url) == {0, 1}), "every front end knows")
        refused = fetch(f"{stack.url}/v1/completions", completion("To be", 5))
        assert refused.status == 503
        assert "paused or asleep" in refused.error["message"]
        assert ordered(stack.url, "/resume") == {"status": "resumed"}
        assert call(f"{stack.url}/is_paused") == {"is_paused": False}
        until(lambda: everywhere(lambda: halted(stack.url) == set()), "every front end knows")
        for answer in ask(stack.url, pool, 4):
            assert answer.result(timeout=PATIENCE)


def test_other_operator_paths_work(stack: RunningStack) -> None:
    status = call(f"{stack.url}/v1/fault_tolerance/status")
    assert status["schema_version"] == 1
    assert [(e["id"], e["status"]) for e in status["engines"]] == [(0, "healthy"), (1, "healthy")]
    assert ordered(stack.url, "/is_scaling_elastic_ep") == {"is_scaling_elastic_ep": False}
    for size in (1, 2):
        scaled = call(f"{stack.url}/scale_elastic_ep", {"new_data_parallel_size": size})
        assert scaled == {"message": f"Scaled to {size} data parallel engines"}
        until(partial(counts, stack.url, size), "as many are left")
    settle(stack.url, 2)
    refused = fetch(f"{stack.url}/collective_rpc", {"method": "f"})
    assert "no callable method 'f'" in refused.error["message"]
    refused = fetch(f"{stack.url}/start_profile", {})
    assert "--torch-profiler-dir" in refused.error["message"]
    assert fetch(f"{stack.url}/pause", {}, key=None).status == 403
    assert fetch(f"{stack.url}/sleep?level=3", {}).status == 400


def counts(url: str, size: int) -> bool:
    """Whether so many engines are said to be there."""
    found: int = call(f"{url}/v1/fault_tolerance/status")["total_engines"]
    return found == size
