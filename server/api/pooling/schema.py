"""POST /pooling: request and response."""

from typing import ClassVar, Literal

import msgspec
from pydantic import Field

from engine.shared.pooling import Task, TokenTask
from server.api.embeddings.schema import EmbeddingsRequest
from server.schema.pooling import PoolingUsage
from server.schema.support import Rows, different, refused


class PoolingRequest(EmbeddingsRequest):
    """Texts, or token ids, to make vectors of: embeddings, or the scores of all classes."""

    task: Task | TokenTask | None = Field(
        None,
        description="token_embed, token_classify: a vector of each token.",
        json_schema_extra=different("no plugin; of each token: not of decoders as they are"),
    )

    undeclared: ClassVar[Rows] = refused("there are no plugins that could read it", "data")


class PooledData(msgspec.Struct):
    """The vector of one input, or those of its tokens."""

    index: int
    data: list[float | list[float]] | str
    """Numbers, a list of them for each token, or base64 of all."""
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct):
    """A vector of each input, in order."""

    id: str
    created: int
    model: str
    data: list[PooledData]
    usage: PoolingUsage
    object: Literal["list"] = "list"
