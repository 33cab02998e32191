"""Connections are distributed among the front ends of a node."""

import asyncio
import functools
import gc
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
import uvloop
from fastapi import FastAPI

from server.access.admission_table import AdmissionTable, create_admission_table
from server.config import GuardConfig
from server.http.listener import AcceptBackoff, Acceptor, ConnectionShare, HttpServer
from server.http.protocol import limited_protocol
from tests.support.waiting import PATIENCE


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[list[AdmissionTable]]:
    create_admission_table(tmp_path, 2)
    found = [AdmissionTable(tmp_path, index) for index in range(2)]
    yield found
    for table in found:
        table.close()


def test_single_front_end_has_no_neighbours(tables: list[AdmissionTable]) -> None:
    assert tables[0].has_neighbours
    alone = AdmissionTable(None)
    assert not alone.has_neighbours
    assert alone.fewest_connections() is None
    alone.close()


def test_share_is_large_relative_to_a_smaller_one(tables: list[AdmissionTable]) -> None:
    ours, theirs = ConnectionShare(tables[0]), ConnectionShare(tables[1])
    ours.changed(100)
    assert not ours.is_large  # no other front end accepts connections
    theirs.changed(0)
    assert ours.is_large
    assert not theirs.is_large
    ours.changed(1)
    assert not ours.is_large  # one more is tolerated
    theirs.changed(80)
    ours.changed(90)
    assert not ours.is_large  # so is an eighth more


def test_a_front_end_that_leaves_no_longer_counts(tables: list[AdmissionTable]) -> None:
    ours, theirs = ConnectionShare(tables[0]), ConnectionShare(tables[1])
    ours.changed(0)
    theirs.changed(50)
    ours.leave()
    ours.changed(1)
    assert ours.is_large
    assert not theirs.is_large
    theirs.leave()
    assert not ours.is_large  # all leave, so no process remains to take over


def test_a_successor_begins_without_connections(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 2)
    watching, died = AdmissionTable(tmp_path, 0), AdmissionTable(tmp_path, 1)
    died.set_connections(7)
    assert watching.fewest_connections() == 7
    died.close()
    successor = AdmissionTable(tmp_path, 1)
    assert watching.fewest_connections() is None
    watching.close()
    successor.close()


def test_yielding_backs_off_if_no_neighbour_accepts() -> None:
    backoff = AcceptBackoff()
    assert not backoff.should_yield(share_is_large=False)
    between = []
    for _ in range(8):
        count = 0
        while not backoff.should_yield(share_is_large=True):
            count += 1
        backoff.neighbour_declined()
        between.append(count)
    assert between == [0, 0, 1, 3, 7, 15, 31, 63]
    for _ in range(63):
        assert not backoff.should_yield(share_is_large=True)
    backoff.neighbour_accepted()
    assert backoff.should_yield(share_is_large=True)


def test_small_share_resets_backoff() -> None:
    backoff = AcceptBackoff()
    for _ in range(5):
        backoff.neighbour_declined()
    assert not backoff.should_yield(share_is_large=False)
    assert backoff.should_yield(share_is_large=True)


async def test_a_front_end_with_many_connections_leaves_new_ones_to_others(
    tables: list[AdmissionTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.http.listener.YIELD_SECONDS", 10 * PATIENCE)
    taken: list[int] = []

    both = asyncio.Event()

    def take(number: int, connection: socket.socket, _: str) -> None:
        connection.close()
        taken.append(number)
        if len(taken) == 3:
            both.set()

    with socket.create_server(("127.0.0.1", 0)) as listener, listener.dup() as other:
        acceptors = []
        for number, each in enumerate((listener, other)):
            share = ConnectionShare(tables[number])
            acceptors.append(Acceptor(each, functools.partial(take, number), share))
            acceptors[-1].begin(8)
            share.changed(0 if number else 40)
        address = listener.getsockname()
        clients = [socket.create_connection(address, PATIENCE) for _ in range(3)]
        async with asyncio.timeout(PATIENCE):
            await both.wait()
        for accepting in acceptors:
            accepting.end()
        for client in clients:
            client.close()
    assert taken == [1, 1, 1]


def test_connections_are_served_though_a_neighbour_hangs(
    app: FastAPI, tables: list[AdmissionTable]
) -> None:
    share, hanging = ConnectionShare(tables[0]), ConnectionShare(tables[1])
    hanging.changed(0)
    server = HttpServer(
        uvicorn.Config(
            app, http=limited_protocol(GuardConfig(), share.changed), lifespan="off", loop="none"
        ),
        5.0,
        share,
    )

    problems: list[dict[str, object]] = []

    async def scenario() -> list[bytes]:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: problems.append(found))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve([listener]))
            try:
                async with asyncio.timeout(PATIENCE):
                    return await asyncio.gather(*[answer(port) for _ in range(20)])
            finally:
                server.end_connections()
                server.should_exit = True
                await serving

    async def answer(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line

    assert uvloop.run(scenario()) == [b"HTTP/1.1 200 OK\r\n"] * 20
    gc.collect()  # failed tasks report errors when collected
    assert not problems
    assert tables[1].fewest_connections() is None  # it has left
