"""The response store on a real PostgreSQL from Debian's package, run by an unprivileged user."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psycopg
import pytest

from benchmarks.running_stack import RunningStack
from server.store.postgres import PostgresDatabase
from server.store.records import BackendFailed
from server.store.sql import SqlBackend
from tests.server.store.contract import *  # noqa: F403
from tests.support.ports import free_ports

pytestmark = pytest.mark.deploy


def _program(name: str) -> str:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    assert found, "PostgreSQL is needed: apt install postgresql"
    return str(found[-1])


class Server:
    """A running PostgreSQL."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data"
        self._sockets = directory
        (self._port,) = free_ports(1)
        self._user = None
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            self._user = pwd.getpwnam("nobody").pw_name
            shutil.chown(directory, self._user)
        self._run("initdb", "-A", "trust", "-U", "swell", "--no-sync", "-D", str(self._data))
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://swell@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        options = f"-p {self._port} -h 127.0.0.1 -k {self._sockets} -c fsync=off"
        log = str(self._sockets / "log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop")

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [_program(name), *arguments],
            check=True, user=self._user, cwd="/", timeout=60,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    directory = Path(tempfile.mkdtemp(prefix="swell-postgres-"))
    try:
        running = Server(directory)
        yield running
        running.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def opened(url: str, max_bytes: int, max_age: float) -> SqlBackend:
    return SqlBackend(PostgresDatabase(url), max_bytes, max_age)


@pytest.fixture
def opener(server: Server) -> Opener:  # noqa: F405
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS swell CASCADE")
    return partial(opened, server.url)


def test_all_front_ends_can_open_database_at_once(opener: Opener) -> None:  # noqa: F405
    with ThreadPoolExecutor(8) as pool:
        for backend in pool.map(lambda _: opener(100_000, DAY), range(8)):  # noqa: F405
            backend.close()


def test_store_works_again_after_database_restart(
    server: Server,
    opener: Opener,  # noqa: F405
) -> None:
    store = opener(100_000, DAY)  # noqa: F405
    put(store, response("r1"))  # noqa: F405
    server.stop()
    for _ in range(2):
        with pytest.raises(BackendFailed):
            store.get("a", "r1")
    with pytest.raises(BackendFailed):
        put(store, response("r2"))  # noqa: F405
    server.start()
    assert store.get("a", "r1") == response("r1")  # noqa: F405
    assert store.get("a", "r2") is None
    server.stop()
    server.start()
    put(store, response("r3"))  # noqa: F405
    assert store.get("a", "r3") is not None
    store.close()


def test_ids_that_database_cannot_store_are_unknown(opener: Opener) -> None:  # noqa: F405
    store = opener(100_000, DAY)  # noqa: F405
    assert store.get("a", "r\0") is None
    assert not store.delete("a", "r\0")
    store.close()


def test_front_ends_of_several_nodes_share_database(server: Server) -> None:
    arguments = (
        "--log-level", "warning", "--api-server-count", "1", "--data-parallel-size", "1",
        "--executor", "simulated", "--response-store", server.url,
    )  # fmt: skip
    body = {"model": "swell-shakespeare", "input": "Good morrow!", "max_output_tokens": 4}
    with RunningStack(*arguments) as one, RunningStack(*arguments) as other:
        made = httpx.post(f"{one.url}/v1/responses", json=body, timeout=60).json()
        shown = httpx.get(f"{other.url}/v1/responses/{made['id']}", timeout=60)
        assert shown.json() == made
        body["previous_response_id"] = made["id"]
        more = httpx.post(f"{other.url}/v1/responses", json=body, timeout=60)
        assert more.status_code == 200, more.text
        id_ = more.json()["id"]
        gone = httpx.delete(f"{one.url}/v1/responses/{id_}", timeout=60)
        assert gone.status_code == 200, gone.text
        assert httpx.get(f"{other.url}/v1/responses/{id_}", timeout=60).status_code == 404


def test_absent_database_server_is_named() -> None:
    (port,) = free_ports(1)
    with pytest.raises(OSError, match="response store cannot be used"):
        PostgresDatabase(f"postgresql://swell:secret@127.0.0.1:{port}/x")
