"""POST /v1/embeddings: request and response."""

from typing import Literal

import msgspec
from pydantic import Field

from server.access.limits import MAX_TOKENS
from server.api.shared.body import Name
from server.api.shared.pooling import Input, PoolingFields, PoolingUsage


class EmbeddingsRequest(PoolingFields):
    """Texts, or token ids, to make embeddings of."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: float32 numbers, the lowest byte first."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Cut embeddings to so many numbers, of models that were trained for it.",
    )
    prompt_name: Name | None = Field(
        None, description="Which of the model's prompts stands before texts."
    )
    add_special_tokens: bool | None = True


class Embedding(msgspec.Struct):
    """The embedding of one input."""

    index: int
    embedding: list[float] | str
    """Numbers, or base64 of them."""
    object: Literal["embedding"] = "embedding"


class EmbeddingsResponse(msgspec.Struct):
    """An embedding of each input, in order."""

    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"
