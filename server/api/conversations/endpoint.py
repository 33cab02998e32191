"""POST /v1/conversations, and what is below: lists of items that responses go on with."""

import uuid
from collections.abc import Sequence

import msgspec
from fastapi import Request
from fastapi import Response as HttpResponse

from server.api.body import read_body
from server.api.context import Context
from server.api.conversations.schema import ConversationRequest, ItemsRequest, MetadataRequest
from server.api.responses.items import Conversation, Deleted, ItemList
from server.api.responses.keeping import kept_item, now
from server.api.responses.kept import not_found, owner_of, page
from server.api.responses.schema import InputItem, ItemReference
from server.api.responses.store_errors import kept
from server.http.call import Call
from server.http.errors import invalid
from server.store.records import StoredConversation, StoredItem
from server.store.service import ResponseStore


def _store(context: Context) -> ResponseStore:
    store = context.store
    assert store is not None, "else there are no such routes"
    return store


async def create_conversation(call: Call, context: Context) -> None:
    """Begin a conversation."""
    request = read_body(ConversationRequest, call.body)
    items = _kept_items(request.items or [])
    record = StoredConversation(
        id=f"conv_{uuid.uuid4().hex}",
        tenant=str(call.tenant.id),
        created=now(),
        metadata=msgspec.json.encode(request.metadata or {}),
    )
    store = _store(context)
    await kept(store.put_conversation(record))
    if items:
        await kept(store.add_items(record.tenant, record.id, items))
    await call.send_struct(_shown(record))


async def update_conversation(call: Call, context: Context) -> None:
    """Change what a conversation is labelled with."""
    request = read_body(MetadataRequest, call.body)
    store, owner, id_ = _store(context), str(call.tenant.id), call.path.split("/")[3]
    record = await kept(store.conversation(owner, id_))
    if record is None:
        raise not_found("conversation", id_)
    record = msgspec.structs.replace(record, metadata=msgspec.json.encode(request.metadata))
    await kept(store.put_conversation(record))
    await call.send_struct(_shown(record))


async def add_items(call: Call, context: Context) -> None:
    """Add items to a conversation."""
    items = _kept_items(read_body(ItemsRequest, call.body).items)
    owner, id_ = str(call.tenant.id), call.path.split("/")[3]
    if not await kept(_store(context).add_items(owner, id_, items)):
        raise not_found("conversation", id_)
    data = [msgspec.Raw(item.item) for item in items]
    await call.send_struct(ItemList(data, items[0].id, items[-1].id, has_more=False))


class ConversationRoutes:
    """Endpoints for conversations that take no bodies."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, conversation_id: str, request: Request) -> HttpResponse:
        """Show a conversation, without its items."""
        record = await kept(self._store.conversation(owner_of(request), conversation_id))
        if record is None:
            raise not_found("conversation", conversation_id)
        return _json(_shown(record))

    async def delete(self, conversation_id: str, request: Request) -> HttpResponse:
        """Forget a conversation with its items."""
        if not await kept(self._store.delete_conversation(owner_of(request), conversation_id)):
            raise not_found("conversation", conversation_id)
        return _json(Deleted(conversation_id, "conversation.deleted"))

    async def list_items(self, conversation_id: str, request: Request) -> HttpResponse:
        """List the items of a conversation."""
        items = await self._items(conversation_id, request)
        return _json(page(request, [msgspec.Raw(item.item) for item in items]))

    async def retrieve_item(
        self, conversation_id: str, item_id: str, request: Request
    ) -> HttpResponse:
        """Show an item of a conversation."""
        for item in await self._items(conversation_id, request):
            if item.id == item_id:
                return HttpResponse(item.item, media_type="application/json")
        raise not_found("item", item_id)

    async def delete_item(
        self, conversation_id: str, item_id: str, request: Request
    ) -> HttpResponse:
        """Forget an item of a conversation."""
        owner = owner_of(request)
        if not await kept(self._store.delete_item(owner, conversation_id, item_id)):
            raise not_found("item", item_id)
        return await self.retrieve(conversation_id, request)

    async def _items(self, id_: str, request: Request) -> list[StoredItem]:
        items = await kept(self._store.items(owner_of(request), id_))
        if items is None:
            raise not_found("conversation", id_)
        return items


def _kept_items(items: Sequence[InputItem]) -> list[StoredItem]:
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            field = f"items[{index}]"
            raise invalid(f"{field}: a reference is no item of a conversation", field)
    return [kept_item(item) for item in items]


def _shown(record: StoredConversation) -> Conversation:
    metadata = msgspec.json.decode(record.metadata, type=dict[str, str])
    return Conversation(record.id, int(record.created), metadata)


def _json(payload: msgspec.Struct) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(payload), media_type="application/json")
