"""The longest hold of an event loop is found, whoever has it."""

import asyncio
import time
from typing import Any

from benchmarks.hostile.holds import holds_of

BURNT = 0.02


def burn() -> None:
    deadline = time.thread_time() + BURNT
    while time.thread_time() < deadline:
        pass


async def app(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    if message["body"] == b"at once":
        burn()
    elif message["body"] == b"in a task":
        await asyncio.create_task(asyncio.to_thread(burn))  # not on the loop
        asyncio.get_running_loop().call_soon(burn)
        await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_longest_blocked_loop_iteration_is_reported() -> None:
    bodies: list[bytes | None] = [b"at once", b"in a task", b"calm"]
    sent = ((str(body), "/any", body) for body in bodies)
    holds = asyncio.run(holds_of(app, sent))  # type: ignore[arg-type]
    assert [(status, name) for _, status, name in holds] == [(200, str(body)) for body in bodies]
    at_once, in_a_task, calm = (hold for hold, _, _ in holds)
    assert min(at_once, in_a_task) >= BURNT > calm
