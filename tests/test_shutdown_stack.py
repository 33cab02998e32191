"""A stack that is asked to end tells every client of it and kills none of its processes."""

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import MODEL, Answer, completion, fetch
from tests.support.metrics import num_running
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

SLOW = ("--executor", "simulated", "--simulated-step-us", "100000", "--min-ready-engines", "2")
MESSAGES = [{"role": "user", "content": "Tell me a long story."}]
LONG: dict[str, dict[str, Any]] = {
    "/v1/completions": completion("A long story", 1000),
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1000, "ignore_eos": True},
    "/v1/responses": {"input": "A story", "max_output_tokens": 1000, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1000},
}


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def stream(running: RunningStack, path: str) -> Answer:
    return fetch(running.url + path, {"model": MODEL, "stream": True, **LONG[path]})


def begun(running: RunningStack, clients: ThreadPoolExecutor) -> dict[str, list[Future[Answer]]]:
    """Begin streams on every endpoint; return when all of them run beside the unread one."""
    streams = {path: [clients.submit(stream, running, path) for _ in range(3)] for path in LONG}

    def all_run() -> bool:
        refused = [each.result() for group in streams.values() for each in group if each.done()]
        assert not refused
        return num_running(running.url) == 3 * len(LONG) + 1

    until(all_run, "all streams run")
    return streams


def last_event(text: str) -> dict[str, Any]:
    frame = text.rstrip("\n").rpartition("\n\n")[2]
    event: dict[str, Any] = json.loads(frame.rpartition("data: ")[2])
    return event


def test_streams_cut_by_shutdown_end_with_error_event_without_delay(
    clients: ThreadPoolExecutor,
) -> None:
    with RunningStack(*SLOW, "--shutdown-timeout", "1") as running:
        over = threading.Event()
        reader = clients.submit(_unread, running, over)
        until(lambda: num_running(running.url) == 1, "the unread stream runs")
        streams = begun(running, clients)
        running.process.send_signal(signal.SIGHUP)
        for path, answers in streams.items():
            for each in answers:
                status, text, _ = each.result(PATIENCE)
                assert status == 200, "the stream was torn"
                event = last_event(text)
                message = event.get("message") or event["error"]["message"]
                assert "shutting down" in message, path
                assert "[DONE]" not in text
        assert running.process.wait(PATIENCE) == 0
        over.set()
        reader.result(PATIENCE)
        assert "killed" not in running.output


def _unread(running: RunningStack, over: threading.Event) -> None:
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=PATIENCE)
    body = json.dumps({"stream": True, **completion("Unread", 1000)})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    over.wait(PATIENCE)
    connection.close()
