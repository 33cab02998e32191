"""Measures how long one tenant waits for another's work in each queue before the engines."""

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.hostile.connections import Address, address_of, exchange, request
from benchmarks.hostile.watch import processor_waits
from benchmarks.running_stack import RunningStack
from server.limits import MAX_TEMPLATE_SECONDS

MAX_WAIT = MAX_TEMPLATE_SECONDS + 1.0
"""Maximum seconds by which one tenant's work can delay another's: a looping template is aborted
first, and a new process started for the next one."""
_GREEDY, _OTHER = "key-of-the-greedy", "key-of-the-other"
_BEFORE, _PATIENCE = 0.5, 120.0

_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What news?"}], "max_tokens": 1}
_COMPLETION: dict[str, Any] = {"prompt": "ROMEO:", "max_tokens": 1}
_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


class Queue(NamedTuple):
    """A request that one tenant sends many times, and another once."""

    name: str
    path: str
    greedy: list[dict[str, Any]]
    other: dict[str, Any]


def _schema(number: int) -> dict[str, Any]:
    properties = {f"p{number}_{each}": {"type": "string"} for each in range(100)}
    return {**_COMPLETION, "structured_outputs": {"json": {"properties": properties}}}


def _large_schema(number: int) -> dict[str, Any]:
    """Return a request with a schema that would take ten seconds to validate."""
    properties: dict[str, Any] = {f"{number}_{each}": {} for each in range(9000)}
    patterns: dict[str, Any] = {f"^(a+)+{each}$": {} for each in range(60)}
    schema = {"properties": properties, "patternProperties": patterns}
    return {**_COMPLETION, "structured_outputs": {"json": schema}}


QUEUES = (
    Queue(
        "20 templates that loop",
        "/v1/chat/completions",
        [{**_CHAT, "chat_template": f"{_LOOP}{number}"} for number in range(20)],
        {**_CHAT, "chat_template": "{{ messages[0].content }}"},
    ),
    Queue("40 schemas", "/v1/completions", [_schema(number) for number in range(40)], _schema(40)),
    Queue(
        "8 schemas of 110 KB",
        "/v1/completions",
        [_large_schema(number) for number in range(8)],
        _schema(41),
    ),
    Queue(
        "200 texts of 62 KB",
        "/tokenize",
        [{"prompt": f"{number} " + "qxzj " * 12_400} for number in range(200)],
        {"prompt": "What news?"},
    ),
    Queue(
        "40 conversations of 62 KB",
        "/v1/chat/completions",
        [
            {**_CHAT, "messages": [{"role": "user", "content": f"{number} " + "qxzj " * 12_400}]}
            for number in range(40)
        ],
        _CHAT,
    ),
    Queue(
        "40 kept responses of 1 MB",
        "/v1/responses",
        [{"input": "hi", "instructions": "x" * 1_000_000, "background": True}] * 40,
        {"input": "hi", "max_output_tokens": 1, "store": True},
    ),
)  # fmt: skip


def _seconds(address: Address, key: str, path: str, body: dict[str, Any]) -> tuple[float, int]:
    wire = request(path, json.dumps(body).encode(), f"Authorization: Bearer {key}")
    started_at = time.monotonic()
    status, _ = exchange(address, wire, _PATIENCE)
    return time.monotonic() - started_at, status


def _flood(address: Address, queue: Queue, sent: Any, remaining: Any) -> None:
    """Send all requests of the greedy tenant, counting down unanswered ones."""

    def ask(body: dict[str, Any]) -> None:
        _seconds(address, _GREEDY, queue.path, body)
        with remaining.get_lock():
            remaining.value -= 1

    threads = [threading.Thread(target=ask, args=(body,)) for body in queue.greedy]
    for thread in threads:
        thread.start()
    sent.set()
    for thread in threads:
        thread.join()


def waits(*flags: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield for each queue its name, the outcome, and any problems."""
    spawned = multiprocessing.get_context("spawn")
    with RunningStack(
        "--api-server-count", "1", "--data-parallel-size", "1", "--log-level", "error",
        "--trust-request-chat-template", "--api-key", _GREEDY, "--api-key", _OTHER, *flags,
        timeout=300.0,
    ) as stack:  # fmt: skip
        address, front_end = address_of(stack.url), stack.processes()["api 0"].pid
        loop = f"{front_end}/task/{front_end}"
        for queue in QUEUES:
            _seconds(address, _OTHER, queue.path, queue.other)  # warm up
            baseline = min(_seconds(address, _OTHER, queue.path, queue.other)[0] for _ in range(3))
            sent, remaining = spawned.Event(), spawned.Value("i", len(queue.greedy))
            flood = spawned.Process(target=_flood, args=(address, queue, sent, remaining))
            flood.start()  # in a separate process, so that reading its answers delays nothing here
            sent.wait(_PATIENCE)
            time.sleep(_BEFORE)
            waited = processor_waits(loop)
            during, status = _seconds(address, _OTHER, queue.path, queue.other)
            waited, still = processor_waits(loop) - waited, remaining.value
            flood.join()
            wrong = [] if status == 200 else [f"the other tenant was answered {status}"]
            if during - waited > baseline + MAX_WAIT:
                wrong.append(f"the other tenant waited {during:.1f} s")
            summary = (
                f"{baseline * 1e3:.0f} ms alone, {during * 1e3:.0f} ms beside it, "
                f"{waited * 1e3:.0f} of them for a processor; {still} left"
            )
            yield f"{queue.name} of another tenant", summary, wrong
