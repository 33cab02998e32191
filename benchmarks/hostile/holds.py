"""Finds the hostile requests that block a front end's event loop the longest.

    python -m benchmarks.hostile.holds
    python -m benchmarks.hostile.holds --fields 25 --top 40

Unlike the other trials, it measures CPU time of the loop's thread between iterations, so other load
hardly matters. It runs the front end in this process and calls endpoints without HTTP or a store,
so the costs of connections and the store are excluded.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import FastAPI

from benchmarks.hostile.large import large_requests
from benchmarks.hostile.operations import OPERATIONS
from benchmarks.hostile.requests import (
    Request,
    costly_requests,
    grammar_requests,
    pattern_requests,
)
from benchmarks.hostile.trial import SHOWN, field_attacks
from engine.shared.process_state import freeze_heap
from swell import AsyncLLM

ATTEMPTS = 2
"""Attempts per request; the minimum over attempts of the longest hold counts."""
_PATIENCE = 30.0
_NOTHING_KEPT = {"response_id": "resp_none", "conversation_id": "conv_none"}


class LoopWatch:
    """Runs in each iteration of the event loop, and records the longest iteration."""

    def __init__(self) -> None:
        self.longest = 0.0
        """CPU seconds of the loop's thread."""

    async def run(self) -> None:
        """Watch until cancelled."""
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest = max(self.longest, now - before)
            before = now


async def ask(app: FastAPI, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Send a request, GET if there is no body; return the status and body of the answer."""
    path, _, query = path.partition("?")
    status, parts = 0, []
    given = iter([{"type": "http.request", "body": body or b"", "more_body": False}])
    over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        for message in given:
            return message
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    finally:
        over.set()
    return status, b"".join(parts)


async def holds_of(
    app: FastAPI, requests: Iterator[tuple[str, str, bytes | None]]
) -> list[tuple[float, int, str]]:
    """Send requests one after the other; return (longest hold, status, name) of each."""
    watch = LoopWatch()
    watching = asyncio.create_task(watch.run())
    found = []
    for name, path, body in requests:
        shortest, status = float("inf"), 0
        for _ in range(ATTEMPTS):
            await asyncio.sleep(0)
            watch.longest = 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    status, _ = await ask(app, path, body)
            await asyncio.sleep(0)
            shortest = min(shortest, watch.longest)
        found.append((shortest, status, name))
    watching.cancel()
    return found


def hostile_requests(
    document: dict[str, Any], every: int, only: str
) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield (name, path, body) of the costliest bodies, or every `every`-th value of a field."""
    if every:
        served = [each for each in OPERATIONS.values() if each.path in document["paths"]]
        for number, (path, of_field) in enumerate(field_attacks(served, document, _NOTHING_KEPT)):
            name = f"{path} {of_field.name}"
            if number % every == every // 2 and only in name:
                yield name, path, of_field.text.encode()
        return
    kinds: list[Iterator[Request] | list[Request]] = [
        large_requests(), costly_requests(), pattern_requests(), grammar_requests(),
    ]  # fmt: skip
    for requests in kinds:
        for each in requests:
            if only in each.name:
                yield each.name, each.path, each.body
    for path in SHOWN:
        if only in path:
            yield path, path, None


async def measure(every: int, only: str) -> list[tuple[float, int, str]]:
    """Serve the bundled model in this process, send everything, and return the costs."""
    async with await AsyncLLM.start() as llm:
        _, document = await ask(llm._app, "/openapi.json", None)
        freeze_heap()  # like a front end
        requests = hostile_requests(msgspec.json.decode(document), every, only)
        return sorted(await holds_of(llm._app, requests), reverse=True)


def main() -> None:
    """Parse the arguments, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="requests with this in the name")
    parser.add_argument(
        "--fields", type=int, default=0, metavar="N", help="every N-th value of a field instead"
    )
    parser.add_argument("--top", type=int, default=25, help="how many of the worst are printed")
    arguments = parser.parse_args()
    for hold, status, name in asyncio.run(measure(arguments.fields, arguments.only))[
        : arguments.top
    ]:
        print(f"{hold * 1e3:7.1f} ms  {status}  {name[:100]}")


if __name__ == "__main__":
    main()
