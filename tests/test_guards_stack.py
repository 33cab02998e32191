"""Overload, access and logs with real processes and a simulated model."""

import asyncio
import json
import signal
import ssl
import subprocess
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.running_stack import RunningStack, StackFailed
from tests.support.metrics import num_running, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

SLOTS, QUEUE = 2 * 4, 10
FLAGS = (
    "--executor", "simulated", "--simulated-step-us", "20000", "--max-num-seqs", "4",
    "--max-queue", str(QUEUE),
)  # fmt: skip


async def burst(url: str, count: int, tokens: int) -> list[httpx.Response | Exception]:
    """Send requests at once, each through its own connection, and return what became of them."""
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def one(index: int) -> httpx.Response | Exception:
            body = {"prompt": f"number {index}", "max_tokens": tokens, "ignore_eos": True}
            try:
                return await client.post(f"{url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                return error

        return await asyncio.gather(*(one(index) for index in range(count)))


def in_engines(url: str) -> float:
    """Return how many sequences run or wait in all engines."""
    return num_running(url) + total(url, "num_requests_waiting")


def statuses(answers: list[httpx.Response | Exception]) -> Counter[int]:
    return Counter(
        answer.status_code if isinstance(answer, httpx.Response) else 0 for answer in answers
    )


def test_bursts_through_two_front_ends_fill_the_queue_exactly() -> None:
    with RunningStack(*FLAGS) as stack:
        for _ in range(2):
            answers = asyncio.run(burst(stack.url, 60, 40))
            assert statuses(answers) == {200: SLOTS + QUEUE, 429: 60 - SLOTS - QUEUE}
        for answer in answers:
            assert isinstance(answer, httpx.Response)
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_front_end_that_is_killed_gives_its_places_back() -> None:
    with RunningStack(*FLAGS) as stack:

        async def kill_one() -> tuple[int, int, Counter[int]]:
            count = SLOTS + QUEUE
            long = [asyncio.create_task(burst(stack.url, 1, 900)) for _ in range(count)]
            await asyncio.to_thread(until, lambda: in_engines(stack.url) == count, "all are there")
            front_ends = [stack.processes()[name] for name in ("api 0", "api 1")]
            victim = max(front_ends, key=lambda each: len(each.net_connections("tcp")))
            victim.send_signal(signal.SIGKILL)
            await asyncio.to_thread(psutil.wait_procs, [victim], 10)
            done, rest = await asyncio.wait(long, timeout=1.0)
            assert all(statuses(each.result()) == {0: 1} for each in done)
            # What the other front end holds stays; the victim's places are free at once. What
            # takes them is long: a request that ended would make room for one more.
            more = [asyncio.create_task(burst(stack.url, 1, 900)) for _ in range(len(done) + 5)]
            await asyncio.to_thread(until, lambda: in_engines(stack.url) == count, "places filled")
            refused, taken = await asyncio.wait(more, timeout=1.0)
            for each in (*rest, *taken):
                each.cancel()
            await asyncio.gather(*rest, *taken, return_exceptions=True)
            found = sum((statuses(each.result()) for each in refused), Counter[int]())
            return len(done), len(taken), found

        lost, taken, found = asyncio.run(kill_one())
        assert lost > 0
        assert (taken, found) == (lost, {429: 5})


def test_json_logs_follow_a_request_through_all_processes() -> None:
    flags = ("--log-format", "json", "--log-level", "debug", "--access-log")
    with RunningStack(*FLAGS, *flags, "--log-stats-interval", "0.2") as stack:
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
        httpx.post(f"{stack.url}/v1/completions", json=body, headers={"X-Request-Id": "follow-me"})

        def records() -> list[dict[str, object]]:
            return [json.loads(line) for line in stack.lines]

        until(lambda: any("status" in record for record in records()), "the access log")
        until(
            lambda: any(record["logger"] == "server.observe.stats_log" for record in records()),
            "a line of engine stats",
        )
        mine = [record for record in records() if record.get("request_id") == "follow-me"]
        assert {str(record["process"]).split()[0] for record in mine} == {"api", "engine"}
        (access,) = [record for record in mine if record["logger"] == "server.observe.access_log"]
        assert access["status"] == 200
        supervisor = [record for record in records() if record["process"] == "supervisor"]
        assert any("swell is ready" in str(record["message"]) for record in supervisor)


def test_https_and_keys(tmp_path: Path) -> None:
    key, certificate, keys = (tmp_path / name for name in ("key.pem", "cert.pem", "keys"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    keys.write_text("from-the-file\n")
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    access = ("--api-key-file", str(keys), "--admin-key", "root-key")
    trusting = ssl.create_default_context(cafile=str(certificate))
    with RunningStack(*FLAGS, *tls, *access) as stack:
        assert stack.url.startswith("https://")
        with httpx.Client(base_url=stack.url, verify=trusting) as client:
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer from-the-file"}
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.get("/admin/engines", headers=headers).status_code == 403
            headers = {"Authorization": "Bearer root-key"}
            assert len(client.get("/admin/engines", headers=headers).json()["engines"]) == 2
            reset = client.post("/admin/reset-prefix-cache", headers=headers).json()
            assert [answer["rank"] for answer in reset["answers"]] == [0, 1]
            assert all(answer["error"] is None for answer in reset["answers"])
        for process in stack.processes().values():
            assert not {"root-key", "from-the-file"} & set(process.cmdline())
        assert "root-key" not in stack.output


def test_a_missing_file_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(StackFailed, match=r"--api-key-file .* cannot be read"),
        RunningStack(*FLAGS, "--api-key-file", str(tmp_path / "nowhere")),
    ):
        pass
