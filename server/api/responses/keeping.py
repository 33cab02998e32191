"""What a response goes on with, and what is kept of it for those that go on with it."""

import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.access.limits import MAX_KEPT_ITEMS, MAX_KEPT_LENGTH
from server.api.responses.items import Response
from server.api.responses.journal import Journal, told
from server.api.responses.render import ResponseBody, ResponseEvents, renderer
from server.api.responses.schema import (
    ConversationName,
    InputItem,
    ItemReference,
    MessageItem,
    ResponsesRequest,
)
from server.api.responses.store_errors import kept
from server.api.shared.answer import Usage
from server.api.shared.rendering import Answering
from server.http.errors import ApiError, invalid, unavailable
from server.store.records import StoredItem, StoredResponse, StoreFull, TooLong
from server.store.service import ResponseStore, StoreUnavailable

logger = logging.getLogger(__name__)

ITEMS = TypeAdapter(list[InputItem])
_OUTPUT_ITEM = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{32})_\d+")

_ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs",
}  # fmt: skip


class KeptOutput(msgspec.Struct):
    """What later requests need of a kept response."""

    output: list[dict[str, Any]] = []


class Keeping:
    """One request that goes on with what was kept, and whose response may be kept.

    Args:
        store: where responses are kept.
        owner: whose they are.
        request: as it was sent.
    """

    def __init__(self, store: ResponseStore, owner: str, request: ResponsesRequest) -> None:
        self._store = store
        self.owner = owner
        self.jobs = store.jobs
        self._sent = request
        self.keeps = request.store is not False
        self.name = uuid.uuid4().hex
        self.ended = False
        """Whether the response has been kept as it is at its end."""
        self._renderer: ResponseBody | ResponseEvents | None = None
        self._own: list[dict[str, Any]] = []
        """The items that the request added, references replaced by what they refer to."""
        conversation = request.conversation
        self._conversation = (
            conversation.id if isinstance(conversation, ConversationName) else conversation
        )

    async def whole_request(self) -> tuple[ResponsesRequest, int]:
        """Return the request with all that it goes on with, and how many items that is.

        Raises:
            ApiError: something that it names is not kept, or all of it is too long.
        """
        sent = self._sent
        if sent.previous_response_id is not None and self._conversation is not None:
            raise invalid("conversation: not together with previous_response_id", "conversation")
        if sent.background and not self.keeps:
            raise invalid("background: needs a response that is kept (store)", "background")
        earlier = await self._earlier()
        own = own_items(sent)
        if any(isinstance(item, ItemReference) for item in own):
            own = await self._resolved(own)
        self._own = [_item(item) for item in own]
        return sent.model_copy(update={"input": [*earlier, *own]}), len(earlier)

    def renderer(
        self, request: ResponsesRequest, answering: Answering
    ) -> ResponseBody | ResponseEvents:
        """Return what shows the answer, which is kept under a name that nobody can guess."""
        name = self.name if self.keeps else None
        self._renderer = renderer(request, answering, name)
        return self._renderer

    async def keep(self, usage: Usage) -> None:
        """Keep the response, of which no more will come.

        Raises:
            ApiError: it cannot be kept, and the client asked for it.
        """
        assert self._renderer is not None, "it has shown the answer"
        if self._conversation is None and not self.keeps:
            return
        response = self._renderer.complete(usage)
        try:
            await self.put(response)
        except (StoreFull, StoreUnavailable, TooLong) as error:
            if self._sent.store or self._conversation is not None or self._sent.background:
                raise unavailable("The response cannot be kept now; try again.") from error
            logger.warning("response %s is not kept: %s", response.id, error)
            response.store = False
        self.ended = True

    async def put(self, response: Response, lease: float | None = None) -> None:
        """Write down a response as it is now."""
        items = []
        if self._conversation is not None and response.status in ("completed", "incomplete"):
            items = _stored(self._own, response)
        if self.keeps:
            record = StoredResponse(
                id=response.id,
                tenant=self.owner,
                created=response.created_at,
                status=response.status,
                previous=self._sent.previous_response_id,
                conversation=self._conversation,
                input=msgspec.json.encode(self._own),
                response=msgspec.json.encode(response),
                lease=lease,
            )
            begun_before = self._sent.background is True and lease is None
            await self._store.put(record, items, only_known=begun_before)
        elif self._conversation is not None and items:
            await self._store.add_items(self.owner, self._conversation, items)

    def journal(self, id_: str) -> Journal:
        """Return what keeps the events of the response."""
        return Journal(self._store, self.owner, id_)

    def told(self, id_: str) -> AsyncIterator[bytes]:
        """Yield the frames of the response's events as they come."""
        return told(self._store, self.owner, id_)

    async def _earlier(self) -> list[Any]:
        """Return the items that come before those of the request."""
        previous = self._sent.previous_response_id
        if previous is not None:
            texts = await self._chain(previous)
        elif self._conversation is not None:
            found = await kept(self._store.items(self.owner, self._conversation))
            if found is None:
                raise _gone(self._conversation, "conversation")
            texts = [msgspec.json.decode(item.item) for item in found]
        else:
            return []
        items: list[Any] = ITEMS.validate_python(texts)
        return items

    async def _chain(self, previous: str) -> list[Any]:
        """Return the items of a response and of all that it goes on with."""
        field = "previous_response_id"
        too_long = invalid(
            f"{field}: what it goes on with has more than {MAX_KEPT_LENGTH} bytes", field
        )
        chain = await kept(self._store.chain(self.owner, previous), too_long)
        if chain is None:
            raise _gone(previous, field)
        items: list[Any] = []
        for record in chain:
            items += _items_of(record)
            if len(items) > MAX_KEPT_ITEMS:  # before anything dear is made of them
                raise invalid(
                    f"{field}: what it goes on with has more than {MAX_KEPT_ITEMS} items", field
                )
        return items

    async def _resolved(self, items: Sequence[Any]) -> list[Any]:
        """Return items with what references refer to in their place."""
        outputs: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        resolved: list[Any] = []
        size = 0
        for index, item in enumerate(items):
            if not isinstance(item, ItemReference):
                resolved.append(item)
                continue
            field = f"input[{index}].id"
            named = _OUTPUT_ITEM.fullmatch(item.id)
            if named is None:
                raise _gone(item.id, field)
            if item.id not in outputs:
                record = await kept(self._store.get(self.owner, f"resp_{named[1]}"))
                if record is None:
                    raise _gone(item.id, field)
                size += record.size
                for each in _output(record):
                    [outputs[each["id"]]] = ITEMS.validate_python([each])
                    sizes[each["id"]] = len(msgspec.json.encode(each))
            found = outputs.get(item.id)
            if found is None:
                raise _gone(item.id, field)
            # Each time it is referred to: the prompt has it as often.
            size += sizes[item.id]
            if size > MAX_KEPT_LENGTH:
                raise invalid(f"input: it refers to more than {MAX_KEPT_LENGTH} bytes", "input")
            resolved.append(found)
        return resolved


def own_items(request: ResponsesRequest) -> list[Any]:
    """Return the input as items, whether it was sent as them or as a text."""
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)]
    return list(request.input)


def kept_item(item: Any) -> StoredItem:
    """Return an item as it is kept, with an id if it has none."""
    shown = _item(item)
    return StoredItem(id=shown["id"], item=msgspec.json.encode(shown))


def _item(item: Any) -> dict[str, Any]:
    shown: dict[str, Any] = item.model_dump(exclude_unset=True, by_alias=True)
    kind = shown.setdefault("type", "message")
    if isinstance(shown.get("content"), str):
        text = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": text, "text": shown["content"]}]
    prefix = _ID_PREFIXES.get(kind, "item")
    shown.setdefault("id", f"{prefix}_{uuid.uuid4().hex}")
    return shown


def _stored(own: Sequence[dict[str, Any]], response: Response) -> list[StoredItem]:
    output = [msgspec.to_builtins(item) for item in response.output]
    return [StoredItem(id=item["id"], item=msgspec.json.encode(item)) for item in (*own, *output)]


def _items_of(record: StoredResponse) -> list[Any]:
    given: list[Any] = msgspec.json.decode(record.input)
    return given + _output(record)


def _output(record: StoredResponse) -> list[dict[str, Any]]:
    return msgspec.json.decode(record.response, type=KeptOutput).output


def _gone(name: str, field: str) -> ApiError:
    return ApiError(
        404, f"{field}: {name!r} is not kept, or is no more.", param=field, code="not_found"
    )


def now() -> int:
    """Return the Unix time."""
    return int(time.time())
