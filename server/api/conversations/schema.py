"""/v1/conversations: the requests."""

from typing import Annotated

from pydantic import Field

from server.api.responses.schema import InputItem
from server.limits import (
    MAX_ADDED_ITEMS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
)
from server.schema.body import RequestBody

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),
]


class ConversationRequest(RequestBody):
    """Begin a conversation."""

    items: Annotated[list[InputItem], Field(max_length=MAX_ADDED_ITEMS)] | None = None
    metadata: Metadata | None = None


class MetadataRequest(RequestBody):
    """Change the metadata of a conversation."""

    metadata: Metadata


class ItemsRequest(RequestBody):
    """Add items to a conversation."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ADDED_ITEMS)]
