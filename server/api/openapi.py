"""The OpenAPI document: request schemas from pydantic, responses from msgspec Structs."""

import functools
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.responses import FileResponse

from server.observe.metrics import CONTENT_TYPE
from server.observe.shared_work import SharedWork

_REF = "#/components/schemas/{name}"
_documented: dict[str, type[msgspec.Struct]] = {}
"""The Structs that operations answer with, by name."""

_ERRORS = {
    401: "The API key is missing or wrong.",
    403: "The admin key is missing or wrong.",
    400: "The request is wrong; `param` names the field.",
    404: "There is no such model, engine or path.",
    405: "Method Not Allowed.",
    409: "It is being done already.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; try again after the time in Retry-After.",
    500: "The server failed.",
    503: "No engine can serve now; try again after the time in Retry-After.",
}

Responses = dict[int | str, dict[str, Any]]

REQUEST_HEADERS = {
    "parameters": [
        {
            "name": "X-Request-Id",
            "in": "header",
            "required": False,
            "description": "The client's name for the request; comes back in the answer.",
            "schema": {"type": "string"},
        },
        {
            "name": "X-data-parallel-rank",
            "in": "header",
            "required": False,
            "description": "Run on this engine and no other.",
            "schema": {"type": "integer", "minimum": 0, "maximum": 999999},
        },
    ]
}


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    assert _documented.setdefault(struct.__name__, struct) is struct, "each needs its own name"
    return {"$ref": _REF.format(name=struct.__name__)}


def json_responses(success: type[msgspec.Struct]) -> Responses:
    """Return the documentation of a success with a Struct."""
    return {
        200: {
            "description": (success.__doc__ or "").strip(),
            "content": {"application/json": {"schema": _reference(success)}},
        }
    }


def stream_responses(success: type[msgspec.Struct], chunk: type[msgspec.Struct]) -> Responses:
    """The same of an operation that is queued, and can also answer with a stream of chunks."""
    text = (
        "Events `data: CHUNK`, the last one `data: [DONE]`. An error after the headers comes as "
        "the last event, with an error body."
    )
    return _with_stream(success, text, {"x-chunk": _reference(chunk)})


def event_responses(
    success: type[msgspec.Struct], kinds: Sequence[type[msgspec.Struct]]
) -> Responses:
    """The same of one that can also answer with a stream of typed events."""
    text = (
        "Events `event: TYPE` and `data: EVENT`. An error after the first comes as an event of "
        "type error."
    )
    return _with_stream(success, text, {"x-events": [_reference(kind) for kind in kinds]})


def _with_stream(success: type[msgspec.Struct], text: str, parts: dict[str, Any]) -> Responses:
    responses = json_responses(success)
    schema = {"type": "string", "description": text}
    responses[200]["content"]["text/event-stream"] = {"schema": schema, **parts}
    return responses | QUEUED


def any_of(*answers: Responses) -> Responses:
    """Return the documentation of an operation that answers as one of several others do."""
    first, contents = answers[0], [answer[200]["content"] for answer in answers]
    bodies = [content["application/json"]["schema"] for content in contents]
    content = {**contents[0], "application/json": {"schema": {"anyOf": bodies}}}
    return {**first, 200: {**first[200], "content": content}}


def text_responses(kind: str = CONTENT_TYPE, text: str = "Prometheus text format.") -> Responses:
    """Return the documentation of a success with text, of metrics or of a `kind`."""
    return {200: {"description": text, "content": {kind: {"schema": {"type": "string"}}}}}


def errors(*statuses: int) -> Responses:
    """Name errors of an operation besides those of its kind of route, which describes them."""
    return {status: {} for status in statuses}


QUEUED = errors(429)


def described(statuses: Iterable[int], body: type[msgspec.Struct]) -> Responses:
    """Return the documentation of errors with this body."""
    content = {"application/json": {"schema": _reference(body)}}
    responses: Responses = {
        status: {"description": _ERRORS[status], "content": content} for status in statuses
    }
    for busy in {429, 503} & responses.keys():
        responses[busy]["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    return responses


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an app whose routes were documented with the functions above."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, components = msgspec.json.schema_components(_documented.values(), ref_template=_REF)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas.update(components)
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = schema
    return app.openapi_schema


def serve_document(app: FastAPI, root: str) -> None:
    """Have an app's document made in a thread when it is first read.

    It takes a third of a second, which must not delay the start or other requests. Its text is
    kept: to write it again for each reader would hold the event loop up for milliseconds.

    Args:
        app: whose routes were documented with the functions above.
        root: path of a proxy below which the app is; empty for none.
    """
    app.openapi = functools.partial(document, app)  # type: ignore[method-assign]

    @functools.cache
    def rendered() -> bytes:
        servers = {"servers": [{"url": root}]} if root else {}
        return msgspec.json.encode({**app.openapi(), **servers})

    app.state.document = SharedWork(lambda: rendered)


router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Send the document."""
    document: SharedWork[bytes] = request.app.state.document
    return Response(await document.result(), media_type="application/json")


@router.get("/docs")
async def page(request: Request) -> Response:
    """Show the API's document."""
    root = request.scope.get("root_path", "").rstrip("/")
    return get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title=f"{request.app.title} API",
        swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/swagger-ui.css",
        swagger_favicon_url=f"{root}/docs/favicon.png",
    )


@router.get("/docs/swagger-ui-bundle.js")
@router.get("/docs/swagger-ui.css")
@router.get("/docs/favicon.png")
async def file(request: Request) -> Response:
    """Send a file of the page."""
    folder = Path(str(files("fastapi_offline"))) / "static"
    return FileResponse(folder / Path(request.url.path).name)
