"""POST /pooling: request and response."""

from typing import Literal

import msgspec

from server.api.embeddings.schema import EmbeddingsRequest
from server.api.shared.pooling import PoolingUsage


class PoolingRequest(EmbeddingsRequest):
    """Texts, or token ids, to make vectors of: embeddings, or the scores of all classes."""

    task: Literal["embed", "classify"] | None = None


class PooledData(msgspec.Struct):
    """The vector of one input."""

    index: int
    data: list[float] | str
    """Numbers, or base64 of them."""
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct):
    """A vector of each input, in order."""

    id: str
    created: int
    model: str
    data: list[PooledData]
    usage: PoolingUsage
    object: Literal["list"] = "list"
