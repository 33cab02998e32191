"""Path operations whose bodies are read subject to the server's limits."""

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TypeVar

import msgspec
import pydantic
from fastapi import Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from server.api.compatibility import refuse_unserved
from server.api.openapi import described, json_responses
from server.api.services import Services, services_of
from server.errors import ErrorResponse, invalid, too_complex
from server.http.call import Call, ClientDisconnected
from server.http.errors import client_error, invalid_body
from server.json_price import TooCostly, checked_parts, costly_field
from server.limits import MAX_PROMPTS, MAX_TOKENS
from server.schema.body import RequestBody

Body = TypeVar("Body", bound=RequestBody)

LARGE = 1 << 16
"""Minimum bytes of a body, or of a list in it, that is parsed in parts."""
_PART_BYTES = 1 << 15
"""Bytes of a list parsed without yielding, about 0.5 ms."""

_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]])
_values = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OF_IDS = b"[]0123456789, \t\r\n"


async def read_body(model: type[Body], body: bytes) -> Body:
    """Validate a body; yields to the event loop between the parts of a large one.

    Raises:
        ApiError: it is not JSON, has too many elements, does not match `model`, or requests
            something unsupported.
    """
    await _check_price(body)
    given = None
    if len(body) >= LARGE:
        with suppress(ValueError, RecursionError):  # pydantic reports the error
            given = _fields.decode(body)
    try:
        if given is None:
            found = model.model_validate_json(body)
        else:
            found = await _read_large(model, given)
            await asyncio.sleep(0)  # the operation takes about as long again
    except pydantic.ValidationError as error:
        await asyncio.sleep(0)
        raise invalid_body(error, body) from error
    refuse_unserved(model, body if given is None else given)
    return found


async def _check_price(body: bytes) -> None:
    """Check the cost of parsing a body, which its size does not bound, before parsing it."""
    try:
        for _ in checked_parts(body):
            await asyncio.sleep(0)
    except TooCostly as error:
        raise too_complex(error, costly_field(body)) from error


async def _read_large(model: type[Body], given: dict[str, msgspec.Raw]) -> Body:
    """Validate a large body, given its fields.

    Pydantic converts all of its input in one call, which blocks the event loop. So it gets neither
    unknown fields nor long lists of token IDs, which are parsed in parts.
    """
    ids: dict[str, list[int] | list[list[int]]] = {}
    parts: list[bytes | msgspec.Raw] = []  # joined once: a field may have megabytes
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key not in given:
            continue
        text: bytes | msgspec.Raw = given[key]
        is_long = name in model.id_fields and memoryview(text).nbytes >= LARGE
        if is_long and (found := await _read_ids(bytes(text))):
            ids[name] = found
            text = b"[0]" if isinstance(found[0], int) else b"[[0]]"
        parts += [b",", msgspec.json.encode(key), b":", text]
    await asyncio.sleep(0)
    body = model.model_validate_json(b"".join([b"{", *parts[1:], b"}"]))
    for name, value in ids.items():
        setattr(body, name, value)
    return body


async def _read_ids(text: bytes) -> list[int] | list[list[int]] | None:
    """Parse a list of token IDs, or of such lists; None if it is malformed or anything else."""
    depth = text.count(b"[")
    if not text.startswith(b"[") or text.translate(None, _OF_IDS) or depth > MAX_PROMPTS + 1:
        return None
    try:
        if depth == 1:
            return await _read_list(text)
        lists = [await _read_list(bytes(each)) for each in _values.decode(text)]
    except ValueError:
        return None
    return lists if all(lists) else None


async def _read_list(text: bytes) -> list[int]:
    """Parse a list of token IDs in parts."""
    if not text.startswith(b"["):
        raise ValueError("not a list")
    found: list[int] = []
    start, end = 1, len(text) - 1
    while start < end:
        comma = text.find(b",", start + _PART_BYTES)
        stop = end if comma < 0 else comma
        found += _ids.decode(b"[%b]" % text[start:stop])
        start = stop + 1
        await asyncio.sleep(0)
    return found


async def fields_of(body: bytes) -> Set[str]:
    """Return the names of a body's fields.

    Raises:
        ApiError: it is not a JSON object, or has too many elements.
    """
    await _check_price(body)
    try:
        return _fields.decode(body).keys()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not a valid JSON object: {error}.", code="bad_json") from error


logger = logging.getLogger(__name__)


class ApiRoute(APIRoute):
    """A path operation that returns a Struct or a `Response`; its body is read subject to limits.

    The return annotation or `responses` documents its responses; its errors are those of the class
    plus any in `responses` (`server.api.openapi.errors`).

    FastAPI matches and documents all operations and serves those without a body. Operations with a
    body are handled here, because its size and cost have to be checked before it is parsed. They
    receive the body, the `Call`, `ServicesDep` and path parameters (as strings), as far as they
    declare them; other dependencies are not resolved, which would take about 0.1 ms.
    """

    needs_model = False
    errors: tuple[int, ...] = ()
    error_body: type[msgspec.Struct] = ErrorResponse

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        @functools.wraps(endpoint)
        async def answer(**given: Any) -> Response:
            return _response(await endpoint(**given))

        own = {"response_class": Response, "response_model": None}
        with _without_pydantic_v1():
            super().__init__(path, answer, **{**options, **own})
        answered = inspect.signature(endpoint).return_annotation
        if isinstance(answered, type) and issubclass(answered, msgspec.Struct):
            self.responses |= json_responses(answered)
        with_body = () if self.body_field is None else (413, 415, 500)
        statuses = {*self.errors, *with_body, *(int(each) for each in self.responses)} - {200}
        self.responses |= described(sorted(statuses), self.error_body)
        self._operation = endpoint
        if self.body_field is None:
            return
        dependant = self.dependant
        assert [each.call for each in dependant.dependencies] in ([], [services_of]), path
        assert not dependant.query_params + dependant.header_params, path
        assert all(each.field_info.annotation is str for each in dependant.path_params), path
        self._call_name = dependant.request_param_name
        self._services_names = [each.name for each in dependant.dependencies if each.name]
        self._body_name = self.body_field.name
        self._body_type: Any = self.body_field.field_info.annotation

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.body_field is None or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        services: Services = scope["app"].state.services
        call = Call(scope, receive, send, services.body_limits)
        try:
            await call.read()
            if not self.needs_model or not await _is_forwarded(call, services):
                body = await read_body(await self.body_type(call, services), call.content)
                given = {self._body_name: body, **call.path_params}
                if self._call_name is not None:
                    given[self._call_name] = call
                for name in self._services_names:
                    given[name] = services
                response = _response(await self._operation(**given))
                await response(call.scope, call.receive, call.send)
        except ClientDisconnected:
            name = call.request_id
            logger.debug("request %s: the client disconnected", name, extra={"request_id": name})
        except Exception as error:
            if call.status is not None:
                raise
            await client_error(error, call.request_id).send(call.path, call.send)
        finally:
            call.release()
        if call.status is not None:
            services.metrics.count("http_requests", self.path, call.status)

    async def body_type(self, call: Call, services: Services) -> type[RequestBody]:
        """Return the body type of a call."""
        found: type[RequestBody] = self._body_type
        return found


class ModelRoute(ApiRoute):
    """An operation that needs the model; requests for other servers' models are forwarded."""

    needs_model = True
    errors = (400, 401, 404, 500, 503)


class OperatorRoute(ApiRoute):
    """An operation behind the admin key."""

    errors = (400, 403, 500, 503)


@contextmanager
def _without_pydantic_v1() -> Iterator[None]:
    """Keep FastAPI from importing `pydantic.v1` (1.6 MB) to check that no body is of its kind."""
    if "pydantic.v1" in sys.modules:
        yield
        return
    sys.modules["pydantic.v1"] = None  # type: ignore[assignment]  # Python's mark: raise ImportError
    try:
        yield
    finally:
        del sys.modules["pydantic.v1"]


async def _is_forwarded(call: Call, services: Services) -> bool:
    """Wait for engines to register; return whether another server has answered the call."""
    if not services.client.reaches_engines:
        with call:
            await services.client.wait_for_engines()
    forwarder = services.forwarder
    model = None if forwarder is None else forwarder.remote_model(call, services.own_models)
    if forwarder is None or model is None:
        return False
    await forwarder.forward(call, model)
    return True


def _response(answer: msgspec.Struct | Response) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(msgspec.json.encode(answer), media_type="application/json")
