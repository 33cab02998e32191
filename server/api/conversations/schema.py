"""/v1/conversations: the requests."""

from typing import Annotated

from pydantic import Field

from server.access.limits import MAX_NAME_LENGTH
from server.api.responses.schema import InputItem
from server.api.shared.body import RequestBody

MAX_ADDED = 20
"""Items that one request adds to a conversation."""
MAX_METADATA = 16
"""Keys of a conversation's metadata."""

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=MAX_NAME_LENGTH // 2)]
    ],
    Field(max_length=MAX_METADATA),
]


class ConversationRequest(RequestBody):
    """Begin a conversation."""

    items: Annotated[list[InputItem], Field(max_length=MAX_ADDED)] | None = None
    metadata: Metadata | None = None


class MetadataRequest(RequestBody):
    """Change what a conversation is labelled with."""

    metadata: Metadata


class ItemsRequest(RequestBody):
    """Add items to a conversation."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ADDED)]
