"""Talking to a real stack whose engines step together, and help when it hangs."""

import json
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.running_stack import RunningStack

MODEL = "swell-shakespeare"
ADMIN_KEY = "admin-secret"
FLAGS = (
    "--enable-expert-parallel", "--dtype", "float32", "--admin-key", ADMIN_KEY,
    "--num-kv-blocks", "2048",
)  # fmt: skip


def call(
    url: str, body: object = None, *, rank: int | None = None, timeout: float = 60.0
) -> dict[str, Any]:
    """Send one request over a connection of its own, to one engine if a rank is given."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        result: dict[str, Any] = json.loads(answer.read())
        return result


def complete(
    stack: RunningStack, prompt: str, tokens: int, rank: int | None = None, **more: object
) -> str:
    """Return the greedy completion of a prompt, exactly so many tokens.

    With a rank it waits until the front end that it happens to ask has met that engine.
    """
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    body |= {"temperature": 0, **more}
    deadline = time.monotonic() + 15
    while True:
        try:
            answer = call(f"{stack.url}/v1/completions", body, rank=rank)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if rank is None or error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    assert answer["usage"]["completion_tokens"] == tokens
    return str(answer["choices"][0]["text"])


def utility(stack: RunningStack, name: str, rank: int | None = None) -> dict[int, dict[str, Any]]:
    """Call a utility of one engine or all; return what they answered by rank."""
    answer = call(f"{stack.url}/admin/utilities", {"name": name, "rank": rank})
    results = answer["answers"]
    assert all(each["error"] is None for each in results), results
    return {each["rank"]: each["result"] for each in results}


def metric(stack: RunningStack, name: str) -> dict[str, float]:
    """Return the samples of a metric by engine (or by "" without that label)."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^swell_{name}(\{{[^}}]*\}})? (\S+)$", text, re.M):
        engine = re.search(r'engine="(\d+)"', labels)
        key = engine[1] if engine else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


def until(condition: Callable[[], bool], what: str, timeout: float = 15.0) -> None:
    """Wait for a condition that a stack will meet."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def is_paused(stack: RunningStack) -> bool:
    """Whether the engines rest, as the metrics say."""
    return metric(stack, "engines_running")[""] == 0


def wave_when_paused(stack: RunningStack) -> int:
    """Wait until the engines rest and everybody tells the same wave; return it."""

    def told() -> set[int]:
        infos = utility(stack, "info").values()
        return {int(metric(stack, "wave")[""]), *(int(info["wave"]) for info in infos)}

    until(lambda: is_paused(stack) and len(told()) == 1, "all agree on the wave")
    return told().pop()


def kill(stack: RunningStack, name: str) -> float:
    """End a process at once; return when."""
    stack.processes()[name].kill()
    return time.monotonic()


@contextmanager
def watched(stack: RunningStack, seconds: float) -> Iterator[None]:
    """Make whatever hangs inside fail after so long, with the stacks of all processes shown."""

    def give_up() -> None:
        for process in stack.processes().values():
            process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        print("\n".join(stack.lines[-600:]))
        stack.process.kill()

    watchdog = threading.Timer(seconds, give_up)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
