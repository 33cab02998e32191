"""Engines that an operator halts, on a whole stack."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import ADMIN_KEY, call, complete, completion, everywhere, fetch
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


def paused(url: str) -> set[int]:
    """Return which engines say that they are paused; one that dies meanwhile does not."""
    answers = call(f"{url}/admin/utilities", {"name": "info", "rank": None})["answers"]
    return {each["rank"] for each in answers if each["result"] and each["result"]["is_paused"]}


def ask(url: str, pool: ThreadPoolExecutor, count: int) -> "list[Future[str]]":
    return [pool.submit(complete, url, f"To be {number}", 20) for number in range(count)]


def test_requests_are_not_routed_to_a_halted_engine_and_wait_while_all_are() -> None:
    with RunningStack(*FLAGS) as stack, ThreadPoolExecutor(16) as pool:
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


def ordered(url: str, path: str) -> dict[str, object]:
    """POST to a path for operators."""
    answer: dict[str, object] = call(f"{url}{path}", {})
    return answer


def test_a_pause_for_all_outlives_engines_and_the_coordinator() -> None:
    with RunningStack(*FLAGS, "--halted-timeout", "2") as stack, ThreadPoolExecutor(16) as pool:
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


def test_what_clients_see_of_pauses_and_sleeps() -> None:
    # Requests of 400 steps take 8 s: they still run when a busy machine has got round to looking.
    slow = ("--simulated-step-us", "20000")
    with RunningStack(*FLAGS, *slow) as stack, ThreadPoolExecutor(16) as pool:

        def begun() -> "list[Future[dict[str, Any]]]":
            path = f"{stack.url}/v1/completions"
            answers = [pool.submit(call, path, completion("Long", 400)) for _ in range(6)]
            until(
                lambda: sum(i["running"] for i in utility(stack.url, "info").values()) == 6,
                "they run",
            )
            return answers

        answers = begun()
        ordered(stack.url, "/pause?mode=abort")
        reasons = [each.result(timeout=PATIENCE)["choices"][0]["finish_reason"] for each in answers]
        assert reasons == ["abort"] * 6
        ordered(stack.url, "/resume")

        answers = begun()
        ordered(stack.url, "/pause?mode=wait")
        assert all(each.done() or each.result(timeout=PATIENCE) for each in answers)
        ordered(stack.url, "/resume")

        answers = begun()
        ordered(stack.url, "/sleep?level=2&mode=keep")
        assert call(f"{stack.url}/is_sleeping") == {"is_sleeping": True}
        assert not any(each.done() for each in answers)
        ordered(stack.url, "/wake_up?tags=weights")
        assert call(f"{stack.url}/is_sleeping") == {"is_sleeping": True}
        ordered(stack.url, "/wake_up?tags=kv_cache")
        reasons = [each.result(timeout=PATIENCE)["choices"][0]["finish_reason"] for each in answers]
        assert reasons == ["length"] * 6


def test_the_other_paths_of_operators() -> None:
    with RunningStack(*FLAGS) as stack:
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            assert ordered(stack.url, path)["message"] == "0 images were forgotten."
        assert "blocks were forgotten" in str(ordered(stack.url, "/reset_prefix_cache")["message"])
        status = call(f"{stack.url}/v1/fault_tolerance/status")
        assert status["schema_version"] == 1
        assert [(e["id"], e["status"]) for e in status["engines"]] == [
            (0, "healthy"),
            (1, "healthy"),
        ]
        assert ordered(stack.url, "/is_scaling_elastic_ep") == {"is_scaling_elastic_ep": False}
        scaled = call(f"{stack.url}/scale_elastic_ep", {"new_data_parallel_size": 1})
        assert scaled == {"message": "Scaled to 1 data parallel engines"}
        until(
            lambda: call(f"{stack.url}/v1/fault_tolerance/status")["total_engines"] == 1,
            "one is left",
        )
        refused = fetch(f"{stack.url}/collective_rpc", {"method": "f"})
        assert "no method 'f'" in refused.error["message"]
        refused = fetch(f"{stack.url}/start_profile", {})
        assert "--torch-profiler-dir" in refused.error["message"]
        assert fetch(f"{stack.url}/pause", {}, key=None).status == 403
        assert fetch(f"{stack.url}/sleep?level=3", {}).status == 400
