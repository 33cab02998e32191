"""Stored responses: loading what a response continues, and storing it for later ones."""

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from pydantic import TypeAdapter

from server.api.responses import schema
from server.api.responses.items import Response
from server.api.responses.render import ResponseRenderer, renderer
from server.api.services import Services
from server.errors import ApiError, invalid, invalid_field, rate_limited, unavailable
from server.generate.request import GenerationRequest
from server.http.call import Call
from server.limits import MAX_STORED_ITEMS, MAX_STORED_LENGTH
from server.schema.answer import Usage
from server.store.records import Part, Record, StoreFull, TooLong
from server.store.service import StoreUnavailable
from server.store.sql import SqlBackend
from server.text.detokenizer import TokenTable

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")

NOT_STORED = (StoreFull, StoreUnavailable, TooLong)
_STORE_DISABLED = "nothing is stored between requests: the server runs with --response-store none"
_TOO_LARGE = invalid("It is too large to be stored.", code="too_large")
TOO_MANY_IN_BACKGROUND = rate_limited(
    "Too many background responses are being generated or followed; try again later."
)

ITEMS = TypeAdapter(list[schema.InputItem])
_OUTPUT_ITEM = re.compile(r"(?:msg|rs|fc|ctc|lsh|tsc)_([0-9a-f]{32})_\d+")

ID_PREFIXES = {"response": "resp_", "conversation": "conv_"}
"""ID prefixes of records: both kinds are in one table."""
_ITEM_PREFIXES = {
    "message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs",
    "local_shell_call": "lsh", "tool_search_call": "tsc",
}  # fmt: skip


async def store_call(call: Awaitable[Result], too_long: ApiError = _TOO_LARGE) -> Result:
    """Await a call of the store.

    Raises:
        ApiError: the store is unavailable; `too_long` if the result exceeds its limits.
    """
    try:
        return await call
    except StoreUnavailable as error:
        raise unavailable("The response store is not available now; try again.") from error
    except (StoreFull, TooLong) as error:
        raise too_long from error


class StoredOutput(msgspec.Struct):
    """The part of a stored response that later requests need."""

    output: list[dict[str, Any]] = []


class RequestStorage:
    """Storage for one request that may continue stored responses and have its response stored."""

    def __init__(self, call: Call, services: Services, request: schema.ResponsesRequest) -> None:
        """`request` is the original request."""
        self._store = services.store
        self._owner = str(call.tenant.id)
        self._metrics = services.metrics
        self._request = request
        self._stores = services.store is not None and request.store is not False
        self.name = uuid.uuid4().hex
        self.ended = False
        """Whether the final response has been stored."""
        self._renderer: ResponseRenderer | None = None
        self._new_items: list[dict[str, Any]] = []
        """The request's items, with references resolved."""
        conversation = request.conversation
        self._conversation = (
            conversation.id if isinstance(conversation, schema.ConversationName) else conversation
        )

    async def _call(
        self,
        query: Callable[Concatenate[SqlBackend, str, P], Result],
        *args: P.args,
        **options: P.kwargs,
    ) -> Result:
        assert self._store is not None, "nothing else is asked without it"
        return await self._store.call(query, self._owner, *args, **options)

    async def full_request(self) -> tuple[schema.ResponsesRequest, int]:
        """Return the request with all items that it continues, and the number of those.

        Raises:
            ApiError: a referenced object is not stored, or the total is too long.
        """
        request, new = self._request, request_items(self._request)
        if self._store is None:
            _refuse_stored(request, new)
            return request, 0
        if request.previous_response_id is not None and self._conversation is not None:
            raise invalid_field("conversation", "cannot be combined with previous_response_id")
        if request.background and not self._stores:
            raise invalid("background can only be used when `store` is true", "background")
        earlier = await self._earlier()
        if any(isinstance(item, schema.ItemReference) for item in new):
            new = await self._resolved(new)
        self._new_items = [item_of(item) for item in new]
        return request.model_copy(update={"input": [*earlier, *new]}), len(earlier)

    def renderer(
        self, body: schema.ResponsesRequest, request: GenerationRequest, table: TokenTable
    ) -> ResponseRenderer:
        """Return the renderer; a stored response gets an unguessable ID."""
        name = self.name if self._stores else None
        self._renderer = renderer(body, request, table, name)
        return self._renderer

    async def store_final(self, usage: Usage) -> None:
        """Store the completed response.

        Raises:
            ApiError: it cannot be stored, and the client requested storing.
        """
        assert self._renderer is not None, "it has shown the answer"
        if self._conversation is None and not self._stores:
            return
        response = self._renderer.complete(usage)
        try:
            await self.put(response)
        except NOT_STORED as error:
            if self._request.store or self._conversation is not None or self._request.background:
                raise unavailable("The response could not be stored; try again later.") from error
            logger.warning("response %s is not stored: %s", response.id, error)
            response.store = False
        self.ended = True

    async def put(self, response: Response, *, is_new: bool = False) -> None:
        """Store a response in its current state; `is_new`: for the first time, before generation.

        Raises:
            StoreFull, StoreUnavailable, TooLong: it was not stored; the failure is counted.
        """
        try:
            await self._put(response, is_new=is_new)
        except NOT_STORED:
            self._metrics.count("responses_not_kept")
            raise

    async def _put(self, response: Response, *, is_new: bool) -> None:
        items = []
        if self._conversation is not None and response.status in ("completed", "incomplete"):
            added = [*self._new_items, *msgspec.to_builtins(response.output)]
            items = [part_of(item) for item in added]
        if self._stores:
            record = Record(
                id=response.id,
                tenant=self._owner,
                created=response.created_at,
                status=response.status,
                previous=self._request.previous_response_id,
                conversation=self._conversation,
                input=msgspec.json.encode(self._new_items),
                body=msgspec.json.encode(response),
            )
            known = self._request.background is True and not is_new
            await self._call(SqlBackend.put, record, items, only_known=known)
        elif self._conversation is not None and items:
            await self._call(SqlBackend.add, self._conversation, items)

    async def _earlier(self) -> list[Any]:
        """Return the items that precede those of the request."""
        previous = self._request.previous_response_id
        if previous is not None:
            texts = await self._chain(previous)
        elif self._conversation is not None:
            found = None
            if self._conversation.startswith(ID_PREFIXES["conversation"]):
                found = await store_call(self._call(SqlBackend.items, self._conversation))
            if found is None:
                raise _not_found(self._conversation, "conversation")
            texts = [msgspec.json.decode(item.body) for item in found]
        else:
            return []
        items: list[Any] = ITEMS.validate_python(texts)
        return items

    async def _chain(self, previous: str) -> list[Any]:
        """Return the items of a response and of its predecessors."""
        field = "previous_response_id"
        too_long = invalid_field(
            field, f"the earlier responses have more than {MAX_STORED_LENGTH} bytes"
        )
        if not previous.startswith(ID_PREFIXES["response"]):
            raise _not_found(previous, field)
        chain = await store_call(self._call(SqlBackend.chain, previous), too_long)
        if chain is None:
            raise _not_found(previous, field)
        items: list[Any] = []
        for record in chain:
            items += [*msgspec.json.decode(record.input), *_output(record)]
            if len(items) > MAX_STORED_ITEMS:  # before they are processed at a cost
                raise invalid_field(
                    field, f"the earlier responses have more than {MAX_STORED_ITEMS} items"
                )
        return items

    async def _resolved(self, items: Sequence[Any]) -> list[Any]:
        outputs: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        resolved: list[Any] = []
        size = 0
        for index, item in enumerate(items):
            if not isinstance(item, schema.ItemReference):
                resolved.append(item)
                continue
            field = f"input[{index}].id"
            named = _OUTPUT_ITEM.fullmatch(item.id)
            if named is None:
                raise _not_found(item.id, field)
            if item.id not in outputs:
                record = await store_call(self._call(SqlBackend.get, f"resp_{named[1]}"))
                if record is None:
                    raise _not_found(item.id, field)
                size += record.size
                for each in _output(record):
                    [outputs[each["id"]]] = ITEMS.validate_python([each])
                    sizes[each["id"]] = len(msgspec.json.encode(each))
            found = outputs.get(item.id)
            if found is None:
                raise _not_found(item.id, field)
            # Counted per reference: the prompt repeats the item.
            size += sizes[item.id]
            if size > MAX_STORED_LENGTH:
                raise invalid_field("input", f"it refers to more than {MAX_STORED_LENGTH} bytes")
            resolved.append(found)
        return resolved


def _refuse_stored(request: schema.ResponsesRequest, own: Sequence[Any]) -> None:
    for name in ("previous_response_id", "conversation", "store", "background"):
        if getattr(request, name):
            raise invalid_field(name, _STORE_DISABLED)
    for index, item in enumerate(own):
        if isinstance(item, schema.ItemReference):
            raise invalid_field(f"input[{index}]", _STORE_DISABLED)


def request_items(request: schema.ResponsesRequest) -> list[Any]:
    """Return the input as items; a text becomes a user message."""
    if isinstance(request.input, str):
        return [schema.MessageItem(role="user", content=request.input)]
    return list(request.input)


def part_of(item: dict[str, Any]) -> Part:
    """Return an item in its stored form."""
    return Part(id=item["id"], body=msgspec.json.encode(item))


def item_of(item: Any) -> dict[str, Any]:
    """Return an item as shown to clients, with a new ID if it has none."""
    shown: dict[str, Any] = item.model_dump(exclude_unset=True, by_alias=True)
    kind = shown.setdefault("type", "message")
    if isinstance(shown.get("content"), str):
        text = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": text, "text": shown["content"]}]
    prefix = _ITEM_PREFIXES.get(kind, "item")
    shown.setdefault("id", f"{prefix}_{uuid.uuid4().hex}")
    return shown


def _output(record: Record) -> list[dict[str, Any]]:
    return msgspec.json.decode(record.body, type=StoredOutput).output


def _not_found(name: str, field: str) -> ApiError:
    return ApiError(
        404, f"{field}: {name!r} was not found; it may have expired.", param=field, code="not_found"
    )


def now() -> int:
    """Return the current Unix time in whole seconds."""
    return int(time.time())
