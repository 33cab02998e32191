"""Path operations work with FastAPI: its router finds them and middleware sees them."""

import asyncio
import tracemalloc
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Response
from pydantic import AfterValidator
from starlette.types import Receive, Scope, Send

from server.api.route import LARGE, ApiRoute, read_body
from server.api.services import ServicesDep
from server.config import GuardConfig
from server.http.call import Call
from server.schema.body import RequestBody
from tests.server.http.test_http_protocol import served
from tests.support.waiting import PATIENCE


class NotesRoutes:
    """Middleware that notes which route answered each request, as tracing does."""

    def __init__(self, app: Any, noted: list[str]) -> None:
        self._app, self._noted = app, noted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        self._noted.append(scope["route"].path)


def test_middleware_sees_the_route_of_every_request(app: FastAPI, http: Any) -> None:
    noted: list[str] = []
    app.add_middleware(NotesRoutes, noted=noted)
    http.complete()
    http.chat()
    http.get("/v1/models/tiny")
    assert noted == ["/v1/completions", "/v1/chat/completions", "/v1/models/{model_id:path}"]


def test_operation_gets_its_annotated_parameters(app: FastAPI, http: Any) -> None:
    async def echo(name: str, call: Call, services: ServicesDep, body: RequestBody) -> Response:
        return Response(f"{name} {call.path} {services.names[0]} {body.model_dump()}")

    app.router.routes.insert(0, ApiRoute("/echo/{name}", echo, methods=["POST"]))
    answer = http.post("/echo/me", {})
    assert answer.text == "me /echo/me tiny {}"
    assert answer.headers["x-request-id"]


def test_operation_with_unsupported_parameters_is_refused_at_definition() -> None:
    async def depends(body: RequestBody, found: Annotated[int, Depends(lambda: 1)]) -> Response:
        return Response(f"{body} {found}")

    async def queries(body: RequestBody, limit: int) -> Response:
        return Response(f"{body} {limit}")

    async def numbers(body: RequestBody, asks: int) -> Response:
        return Response(f"{body} {asks}")

    for operation in (depends, queries):
        with pytest.raises(AssertionError, match="/asks"):
            ApiRoute("/asks", operation, methods=["POST"])
    with pytest.raises(AssertionError, match="asks"):
        ApiRoute("/{asks}", numbers, methods=["POST"])


async def test_head_is_answered_like_get_without_the_body(app: FastAPI) -> None:
    paths = [
        "/", "/docs", "/health", "/load", "/metrics", "/openapi.json", "/ping", "/ready",
        "/status.css", "/status.json", "/v1/models", "/v1/models/tiny", "/v1/nothing", "/version",
    ]  # fmt: skip

    async with (
        served(app, GuardConfig()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        for path in paths:
            got, head = await client.get(path), await client.head(path)
            assert head.status_code == got.status_code, path
            assert head.headers["content-type"] == got.headers["content-type"]
            assert "content-length" in head.headers
            assert head.content == b""
        assert (await client.head("/v1/completions")).status_code == 405


async def test_event_loop_runs_between_reading_and_using_large_body() -> None:
    turns, turn_of_reading = 0, 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def note(text: str) -> str:
        nonlocal turn_of_reading
        turn_of_reading = turns
        return text

    class Note(RequestBody):
        text: Annotated[str, AfterValidator(note)]

    counting = asyncio.create_task(count())
    await read_body(Note, b'{"text": "%b"}' % (b"a" * LARGE))
    counting.cancel()
    assert turns > turn_of_reading > 0


async def test_a_large_field_is_copied_once_before_it_is_parsed() -> None:
    class Picture(RequestBody):
        url: str

    body = b'{"url": "%b"}' % (b"a" * (1 << 23))
    tracemalloc.start()
    await read_body(Picture, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * len(body), "the copy, and the text"
