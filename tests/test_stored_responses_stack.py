"""Stored responses of a node whose front ends die, whose /tmp is cleaned and whose disk is full."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.disks import fill, small_disk
from tests.support.http import MODEL, call, fetch
from tests.support.metrics import scrape
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


def test_answered_responses_survive_death_of_writing_front_end(
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
        rows = store.execute(
            "SELECT records.id, status, body, size FROM records JOIN parts"
            " ON parts.tenant = records.tenant AND record = records.id AND position = -1"
        ).fetchall()
        for id_, status, response, _ in rows:
            shown = json.loads(response)
            assert (shown["id"], shown["status"]) == (id_, status)
        (num_bytes,) = store.execute("SELECT sum(bytes) FROM tenants").fetchone()
    assert num_bytes == sum(size for *_, size in rows)
    return len(rows), num_bytes


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose sockets have paths of fewer than 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="swell-kept-") as directory:
        yield Path(directory)


def test_a_cleaner_and_a_restarted_front_end_do_not_split_the_store(
    short_directory: Path,
) -> None:
    def found(url: str, id_: str) -> set[int]:
        """Ask both front ends, over connections of their own."""
        return {fetch(f"{url}/v1/responses/{id_}", key=None).status for _ in range(20)}

    arguments = (
        *ARGUMENTS,
        "--api-server-count",
        "2",
        "--socket-dir",
        str(short_directory / "node"),
    )
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 1}
    with RunningStack(*arguments) as stack:
        before = call(f"{stack.url}/v1/responses", body, key=None)["id"]
        (directory,) = (short_directory / "node").glob("swell-*")
        shutil.rmtree(directory, ignore_errors=True)  # of what is put back meanwhile some stays
        until(lambda: (directory / "responses.sqlite").exists(), "the store is put back")
        victim = next(each for name, each in stack.processes().items() if "api" in name)
        victim.send_signal(signal.SIGKILL)
        until(lambda: stack.output.count("api") > 3, "it is started again")
        until(
            lambda: sum(" ready after" in line and "api" in line for line in stack.lines) == 3,
            "it serves again",
        )
        after = call(f"{stack.url}/v1/responses", body, key=None)["id"]
        assert found(stack.url, before) == found(stack.url, after) == {200}


def test_full_disk_ends_neither_front_end_nor_store() -> None:
    """The chart's ratio in small: the store may have as much as there is."""
    arguments = (
        *ARGUMENTS, "--api-server-count", "2", "--admin-key", "a", "--response-store-bytes",
        str(4 << 20),
    )  # fmt: skip
    large = {"model": MODEL, "input": "hi", "max_output_tokens": 1, "store": True,
             "metadata": {str(number): "x" * 512 for number in range(16)}}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,  # sockets have short paths
        small_disk(Path(directory) / "disk") as disk,
        RunningStack(*arguments, "--socket-dir", str(disk / "node")) as stack,
        ThreadPoolExecutor(8) as clients,
    ):
        pids = {process.pid for name, process in stack.processes().items() if "api" in name}

        def keep(_: int) -> int:
            made = call(f"{stack.url}/v1/responses", large, key=None)
            return fetch(f"{stack.url}/v1/responses/{made['id']}", key=None).status

        assert {*clients.map(keep, range(400))} == {200}
        fill(disk)
        scaled = {"data_parallel_size": 2}
        assert fetch(f"{stack.url}/admin/scale", scaled, key="a").status == 200
        until(lambda: sum("engine" in name for name in stack.processes()) == 2, "one more engine")
        assert {*clients.map(keep, range(50))} == {200}
        alive = {process.pid for name, process in stack.processes().items() if "api" in name}
        assert alive == pids
        evicted = re.compile(r'response_store_evictions_total{[^}]*reason="disk"} [1-9]')
        until(lambda: evicted.search(scrape(stack.url)), "it is counted what the disk cost")
