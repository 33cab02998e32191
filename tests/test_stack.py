"""The whole product: real processes, real sockets, the real bundled model."""

import asyncio
import contextlib
import functools
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
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.running_stack import RunningStack
from tests.support.commands import SWELL, run_swell
from tests.support.http import Answer, call, complete, completion, everywhere, fetch
from tests.support.idle import until_idle
from tests.support.metrics import metric, num_running, total
from tests.support.streams import stream_completion, stream_many
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

ENDLESS = 1000
"""Tokens of a request that takes minutes with the steps of `slow`: it ends when its client goes."""


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningStack]:
    """A stack whose requests are still there when a test looks at them; the last one ends it."""
    flags = ("--executor", "simulated", "--simulated-step-us", "200000")
    drains = ("--shutdown-timeout", "600", "--drain-timeout", "600")
    with RunningStack(*flags, *drains, "--min-ready-engines", "2") as running:
        yield running


def test_every_process_sets_its_title(stack: RunningStack) -> None:
    assert set(stack.processes()) == {
        "supervisor", "coordinator", "engine 0", "engine 1", "api 0", "api 1"
    }  # fmt: skip


def test_200_streams_complete_with_exact_counts(stack: RunningStack) -> None:
    before = total(stack.url, "routing_decisions_total")
    wave_before = metric(stack.url, "wave")[""]
    bodies = [completion(f"Line {i}: the king", 20 + i % 30, temperature=0.9) for i in range(200)]
    url = f"{stack.url}/v1/completions"
    for body, result in zip(
        bodies, asyncio.run(stream_many(url, bodies, concurrency=200)), strict=True
    ):
        assert result.status == 200
        assert result.output_tokens == body["max_tokens"]
        assert result.finish_reason == "length"
    assert total(stack.url, "routing_decisions_total") - before == 200
    until(lambda: metric(stack.url, "engines_running")[""] == 0, "the engines pause")
    until(lambda: num_running(stack.url) == 0, "none runs")
    until(lambda: total(stack.url, "num_requests_waiting") == 0, "none waits")
    until(lambda: metric(stack.url, "wave")[""] > wave_before, "the wave is counted")


def test_200_concurrent_streams_are_spread_evenly(slow: RunningStack) -> None:
    before = metric(slow.url, "routing_decisions_total")
    bodies = [completion(f"Line {i}: the king", ENDLESS) for i in range(200)]

    async def load() -> None:
        streams = asyncio.create_task(
            stream_many(f"{slow.url}/v1/completions", bodies, concurrency=200)
        )
        await asyncio.to_thread(until, lambda: num_running(slow.url) == 200, "all run")
        await asyncio.to_thread(
            until, lambda: metric(slow.url, "engines_running")[""] == 1, "the engines run"
        )
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)

    asyncio.run(load())
    after = metric(slow.url, "routing_decisions_total")
    routed = {engine: after[engine] - before.get(engine, 0) for engine in after}
    assert sum(routed.values()) == 200
    assert all(90 <= count <= 110 for count in routed.values()), routed
    until(lambda: num_running(slow.url) == 0, "those whose clients have gone are gone")


def test_a_client_that_disconnects_frees_its_engine_slot(slow: RunningStack) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    body = json.dumps(completion("Endless", ENDLESS, stream=True)).encode()
    before = total(slow.url, "generation_tokens_total")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        received = b""
        while b"data: " not in received:
            piece = client.recv(4096)
            assert piece, received
            received += piece
        until(lambda: num_running(slow.url) == 1, "the request runs")
    until(lambda: num_running(slow.url) == 0, "it is gone")
    assert total(slow.url, "generation_tokens_total") - before < ENDLESS


def test_requests_that_wait_for_a_slot_show_as_queue_time() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "20000", "--max-num-seqs", "1")
    bodies = [completion(f"Line {i}:", 100 if i == 0 else 5) for i in range(6)]
    with (
        RunningStack(*flags, "--data-parallel-size", "1") as alone,
        ThreadPoolExecutor(6) as clients,
    ):
        url = f"{alone.url}/v1/completions"
        sent_at = time.monotonic()
        answers = [clients.submit(call, url, bodies[0])]
        until(lambda: num_running(alone.url) == 1 or answers[0].done(), "the first runs")
        answers += [clients.submit(call, url, body) for body in bodies[1:]]
        until(
            lambda: total(alone.url, "num_requests_waiting") == 5 or answers[0].done(),
            "the others wait",
        )
        seen_at = time.monotonic()
        for answer in answers:
            answer.result()
        phases = {
            name: metric(alone.url, f"request_{name}_time_seconds_sum")["0"]
            for name in ("queue", "prefill", "decode", "inference")
        }
        whole = metric(alone.url, "e2e_request_latency_seconds_sum")["0"]
        alone.stop()
    # Five waited from then on at the latest until the first was done, which took all its steps.
    takes = 99 * 0.02
    assert phases["queue"] > 5 * (sent_at + takes - seen_at), phases
    assert phases["decode"] > 0.99 * takes, phases
    assert phases["inference"] == pytest.approx(phases["prefill"] + phases["decode"])
    assert phases["queue"] + phases["inference"] <= whole


def test_a_seed_gives_the_same_text_on_any_engine_and_front_end(stack: RunningStack) -> None:
    url = f"{stack.url}/v1/completions"
    texts = {
        str(call(url, completion("KING:", 24, seed=7, temperature=1.0))["choices"][0]["text"])
        for _ in range(8)
    }
    assert len(texts) == 1


def test_one_scrape_covers_all_processes(stack: RunningStack) -> None:
    url = f"{stack.url}/v1/completions"
    # What clients have left is counted when it is taken out of the engines.
    until(lambda: num_running(stack.url) == 0, "none runs")
    until(lambda: call(f"{stack.url}/load")["server_load"] == 0, "none is left")
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
    until_idle(stack, 0.02)


@pytest.fixture(scope="module")
def in_a_folder() -> Iterator[tuple[str, ...]]:
    """Flags of a stack with a folder of its own; its steps take next to no time."""
    with tempfile.TemporaryDirectory() as made:
        yield "--socket-dir", f"{made}/sockets", "--executor", "simulated"


@pytest.fixture(scope="module")
def quick(in_a_folder: tuple[str, ...]) -> Iterator[RunningStack]:
    """A stack whose processes are killed and replaced, in the last test its supervisor."""
    with RunningStack(*in_a_folder) as running:
        yield running


@pytest.fixture(scope="module")
def steady() -> Iterator[RunningStack]:
    """A stack whose requests take seconds; the last test ends it."""
    flags = ("--executor", "simulated", "--simulated-step-us", "20000", "--min-ready-engines", "2")
    with RunningStack(*flags, "--shutdown-timeout", "90") as running:
        yield running


def test_dead_engine_is_replaced_and_its_requests_continue(
    quick: RunningStack, steady: RunningStack
) -> None:
    bodies = [completion(f"Story {i}", 400, seed=i, return_token_ids=True) for i in range(8)]
    for body in bodies[1::2]:
        body["structured_outputs"] = {"regex": "([a-z]{2,9}[ ,]){800}"}
    # How long a step takes changes no token, so those of a stack that does not wait are expected.
    with ThreadPoolExecutor(4) as clients:
        url = f"{quick.url}/v1/completions"
        answers = list(clients.map(functools.partial(call, url), bodies[:4]))
        undisturbed = [answer["choices"][0]["text"] for answer in answers]

    url = f"{steady.url}/v1/completions"
    with ThreadPoolExecutor(len(bodies)) as clients:
        posts = [clients.submit(call, url, body) for body in bodies]
        until(
            lambda: (
                num_running(steady.url) == len(bodies)
                and metric(steady.url, "num_requests_running").get("1", 0) > 0
            ),
            "all requests run, some of them in engine 1",
        )
        steady.processes()["engine 1"].kill()
        answers = [each.result(timeout=PATIENCE) for each in posts]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[:4] == undisturbed
    assert all(re.fullmatch("[a-z ,]+", text) for text in texts[1::2])
    assert all(answer["usage"]["completion_tokens"] == 400 for answer in answers)
    assert metric(steady.url, "requests_resumed_total")[""] >= 1
    until(lambda: metric(steady.url, "engine_up").get("1") == 1, "engine 1 is back")
    until(lambda: metric(steady.url, "engine_restarts_total").get("1") == 1, "it is counted")


def test_dead_coordinator_is_replaced_while_requests_are_served(quick: RunningStack) -> None:
    url = f"{quick.url}/v1/completions"
    quick.processes()["coordinator"].kill()
    for i in range(20):
        assert call(url, completion(f"During {i}", 3))["usage"]
    until(lambda: "coordinator" in quick.processes(), "it is replaced")
    until(lambda: set(metric(quick.url, "engine_up")) == {"0", "1"}, "all registered again")
    until(lambda: metric(quick.url, "front_ends")[""] == 2, "front ends, too")
    assert call(url, completion("After", 3))["usage"]


def test_a_dead_front_end_is_replaced_without_a_refused_connection(quick: RunningStack) -> None:
    url = f"{quick.url}/v1/completions"
    victim = quick.processes()["api 0"]
    victim.send_signal(signal.SIGKILL)
    victim.wait()  # what it has accepted by then would be lost
    for i in range(20):
        assert call(url, completion(f"Meanwhile {i}", 2))["usage"]
    until(lambda: "api 0" in quick.processes(), "it is replaced")
    until(lambda: metric(quick.url, "front_ends")[""] == 2, "two front ends again")


def test_children_of_killed_supervisor_exit_and_stopped_one_leaves_nothing(
    quick: RunningStack, in_a_folder: tuple[str, ...]
) -> None:
    processes = list(quick.processes().values())
    quick.kill()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive, alive
    # Nobody asks for anything any more, so that there is nothing to be waited for.
    unhurried = ("--shutdown-timeout", "600", "--drain-timeout", "600", "--min-ready-engines", "2")
    with RunningStack(*in_a_folder, *unhurried) as again:
        assert call(f"{again.url}/v1/completions", completion("Hi", 2))["choices"]
        processes = list(again.processes().values())
        assert len(processes) == 6
        again.stop(PATIENCE)
    assert not any(each.is_running() for each in processes)
    assert list(Path(in_a_folder[1]).iterdir()) == []


def test_requests_in_flight_end_after_sigterm_and_new_ones_are_refused(
    steady: RunningStack,
) -> None:
    running, said = steady, len(steady.lines)
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(call, f"{running.url}/v1/completions", completion("Farewell", 200))
        until(lambda: num_running(running.url) == 1 or answer.done(), "the request runs")
        running.process.terminate()
        answers: list[Answer] = []

        def refused() -> bool:
            answers.append(fetch(f"{running.url}/v1/completions", completion("Too late", 1)))
            # One that was cut off before it had sent its body has read no answer.
            return answers[-1].status not in (0, 200) or answer.done()

        until(refused, "new requests are refused")
        until(
            lambda: answer.done() or fetch(f"{running.url}/ready").status == 503,
            "no front end takes traffic",
        )
        # A front end without requests may end meanwhile, and a connection to it with it.
        until(
            lambda: answer.done() or fetch(f"{running.url}/health").status == 200,
            "it is as well as before",
        )
        if not answer.done():  # else the stack may have ended before it was asked
            assert answers[-1].status == 503
            assert answers[-1].headers["Retry-After"]
            assert "shutting down" in answers[-1].error["message"]
        assert answer.result(timeout=PATIENCE)["usage"]["completion_tokens"] == 200
        assert running.process.wait(PATIENCE) == 0
        assert not [line for line in running.lines[said:] if "killed" in line]


def test_engine_with_hung_step_exits_and_its_requests_move() -> None:
    flags = ("--executor", "simulated", "--simulated-step-us", "60000000", "--step-timeout", "0.1")
    with RunningStack(*flags, "--max-resumes", "1") as running:
        error = fetch(f"{running.url}/v1/completions", completion("Hang", 5), timeout=240).error
        assert error["code"] == "request_kills_engines"
        # It hung on as many as may be chance, and twice more alone.
        assert "ended 4 engines, 2 of them while it ran there alone" in error["message"]
        until(lambda: "--step-timeout" in "\n".join(running.lines), "the log says so")
        until(lambda: "Thread 0x" in "\n".join(running.lines), "the stacks are in the log")
        until(lambda: fetch(f"{running.url}/ready").status == 200, "engines are started again")


def test_second_signal_exits_immediately(slow: RunningStack) -> None:
    with ThreadPoolExecutor(1) as clients:
        body = completion("Long", ENDLESS)
        answer = clients.submit(call, f"{slow.url}/v1/completions", body, timeout=600)
        until(lambda: num_running(slow.url) == 1, "the request runs")
        processes = list(slow.processes().values())
        slow.process.terminate()
        until(lambda: "stopping" in "\n".join(slow.lines), "it drains")
        slow.process.terminate()
        slow.process.wait(PATIENCE)
        assert not psutil.wait_procs(processes, timeout=PATIENCE)[1]
        assert answer.exception(timeout=PATIENCE) is not None


def test_failed_start_reports_reason_and_leaves_nothing() -> None:
    process = subprocess.Popen(
        [SWELL, "serve", "--port", "0", "/nonexistent/model"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    children: set[psutil.Process] = set()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children.update(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.05)
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    assert process.returncode != 0
    assert "neither a directory nor a hub id" in output
    # What had no time to start anything ends when it sees that its parent has.
    assert not psutil.wait_procs(children, timeout=PATIENCE)[1]


def test_port_in_use_is_named(stack: RunningStack) -> None:
    port = stack.url.rsplit(":", 1)[1]
    ended = run_swell("serve", "--port", port)
    assert ended.returncode == 1
    assert port in ended.stderr
    assert "--port" in ended.stderr


def test_every_wake_of_idle_engines_is_counted(stack: RunningStack) -> None:
    def idle() -> bool:
        return metric(stack.url, "engines_running")[""] == 0

    def counts() -> tuple[float, float]:
        return total(stack.url, "wave_wakeups_total"), metric(stack.url, "wave")[""]

    # Both front ends may answer the scrape, and each has its own view.
    until(lambda: everywhere(idle), "the engines are idle")
    wakeups, wave = counts()
    for number in range(1, 7):
        complete(stack.url, "Once", 1 + number % 3)
        until(lambda: idle() and metric(stack.url, "wave")[""] >= wave + number, "it is seen")  # noqa: B023
    until(lambda: everywhere(lambda: counts() == (wakeups + 6, wave + 6)), "all are counted once")
    assert "swell_wave{" in fetch(f"{stack.url}/metrics/engine/0").text


def test_metrics_are_open_metrics_if_accepted(stack: RunningStack) -> None:
    complete(stack.url, "Once", 2)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    for path in ("/metrics", "/metrics/engine/0"):
        answer = fetch(stack.url + path, accept=accept)
        assert answer.headers["content-type"].startswith("application/openmetrics-text;")
        families = {each.name for each in text_string_to_metric_families(answer.text)}  # type: ignore[no-untyped-call]
        plain = fetch(stack.url + path)
        assert plain.headers["content-type"].startswith("text/plain;")
        assert len(families) == plain.text.count("# TYPE ") > 10


def test_every_process_of_cluster_reports_build_and_resource_usage(stack: RunningStack) -> None:
    def shown(name: str) -> dict[str, float]:
        pattern = rf'^swell_{name}\{{.*process="([^"]+)".*\}} (\S+)$'
        text = fetch(f"{stack.url}/metrics").text
        return {each: float(value) for each, value in re.findall(pattern, text, re.MULTILINE)}

    def is_complete() -> bool:
        kinds = sorted(name.split()[0] for name in shown("process_open_fds"))
        return kinds == ["api", "api", "coordinator", "engine", "engine"]

    until(lambda: everywhere(is_complete), "all have told of themselves")
    processes = shown("process_open_fds").keys()
    assert shown("build_info") == dict.fromkeys(processes, 1.0)
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes"):
        assert shown(name).keys() == processes
        assert all(shown(name).values())
