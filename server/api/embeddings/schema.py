"""POST /v1/embeddings: request and response."""

from typing import ClassVar, Literal

import msgspec
from pydantic import Field

from server.limits import MAX_TOKENS
from server.schema.body import Name
from server.schema.pooling import NO_TURNS, Input, PoolingFields, PoolingUsage
from server.schema.support import Rows, different, refused


class EmbeddingsRequest(PoolingFields):
    """Texts, or token ids, to make embeddings of."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = Field(
        None,
        description="base64: float32 numbers, the lowest byte first.",
        json_schema_extra=different("float or base64, not bytes"),
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Number of dimensions to truncate embeddings to, for models trained for it.",
    )
    prompt_name: Name | None = Field(
        None,
        description="Which of the model's prompts stands before texts.",
        json_schema_extra=different("vLLM has no prompts; as in sentence-transformers"),
    )
    add_special_tokens: bool | None = True

    undeclared: ClassVar[Rows] = {
        **NO_TURNS,
        **refused("numbers are float32", "embed_dtype", "float32", "float", example="float16"),
        **refused("the lowest byte comes first", "endianness", "native", "little", example="big"),
        **refused("there is one type of embedding for all inputs", "input_type task_type"),
    }


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
