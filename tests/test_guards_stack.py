"""Overload, access and logs with real processes and a simulated model."""

import asyncio
import json
import signal
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.certificates import make_certificate
from tests.support.http import call
from tests.support.metrics import metric, num_running, total
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

SLOTS, QUEUE = 2 * 4, 10
PLACES = SLOTS + QUEUE
FLAGS = (
    "--executor", "simulated", "--max-num-seqs", "4", "--max-queue", str(QUEUE),
    "--min-ready-engines", "2",
)  # fmt: skip
SLOW = ("--simulated-step-us", "100000")
LONG = 900
"""Tokens of a request that takes 90 s with slow steps: none ends before its client goes."""


Sent = asyncio.Task[httpx.Response | None]


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[RunningStack]:
    with RunningStack(*FLAGS, *SLOW) as stack:
        yield stack


@pytest.fixture
def stack(slow_stack: RunningStack) -> RunningStack:
    """A stack that holds nothing, with both front ends."""
    until(lambda: metric(slow_stack.url, "front_ends")[""] == 2, "both front ends serve")
    until(lambda: held(slow_stack.url) == 0, "all places are free")
    return slow_stack


def burst(url: str, count: int, tokens: int = LONG) -> list[Sent]:
    """Send requests at once, each through its own connection; None is for one nobody answered."""

    async def one(index: int) -> httpx.Response | None:
        body = {"prompt": f"number {index}", "max_tokens": tokens, "ignore_eos": True}
        try:
            # To read the authorities' certificates takes each client 27 ms of a core.
            async with httpx.AsyncClient(timeout=2 * PATIENCE, verify=False) as client:
                return await client.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError:
            return None

    return [asyncio.create_task(one(index)) for index in range(count)]


def statuses(sent: list[Sent]) -> Counter[int]:
    """Count the answers that have come by their status; 0: a connection that broke."""
    answers = [each.result() for each in sent if each.done()]
    return Counter(0 if answer is None else answer.status_code for answer in answers)


async def hold(url: str, sent: list[Sent], count: int) -> None:
    """Wait until the node holds so many requests, all of them in engines, and no answer is due."""

    def is_held() -> bool:
        in_engines = num_running(url) + total(url, "num_requests_waiting")
        return in_engines == held(url) == count == sum(not each.done() for each in sent)

    await asyncio.to_thread(until, is_held, f"{count} requests are held")


def held(url: str) -> int:
    """Return how many requests the front ends of the node have taken on."""
    return int(call(f"{url}/load")["server_load"])


async def hang_up(url: str, sent: list[Sent]) -> None:
    """Close the connections on which nothing was answered; wait until their places are free."""
    for each in sent:
        each.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    await asyncio.to_thread(until, lambda: held(url) == 0, "all places are free")


def test_bursts_through_two_front_ends_fill_the_queue_exactly(stack: RunningStack) -> None:
    async def twice(url: str) -> None:
        for _ in range(2):
            sent = burst(url, 60)
            await hold(url, sent, PLACES)
            assert statuses(sent) == {429: 60 - PLACES}
            for each in sent:
                if each.done() and (answer := each.result()) is not None:
                    assert 1 <= int(answer.headers["retry-after"]) <= 60
                    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            await hang_up(url, sent)
        sent = burst(url, PLACES, tokens=5)
        await asyncio.gather(*sent)
        assert statuses(sent) == {200: PLACES}

    asyncio.run(twice(stack.url))


def test_killed_front_end_releases_its_reservations(stack: RunningStack) -> None:
    async def kill_one() -> None:
        first = burst(stack.url, PLACES)
        await hold(stack.url, first, PLACES)
        front_ends = [stack.processes()[name] for name in ("api 0", "api 1")]
        victim = max(front_ends, key=lambda each: len(each.net_connections("tcp")))
        victim.send_signal(signal.SIGKILL)
        await asyncio.to_thread(victim.wait)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(until, lambda: is_counted(first), "its clients know")
        lost = statuses(first)[0]
        assert statuses(first) == {0: lost}
        # What the other front end holds stays; the victim's places are free at once.
        more = burst(stack.url, lost + 5)
        await hold(stack.url, [*first, *more], PLACES)
        assert statuses(more) == {429: 5}
        await hang_up(stack.url, [*first, *more])

    def is_counted(sent: list[Sent]) -> bool:
        in_engines = num_running(stack.url) + total(stack.url, "num_requests_waiting")
        return in_engines == held(stack.url) == sum(not each.done() for each in sent)

    asyncio.run(kill_one())


def test_https_and_keys_work_and_logs_follow_request_through_all_processes(tmp_path: Path) -> None:
    key, certificate, keys = (tmp_path / name for name in ("key.pem", "cert.pem", "keys"))
    make_certificate(certificate, key)
    keys.write_text("from-the-file\n")
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    access = ("--api-key-file", str(keys), "--admin-key", "root-key")
    logs = ("--log-format", "json", "--log-level", "debug", "--access-log")
    trusting = ssl.create_default_context(cafile=str(certificate))
    with RunningStack(
        *FLAGS, *SLOW, *tls, *access, *logs, "--log-stats-interval", "0.2"
    ) as stack:  # fmt: skip
        assert stack.url.startswith("https://")
        with httpx.Client(base_url=stack.url, verify=trusting, timeout=PATIENCE) as client:
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer from-the-file", "X-Request-Id": "follow-me"}
            body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
            del headers["X-Request-Id"]
            assert client.get("/admin/engines", headers=headers).status_code == 403
            headers = {"Authorization": "Bearer root-key"}
            assert len(client.get("/admin/engines", headers=headers).json()["engines"]) == 2
            reset = client.post("/admin/reset-prefix-cache", headers=headers).json()
            assert [answer["rank"] for answer in reset["answers"]] == [0, 1]
            assert all(answer["error"] is None for answer in reset["answers"])
        for process in stack.processes().values():
            assert not {"root-key", "from-the-file"} & set(process.cmdline())

        def records() -> list[dict[str, object]]:
            return [json.loads(line) for line in stack.lines]

        until(
            lambda: any(record["logger"] == "server.observe.stats_log" for record in records()),
            "a line of engine stats",
        )

        def mine() -> list[dict[str, object]]:
            return [record for record in records() if record.get("request_id") == "follow-me"]

        until(
            lambda: (
                {str(record["process"]).split()[0] for record in mine()} == {"api", "engine"}
                and any("status" in record for record in mine())
            ),
            "both say what they did, and the access log",
        )
        (access_log,) = [r for r in mine() if r["logger"] == "server.observe.access_log"]
        assert access_log["status"] == 200
        supervisor = [record for record in records() if record["process"] == "supervisor"]
        assert any("swell is ready" in str(record["message"]) for record in supervisor)
        assert not [line for line in stack.lines if "root-key" in line or "from-the-file" in line]
