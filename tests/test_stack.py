"""The whole product: real processes, real sockets, the real bundled model."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from server.bench.client import stream_completion, stream_many

pytestmark = pytest.mark.stack

MODEL = "swell-shakespeare"
CPU_SECONDS_IDLE = 5
SWELL = str(Path(sys.executable).with_name("swell"))


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def status(url: str) -> int:
    try:
        get(url)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def metric(url: str, name: str) -> dict[str, float]:
    """Return the samples of a metric by engine (or by "" without that label)."""
    found: dict[str, float] = {}
    for labels, value in re.findall(
        rf"^swell_{name}(\{{[^}}]*\}})? (\S+)$", get(f"{url}/metrics"), re.M
    ):
        engine = re.search(r'engine="(\d+)"', labels)
        key = engine[1] if engine else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


def until(condition: Callable[[], bool], what: str, timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def completion(prompt: str, tokens: int, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        result: dict[str, object] = json.loads(answer.read())
        return result


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
    until(lambda: sum(metric(stack.url, "num_requests_running").values()) == 0, "none runs")
    assert sum(metric(stack.url, "num_requests_waiting").values()) == 0
    assert metric(stack.url, "wave")[""] > wave_before


def test_a_client_that_disconnects_frees_its_engine_slot(stack: RunningStack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    body = json.dumps(completion("Endless", 900, stream=True)).encode()
    before = sum(metric(stack.url, "generation_tokens_total").values())
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        received = b""
        while b"data: " not in received:
            received += client.recv(4096)
        until(
            lambda: sum(metric(stack.url, "num_requests_running").values()) == 1,
            "the request runs",
        )
    until(lambda: sum(metric(stack.url, "num_requests_running").values()) == 0, "it is gone")
    assert sum(metric(stack.url, "generation_tokens_total").values()) - before < 900


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
        str(post(url, completion("KING:", 24, seed=7, temperature=1.0))["choices"][0]["text"])  # type: ignore[index]
        for _ in range(8)
    }
    assert len(texts) == 1


def test_one_scrape_covers_all_processes(stack: RunningStack) -> None:
    url = f"{stack.url}/v1/completions"

    def total() -> float:
        return sum(metric(stack.url, "generation_tokens_total").values())

    before = total()

    async def spread() -> None:
        # New connections, so that both front ends get some.
        await asyncio.gather(
            *(stream_completion(url, completion(f"Part {i}", 5)) for i in range(20))
        )

    asyncio.run(spread())
    until(lambda: total() - before == 100, "every token is counted once")
    assert set(metric(stack.url, "engine_up")) == {"0", "1"}
    assert metric(stack.url, "front_ends")[""] == 2


def test_idle_processes_together_use_under_2_percent_of_a_core(stack: RunningStack) -> None:
    until(lambda: metric(stack.url, "engines_running")[""] == 0, "the engines pause")
    before = stack.cpu_seconds()
    began = time.monotonic()
    time.sleep(CPU_SECONDS_IDLE)
    share = (stack.cpu_seconds() - before) / (time.monotonic() - began)
    assert share < 0.02, f"{100 * share:.1f} % of a core"


def test_stopping_leaves_no_process_no_socket_and_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    with RunningStack("--socket-dir", str(directory), "--executor", "simulated") as running:
        processes = list(running.processes().values())
        assert len(processes) == 6
        took = running.stop()
    assert took < 5
    assert not any(each.is_running() for each in processes)
    assert list(directory.iterdir()) == []


def test_children_of_a_killed_supervisor_end_and_the_directory_is_usable_again(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "sockets"
    flags = ("--socket-dir", str(directory), "--executor", "simulated")
    with RunningStack(*flags) as running:
        processes = list(running.processes().values())
        running.kill()
        _, alive = psutil.wait_procs(processes, timeout=5)
        assert not alive, alive
    with RunningStack(*flags) as again:
        assert post(f"{again.url}/v1/completions", completion("Hi", 2))["choices"]


def test_an_engine_that_dies_is_replaced_and_its_requests_go_on(tmp_path: Path) -> None:
    with RunningStack("--executor", "simulated", "--simulated-step-us", "5000") as running:
        url = f"{running.url}/v1/completions"
        bodies = [completion(f"Story {i}", 200, seed=i, return_token_ids=True) for i in range(8)]
        for body in bodies[1::2]:
            body["structured_outputs"] = {"regex": "([a-z]{2,9}[ ,]){400}"}
        undisturbed = [post(url, body)["choices"][0]["text"] for body in bodies[:4]]  # type: ignore[index]

        with ThreadPoolExecutor(len(bodies)) as clients:
            posts = [clients.submit(post, url, body) for body in bodies]
            until(
                lambda: sum(metric(running.url, "num_requests_running").values()) == len(bodies),
                "all requests run",
            )
            running.processes()["engine 1"].kill()
            answers = [each.result(timeout=30) for each in posts]
        texts = [answer["choices"][0]["text"] for answer in answers]  # type: ignore[index]
        assert texts[:4] == undisturbed
        assert all(re.fullmatch("[a-z ,]+", text) for text in texts[1::2])
        assert all(answer["usage"]["completion_tokens"] == 200 for answer in answers)  # type: ignore[index]
        assert metric(running.url, "requests_resumed_total")[""] >= 1
        until(lambda: metric(running.url, "engine_up").get("1") == 1, "engine 1 is back")
        until(lambda: metric(running.url, "engine_restarts_total")["1"] == 1, "it is counted")


def test_a_dead_coordinator_is_replaced_while_serving_goes_on() -> None:
    with RunningStack("--executor", "simulated") as running:
        url = f"{running.url}/v1/completions"
        running.processes()["coordinator"].kill()
        for i in range(20):
            assert post(url, completion(f"During {i}", 3))["usage"]
        until(lambda: "coordinator" in running.processes(), "it is replaced")
        until(lambda: set(metric(running.url, "engine_up")) == {"0", "1"}, "all registered again")
        assert post(url, completion("After", 3))["usage"]


def test_a_dead_front_end_is_replaced_without_a_refused_connection() -> None:
    with RunningStack("--executor", "simulated") as running:
        url = f"{running.url}/v1/completions"
        victim = running.processes()["api 0"]
        victim.send_signal(signal.SIGKILL)
        for i in range(20):
            assert post(url, completion(f"Meanwhile {i}", 2))["usage"]
        until(lambda: metric(running.url, "front_ends")[""] == 2, "two front ends again")


def test_requests_in_flight_end_after_sigterm_and_new_ones_are_refused() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "10000", "--shutdown-timeout", "20")
    with RunningStack(*flags) as running, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(post, f"{running.url}/v1/completions", completion("Farewell", 200))
        until(
            lambda: sum(metric(running.url, "num_requests_running").values()) == 1,
            "the request runs",
        )
        running.process.terminate()
        refusals: list[urllib.error.HTTPError] = []

        def refused() -> bool:
            try:
                post(f"{running.url}/v1/completions", completion("Too late", 1))
            except urllib.error.HTTPError as error:
                error.close()
                refusals.append(error)
            return bool(refusals)

        until(refused, "new requests are refused")
        assert refusals[0].code == 503
        assert refusals[0].headers["Retry-After"]
        until(lambda: status(f"{running.url}/ready") == 503, "no front end takes traffic")
        assert get(f"{running.url}/health")
        assert answer.result(timeout=20)["usage"]["completion_tokens"] == 200  # type: ignore[index]
        running.process.wait(10)


def test_an_engine_whose_step_hangs_ends_and_its_requests_are_moved() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "60000000", "--step-timeout", "0.1")
    with RunningStack(*flags, "--max-resumes", "1") as running:
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(f"{running.url}/v1/completions", completion("Hang", 5))
        error = json.loads(caught.value.read())["error"]
        caught.value.close()
        assert error["code"] == "request_kills_engines"
        # It hung on as many as may be chance, and twice more alone.
        assert "ended 4 engines, 2 of them while it ran there alone" in error["message"]
        assert "--step-timeout" in running.output
        assert "Thread 0x" in "\n".join(running.lines), "the stacks are in the log"
        until(lambda: status(f"{running.url}/ready") == 200, "engines are started again")


def test_a_second_signal_ends_at_once() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "50000", "--shutdown-timeout", "60")
    with RunningStack(*flags) as running, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(post, f"{running.url}/v1/completions", completion("Long", 2000))
        until(
            lambda: sum(metric(running.url, "num_requests_running").values()) == 1,
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
    ended = subprocess.run(
        [SWELL, "serve", "--port", port],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert port in ended.stderr
    assert "--port" in ended.stderr


def test_unreachable_paths_answer_like_openai(stack: RunningStack) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{stack.url}/v1/nothing")
    assert caught.value.code == 404
    assert json.loads(caught.value.read())["error"]["message"]
    caught.value.close()
