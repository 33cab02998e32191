"""The whole product: real processes, real sockets, the real bundled model."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from server.bench.client import stream_completion, stream_many
from tests.support.commands import SWELL, run_swell
from tests.support.http import Answer, call, completion, fetch
from tests.support.metrics import metric, num_running, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

CPU_SECONDS_IDLE = 5


def test_every_process_names_itself(stack: RunningStack) -> None:
    assert set(stack.processes()) == {
        "supervisor", "coordinator", "engine 0", "engine 1", "api 0", "api 1"
    }  # fmt: skip


def test_200_streams_complete_with_exact_counts_and_even_load(stack: RunningStack) -> None:
    before = metric(stack.url, "routing_decisions_total")
    wave_before = metric(stack.url, "wave")[""]
    bodies = [completion(f"Line {i}: the king", 20 + i % 30, temperature=0.9) for i in range(200)]
    seen_running: list[float] = []

    async def load() -> None:
        streams = asyncio.create_task(
            stream_many(f"{stack.url}/v1/completions", bodies, concurrency=200)
        )
        while not streams.done():
            running = await asyncio.to_thread(metric, stack.url, "engines_running")
            requests = await asyncio.to_thread(metric, stack.url, "num_requests_running")
            if running[""] == 1:
                seen_running.append(sum(requests.values()))
            await asyncio.wait([streams], timeout=0.05)
        for body, result in zip(bodies, await streams, strict=True):
            assert result.status == 200
            assert result.tokens == body["max_tokens"]
            assert result.finish_reason == "length"

    asyncio.run(load())
    after = metric(stack.url, "routing_decisions_total")
    routed = {engine: after[engine] - before.get(engine, 0) for engine in after}
    assert sum(routed.values()) == 200
    assert all(90 <= count <= 110 for count in routed.values()), routed
    assert max(seen_running) > 10
    until(lambda: metric(stack.url, "engines_running")[""] == 0, "the engines pause")
    until(lambda: num_running(stack.url) == 0, "none runs")
    assert total(stack.url, "num_requests_waiting") == 0
    assert metric(stack.url, "wave")[""] > wave_before


def test_a_client_that_disconnects_frees_its_engine_slot(stack: RunningStack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    body = json.dumps(completion("Endless", 900, stream=True)).encode()
    before = total(stack.url, "generation_tokens_total")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        received = b""
        while b"data: " not in received:
            received += client.recv(4096)
        until(
            lambda: num_running(stack.url) == 1,
            "the request runs",
        )
    until(lambda: num_running(stack.url) == 0, "it is gone")
    assert total(stack.url, "generation_tokens_total") - before < 900


def test_requests_that_wait_for_a_slot_show_as_queue_time() -> None:
    bodies = [completion(f"Line {i}:", 64) for i in range(6)]
    with RunningStack("--data-parallel-size", "1", "--max-num-seqs", "1") as alone:
        asyncio.run(stream_many(f"{alone.url}/v1/completions", bodies, concurrency=6))
        phases = {
            name: metric(alone.url, f"request_{name}_time_seconds_sum")["0"]
            for name in ("queue", "prefill", "decode", "inference")
        }
        whole = metric(alone.url, "e2e_request_latency_seconds_sum")["0"]
        alone.stop()
    # One after the other: on average each waits for two and a half others.
    assert phases["queue"] > 1.5 * phases["inference"], phases
    assert phases["inference"] == pytest.approx(phases["prefill"] + phases["decode"])
    assert 0.9 * whole < phases["queue"] + phases["inference"] <= whole


def test_a_seed_gives_the_same_text_on_any_engine_and_front_end(stack: RunningStack) -> None:
    url = f"{stack.url}/v1/completions"
    texts = {
        str(call(url, completion("KING:", 24, seed=7, temperature=1.0))["choices"][0]["text"])
        for _ in range(8)
    }
    assert len(texts) == 1


def test_one_scrape_covers_all_processes(stack: RunningStack) -> None:
    url = f"{stack.url}/v1/completions"

    before = total(stack.url, "generation_tokens_total")

    async def spread() -> None:
        # New connections, so that both front ends get some.
        await asyncio.gather(
            *(stream_completion(url, completion(f"Part {i}", 5)) for i in range(20))
        )

    asyncio.run(spread())
    until(
        lambda: total(stack.url, "generation_tokens_total") - before == 100,
        "every token is counted once",
    )
    assert set(metric(stack.url, "engine_up")) == {"0", "1"}
    assert metric(stack.url, "front_ends")[""] == 2


def test_idle_processes_together_use_under_2_percent_of_a_core(stack: RunningStack) -> None:
    until(lambda: metric(stack.url, "engines_running")[""] == 0, "the engines pause")
    before = stack.cpu_seconds()
    began = time.monotonic()
    time.sleep(CPU_SECONDS_IDLE)
    share = (stack.cpu_seconds() - before) / (time.monotonic() - began)
    assert share < 0.02, f"{100 * share:.1f} % of a core"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder whose path is short enough for sockets in it, which `tmp_path` need not be."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made) / "sockets"


def test_stopping_leaves_no_process_no_socket_and_no_file(directory: Path) -> None:
    with RunningStack("--socket-dir", str(directory), "--executor", "simulated") as running:
        processes = list(running.processes().values())
        assert len(processes) == 6
        took = running.stop()
    assert took < 5
    assert not any(each.is_running() for each in processes)
    assert list(directory.iterdir()) == []


def test_children_of_a_killed_supervisor_end_and_the_directory_is_usable_again(
    directory: Path,
) -> None:
    flags = ("--socket-dir", str(directory), "--executor", "simulated")
    with RunningStack(*flags) as running:
        processes = list(running.processes().values())
        running.kill()
        _, alive = psutil.wait_procs(processes, timeout=5)
        assert not alive, alive
    with RunningStack(*flags) as again:
        assert call(f"{again.url}/v1/completions", completion("Hi", 2))["choices"]


def test_an_engine_that_dies_is_replaced_and_its_requests_go_on(tmp_path: Path) -> None:
    with RunningStack("--executor", "simulated", "--simulated-step-us", "5000") as running:
        url = f"{running.url}/v1/completions"
        bodies = [completion(f"Story {i}", 200, seed=i, return_token_ids=True) for i in range(8)]
        for body in bodies[1::2]:
            body["structured_outputs"] = {"regex": "([a-z]{2,9}[ ,]){400}"}
        undisturbed = [call(url, body)["choices"][0]["text"] for body in bodies[:4]]

        with ThreadPoolExecutor(len(bodies)) as clients:
            posts = [clients.submit(call, url, body) for body in bodies]
            until(
                lambda: num_running(running.url) == len(bodies),
                "all requests run",
            )
            running.processes()["engine 1"].kill()
            answers = [each.result(timeout=30) for each in posts]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[:4] == undisturbed
        assert all(re.fullmatch("[a-z ,]+", text) for text in texts[1::2])
        assert all(answer["usage"]["completion_tokens"] == 200 for answer in answers)
        assert metric(running.url, "requests_resumed_total")[""] >= 1
        until(lambda: metric(running.url, "engine_up").get("1") == 1, "engine 1 is back")
        until(lambda: metric(running.url, "engine_restarts_total")["1"] == 1, "it is counted")


def test_a_dead_coordinator_is_replaced_while_serving_goes_on() -> None:
    with RunningStack("--executor", "simulated") as running:
        url = f"{running.url}/v1/completions"
        running.processes()["coordinator"].kill()
        for i in range(20):
            assert call(url, completion(f"During {i}", 3))["usage"]
        until(lambda: "coordinator" in running.processes(), "it is replaced")
        until(lambda: set(metric(running.url, "engine_up")) == {"0", "1"}, "all registered again")
        assert call(url, completion("After", 3))["usage"]


def test_a_dead_front_end_is_replaced_without_a_refused_connection() -> None:
    with RunningStack("--executor", "simulated") as running:
        url = f"{running.url}/v1/completions"
        victim = running.processes()["api 0"]
        victim.send_signal(signal.SIGKILL)
        for i in range(20):
            assert call(url, completion(f"Meanwhile {i}", 2))["usage"]
        until(lambda: metric(running.url, "front_ends")[""] == 2, "two front ends again")


def test_requests_in_flight_end_after_sigterm_and_new_ones_are_refused() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "10000", "--shutdown-timeout", "20")
    with RunningStack(*flags) as running, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(call, f"{running.url}/v1/completions", completion("Farewell", 200))
        until(
            lambda: num_running(running.url) == 1,
            "the request runs",
        )
        running.process.terminate()
        answers: list[Answer] = []

        def refused() -> bool:
            answers.append(fetch(f"{running.url}/v1/completions", completion("Too late", 1)))
            return answers[-1].status != 200

        until(refused, "new requests are refused")
        assert answers[-1].status == 503
        assert answers[-1].headers["Retry-After"]
        until(lambda: fetch(f"{running.url}/ready").status == 503, "no front end takes traffic")
        assert fetch(f"{running.url}/health").status == 200
        assert answer.result(timeout=20)["usage"]["completion_tokens"] == 200
        running.process.wait(10)


def test_an_engine_whose_step_hangs_ends_and_its_requests_are_moved() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "60000000", "--step-timeout", "0.1")
    with RunningStack(*flags, "--max-resumes", "1") as running:
        error = fetch(f"{running.url}/v1/completions", completion("Hang", 5)).error
        assert error["code"] == "request_kills_engines"
        # It hung on as many as may be chance, and twice more alone.
        assert "ended 4 engines, 2 of them while it ran there alone" in error["message"]
        assert "--step-timeout" in running.output
        assert "Thread 0x" in "\n".join(running.lines), "the stacks are in the log"
        until(lambda: fetch(f"{running.url}/ready").status == 200, "engines are started again")


def test_a_second_signal_ends_at_once() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "50000", "--shutdown-timeout", "60")
    with RunningStack(*flags) as running, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(call, f"{running.url}/v1/completions", completion("Long", 2000))
        until(
            lambda: num_running(running.url) == 1,
            "the request runs",
        )
        processes = list(running.processes().values())
        running.process.terminate()
        until(lambda: "stopping" in running.output, "it drains")
        running.process.terminate()
        running.process.wait(5)
        assert not any(each.is_running() for each in processes)
        assert answer.exception(timeout=5) is not None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["/nonexistent/model"], "neither a directory nor a hub id"),
        (["--max-model-len", "999999"], "max_model_len|max-model-len"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing(flags: list[str], expected: str) -> None:
    process = subprocess.Popen(
        [SWELL, "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    children: set[psutil.Process] = set()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children.update(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.01)
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    assert process.returncode != 0
    assert re.search(expected, output), output
    assert not [child for child in children if child.is_running()]


def test_a_taken_port_is_named(stack: RunningStack) -> None:
    port = stack.url.rsplit(":", 1)[1]
    ended = run_swell("serve", "--port", port)
    assert ended.returncode == 1
    assert port in ended.stderr
    assert "--port" in ended.stderr


def test_unreachable_paths_answer_like_openai(stack: RunningStack) -> None:
    answer = fetch(f"{stack.url}/v1/nothing")
    assert answer.status == 404
    assert answer.error["message"]
