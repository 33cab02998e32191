"""Memory budget of bodies: unfinished uploads, and waiting or running requests."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Response

from server.access.admission_table import AdmissionTable, create_admission_table
from server.api.route import ApiRoute
from server.config import FrontEndConfig, GuardConfig
from server.errors import ApiError
from server.http.body_budget import COMPLETE_BODIES_FACTOR, FREE_BYTES, BodyBudget, NoRoomForBody
from server.http.call import BodyLimits, Call
from server.observe.metrics import FrontEndMetrics
from server.schema.body import RequestBody
from tests.support.waiting import PATIENCE

PIECE = 2**18


def test_all_front_ends_of_a_node_share_the_limit(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 2)
    tables = [AdmissionTable(tmp_path, index) for index in range(2)]
    here, there = (BodyBudget(table, 4 * PIECE).hold() for table in tables)
    for body in (here, here, there, there):
        body.grow(PIECE)
    with pytest.raises(NoRoomForBody):
        there.grow(1)
    there.release()
    there.release()
    here.grow(2 * PIECE)
    here.release()
    assert tables[0].body_bytes() == 0
    for table in tables:
        table.close()


def test_dead_front_end_holds_no_bytes(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 2)
    died = AdmissionTable(tmp_path, 1)
    BodyBudget(died, 4 * PIECE).hold().grow(4 * PIECE)
    died.close()
    table = AdmissionTable(tmp_path, 0)
    BodyBudget(table, 4 * PIECE).hold().grow(PIECE)
    assert table.body_bytes() == PIECE
    table.close()


def test_small_bodies_are_always_accepted() -> None:
    table = AdmissionTable(None)
    budget = BodyBudget(table, PIECE)
    budget.hold().grow(PIECE)
    small = budget.hold()
    small.grow(FREE_BYTES)
    with pytest.raises(NoRoomForBody):
        small.grow(1)


def test_body_larger_than_limit_is_accepted_alone() -> None:
    budget = BodyBudget(AdmissionTable(None), PIECE)
    large = budget.hold()
    large.grow(8 * PIECE)
    large.release()


def test_sixteen_unfinished_uploads_do_not_hold_a_gigabyte() -> None:
    table = AdmissionTable(None)
    limits = BodyLimits(12 * PIECE, 60.0, BodyBudget(table, 16 * PIECE))
    scope = {"type": "http", "path": "/", "headers": [(b"content-type", b"application/json")]}

    async def send(message: Any) -> None: ...

    held: list[int] = []

    async def scenario() -> list[Any]:
        async def receive() -> dict[str, Any]:
            held.append(table.body_bytes())
            if len(held) > 500:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b" " * PIECE, "more_body": True}

        calls = [Call(scope, receive, send, limits) for _ in range(16)]
        uploads = [asyncio.create_task(call.read()) for call in calls]
        while len(held) <= 500 and not all(upload.done() for upload in uploads):
            await asyncio.sleep(0)
        for upload in uploads:
            upload.cancel()
        return await asyncio.gather(*uploads, return_exceptions=True)

    ends = asyncio.run(scenario())
    assert max(held) <= 17 * PIECE
    refused = [end for end in ends if isinstance(end, ApiError)]
    assert {each.status for each in refused} == {413, 503}
    assert all(each.headers[0][0] == "retry-after" for each in refused if each.status == 503)
    assert table.body_bytes() == 0


def test_bodies_of_thousands_of_waiting_requests_are_bounded(
    config: FrontEndConfig,
) -> None:
    budget = BodyBudget(AdmissionTable(None), PIECE)
    limits = BodyLimits(2 * COMPLETE_BODIES_FACTOR * PIECE, 60.0, budget)
    app = FastAPI()
    app.state.services = SimpleNamespace(body_limits=limits, metrics=FrontEndMetrics(config))
    scope = {
        "type": "http", "method": "POST", "path": "/", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    statuses: list[int] = []

    async def scenario() -> None:
        over, running = asyncio.Event(), asyncio.Semaphore(0)

        async def operation(body: RequestBody) -> Response:
            running.release()
            await over.wait()
            return Response()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def ask(size: int) -> None:
            async def receive() -> dict[str, Any]:
                body = b"{}".ljust(size)
                return {"type": "http.request", "body": body, "more_body": False}

            await app({**scope}, receive, send)

        app.router.routes.append(ApiRoute("/", operation, methods=["POST"]))
        waiting = [asyncio.create_task(ask(PIECE)) for _ in range(COMPLETE_BODIES_FACTOR)]
        for _ in waiting:
            await running.acquire()
        await ask(PIECE)
        assert statuses == [503]
        small = asyncio.create_task(ask(FREE_BYTES))
        await running.acquire()
        over.set()
        await asyncio.gather(small, *waiting)
        await ask(2 * COMPLETE_BODIES_FACTOR * PIECE)  # a single body may exceed the budget
        await ask(PIECE)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    assert statuses == [503, *[200] * (COMPLETE_BODIES_FACTOR + 3)]


@pytest.mark.parametrize("forget", [Call.release, Call.forget_body])
def test_background_response_holds_its_body_until_no_longer_needed(
    forget: Callable[[Call], None],
) -> None:
    budget = BodyBudget(AdmissionTable(None), PIECE)
    limits = BodyLimits(2 * COMPLETE_BODIES_FACTOR * PIECE, 60.0, budget)
    scope = {"type": "http", "path": "/", "headers": [(b"content-type", b"application/json")]}

    async def receive() -> dict[str, Any]:
        return {
            "type": "http.request",
            "body": b" " * COMPLETE_BODIES_FACTOR * PIECE,
            "more_body": False,
        }

    async def send(message: Any) -> None: ...

    answered = Call(scope, receive, send, limits)
    asyncio.run(answered.read())
    detached = answered.detached(send)
    answered.release()
    with pytest.raises(NoRoomForBody):
        budget.keep(PIECE)
    forget(detached)
    detached.release()
    assert budget.keep(PIECE) == PIECE


class TestSmallBodies:
    @pytest.fixture
    def config(self, config: FrontEndConfig) -> FrontEndConfig:
        return msgspec.structs.replace(config, guards=GuardConfig(max_body_bytes_in_flight=1))

    def test_requests_are_served_while_upload_limit_is_reached(self, http: Any) -> None:
        http.complete()


def test_many_small_bodies_are_counted() -> None:
    """Incomplete uploads on all connections of a front end."""
    budget = BodyBudget(AdmissionTable(None), 128 << 20)
    size = (1 << 16) - 1
    for _ in range((128 << 20) // size):
        budget.hold().grow(size)
    with pytest.raises(NoRoomForBody):
        budget.hold().grow(size)
    assert 8192 * FREE_BYTES <= 128 << 20
