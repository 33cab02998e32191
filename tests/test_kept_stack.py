"""Responses that are kept by the front ends of a node, of which one dies while it writes."""

import contextlib
import http.client
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import MODEL, call, fetch
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

NUM_RESPONSES = int(os.environ.get("SWELL_TEST_KEPT", "400"))
"""How many are made; the environment may ask for a longer run."""
NUM_CLIENTS = 16
PER_CONNECTION = 20
"""Requests after which a client connects anew, so that both front ends have their share."""
ARGUMENTS = ("--log-level", "warning", "--executor", "simulated", "--data-parallel-size", "1")


class Client:
    """Asks again, over another connection, when nobody answers."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        self._asked = 0

    def ask(self, path: str, body: object = None) -> str:
        """Return what is answered, with 200."""
        if self._asked % PER_CONNECTION == 0:
            self._connection.close()
        self._asked += 1
        found: list[tuple[int, str]] = []
        until(lambda: self._try(path, body, found), "somebody answers")
        status, text = found[0]
        assert status == 200, text
        return text

    def _try(self, path: str, body: object, found: list[tuple[int, str]]) -> bool:
        data = None if body is None else json.dumps(body)
        method = "GET" if data is None else "POST"
        try:
            self._connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            found.append((answer.status, answer.read().decode()))
        except (OSError, http.client.HTTPException):  # of the front end that was killed
            self._connection.close()
            return False
        return True

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def spread(url: str, work: Callable[[Client, int], None]) -> Iterator[None]:
    """Do work that has numbers from 0 on with many clients, until the end of the context."""

    def some(first: int) -> None:
        with contextlib.closing(Client(url)) as client:
            for number in range(first, NUM_RESPONSES, NUM_CLIENTS):
                work(client, number)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        working = [pool.submit(some, first) for first in range(NUM_CLIENTS)]
        yield
        for each in working:
            each.result()


def test_nothing_that_was_answered_is_lost_when_a_front_end_dies_while_it_writes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "responses.sqlite"
    answered: dict[str, str] = {}

    def ask(client: Client, number: int) -> None:
        body = {"model": MODEL, "input": f"{number}", "max_output_tokens": 1}
        text = client.ask("/v1/responses", body)
        answered[json.loads(text)["id"]] = text

    def compare(client: Client, number: int) -> None:
        id_ = list(answered)[number]
        assert client.ask(f"/v1/responses/{id_}") == answered[id_]

    kept = ("--response-store", str(file))
    with RunningStack(*ARGUMENTS, "--api-server-count", "2", *kept) as stack:
        with spread(stack.url, ask):
            until(
                lambda: len(answered) >= NUM_RESPONSES // 3,
                "a third is answered",
                within=PATIENCE + NUM_RESPONSES / 10,
            )
            victim = next(each for name, each in stack.processes().items() if "api" in name)
            victim.send_signal(signal.SIGKILL)
        assert len(answered) == NUM_RESPONSES
        with spread(stack.url, compare):
            pass
        last = next(reversed(answered))
        body = {"model": MODEL, "input": "and?", "previous_response_id": last}
        more = call(f"{stack.url}/v1/responses", body, key=None)
    num_kept, num_bytes = _checked(file)
    # Whoever was not answered asked again: each client can have been in that place once.
    assert NUM_RESPONSES < num_kept <= NUM_RESPONSES + 1 + NUM_CLIENTS

    # What was not used for longest is forgotten: `last` has been used after all others.
    limit = num_bytes // 2
    limited = (*kept, "--response-store-bytes", str(limit))
    with RunningStack(*ARGUMENTS, "--api-server-count", "1", *limited) as stack:
        again = {"model": MODEL, "input": "once more", "max_output_tokens": 1}
        newest = call(f"{stack.url}/v1/responses", again, key=None)["id"]
        for id_ in (newest, more["id"], last):
            assert fetch(f"{stack.url}/v1/responses/{id_}", key=None).status == 200
        assert fetch(f"{stack.url}/v1/responses/{next(iter(answered))}", key=None).status == 404
    num_left, num_bytes = _checked(file)
    assert 0.4 * num_kept < num_left < 0.6 * num_kept
    assert num_bytes <= limit


def _checked(file: Path) -> tuple[int, int]:
    """Check that nothing in a store is torn; return how many responses and bytes it has."""
    with contextlib.closing(sqlite3.connect(file)) as store:
        assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = store.execute("SELECT id, status, response, size FROM responses").fetchall()
        for id_, status, response, _ in rows:
            shown = json.loads(response)
            assert (shown["id"], shown["status"]) == (id_, status)
        (num_bytes,) = store.execute("SELECT sum(bytes) FROM tenants").fetchone()
    assert num_bytes == sum(size for *_, size in rows)
    return len(rows), num_bytes
