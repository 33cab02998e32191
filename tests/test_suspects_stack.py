"""Requests that kill engines, on a whole stack: only they are answered with an error."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import MODEL, Answer, fetch
from tests.support.metrics import num_running
from tests.support.streams import stream_many
from tests.support.waiting import until

pytestmark = pytest.mark.stack

KILLER = [7, 11, 7, 11]
"""As in `tests/killer/sitecustomize.py`."""
INNOCENT, INNOCENT_TOKENS = 40, 300


def test_killer_request_ends_no_innocent_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, known = Path(__file__).parent / "killer", os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), known]))
    bodies: list[dict[str, Any]] = [
        {
            "model": MODEL,
            "prompt": [20 + number, 30, 40],
            "max_tokens": INNOCENT_TOKENS,
            "ignore_eos": True,
            "seed": number,
        }
        for number in range(INNOCENT)
    ]
    flags = (
        "--executor", "simulated", "--simulated-step-us", "30000", "--data-parallel-size", "3",
        "--api-server-count", "2",
    )  # fmt: skip
    with RunningStack(*flags) as running:
        url = running.url

        async def load() -> Answer:
            streams = asyncio.create_task(
                stream_many(f"{url}/v1/completions", bodies, concurrency=INNOCENT)
            )
            await asyncio.to_thread(until, lambda: num_running(url) == INNOCENT, "they run")
            killer = {"model": MODEL, "prompt": KILLER, "max_tokens": 50}
            answer = await asyncio.to_thread(fetch, f"{url}/v1/completions", killer, timeout=240)
            for result in await streams:
                assert (result.status, result.finish_reason) == (200, "length")
                assert result.output_tokens == INNOCENT_TOKENS
            return answer

        answer = asyncio.run(load())

        def deaths() -> int:
            return sum("SIGSEGV" in line for line in running.lines)

        # Front ends hear of a death before the supervisor has told it to the log.
        until(lambda: deaths() >= 4, "all deaths are told")
    assert (answer.status, answer.error["code"]) == (500, "request_kills_engines")
    assert "alone" in answer.error["message"]
    assert deaths() == 4, "\n".join(running.lines[-100:])
