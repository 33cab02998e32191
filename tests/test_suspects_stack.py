"""Requests that kill engines, on a whole stack: only they are answered with an error."""

import asyncio
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from server.bench.client import stream_many
from tests.together import metric, until

pytestmark = pytest.mark.stack

MODEL = "swell-shakespeare"
KILLER = [7, 11, 7, 11]
"""As in `tests/killer/sitecustomize.py`."""
INNOCENT = 40


def num_running(stack: RunningStack) -> float:
    return sum(metric(stack, "num_requests_running").values())


def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a completion; return the status and the body of the answer."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=80) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.timeout(150)
@pytest.mark.parametrize("sequences", [1, 8])
def test_what_kills_engines_takes_no_innocent_request_with_it(
    monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    folder, known = Path(__file__).parent / "killer", os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), known]))
    bodies: list[dict[str, Any]] = [
        {
            "model": MODEL,
            "prompt": [20 + number, 30, 40],
            "max_tokens": 400,
            "ignore_eos": True,
            "seed": number,
        }
        for number in range(INNOCENT)
    ]
    flags = (
        "--executor", "simulated", "--simulated-step-us", "10000", "--data-parallel-size", "3",
        "--api-server-count", "2",
    )  # fmt: skip
    with RunningStack(*flags) as running:
        url = running.url

        async def load() -> tuple[int, dict[str, Any]]:
            streams = asyncio.create_task(
                stream_many(f"{url}/v1/completions", bodies, concurrency=INNOCENT)
            )
            await asyncio.to_thread(until, lambda: num_running(running) == INNOCENT, "they run")
            killer = {
                "model": MODEL, "prompt": KILLER, "max_tokens": 50, "n": sequences,
                "temperature": 1.0,
            }  # fmt: skip
            answer = await asyncio.to_thread(ask, url, killer)
            for result in await streams:
                assert (result.status, result.finish_reason) == (200, "length")
                assert result.tokens == 400
            return answer

        status, body = asyncio.run(load())
        deaths = sum("SIGSEGV" in line for line in running.lines)
    assert (status, body["error"]["code"]) == (500, "request_kills_engines")
    assert "alone" in body["error"]["message"]
    assert 4 <= deaths <= 3 * sequences + 1, "\n".join(running.lines[-100:])
