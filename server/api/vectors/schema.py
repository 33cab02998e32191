"""POST /v1/embeddings, /pooling, /classify, /score and /rerank: requests and responses."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from engine.shared.pooling import Task, TokenTask
from server.limits import MAX_PROMPTS, MAX_TOKENS
from server.schema.body import Name, RequestBody
from server.schema.pooling import NO_TURNS, Input, PoolingFields, PoolingUsage, Texts
from server.schema.support import Rows, different, refused

OneOrMore = str | Texts


class EmbeddingsRequest(PoolingFields):
    """Texts, or token ids, to make embeddings of."""

    id_fields: ClassVar[frozenset[str]] = frozenset({"input"})

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


class ClassifyRequest(PoolingFields):
    """Texts, or token ids, to classify."""

    id_fields: ClassVar[frozenset[str]] = frozenset({"input"})

    input: Input
    add_special_tokens: bool | None = True

    undeclared: ClassVar[Rows] = NO_TURNS


class Classified(msgspec.Struct):
    """What class an input is of."""

    index: int
    label: str
    """The class with the highest score."""
    probs: list[float]
    """The score of each class."""
    num_classes: int


class ClassifyResponse(msgspec.Struct):
    """The class of each input, in order."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ScoreRequest(PoolingFields):
    """Pairs of texts: one with each of several, or as many with as many."""

    queries: OneOrMore | None = None
    documents: OneOrMore | None = None
    items: OneOrMore | None = Field(None, description="Another name of documents.")
    text_1: OneOrMore | None = Field(None, description="Another name of queries.")
    text_2: OneOrMore | None = Field(None, description="Another name of documents.")
    data_1: OneOrMore | None = Field(None, description="Another name of queries.")
    data_2: OneOrMore | None = Field(None, description="Another name of documents.")

    undeclared: ClassVar[Rows] = refused("models that write do not score", "label_token_ids")


class Score(msgspec.Struct):
    """How well the texts of a pair fit."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(msgspec.Struct):
    """The score of each pair, in order."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Document(RequestBody):
    """A document as an object."""

    text: str


class RerankRequest(PoolingFields):
    """A query, and documents to put in the order in which they fit it."""

    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    ]
    top_n: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="How many to return; default: all."
    )
    return_documents: bool | None = Field(
        None, description="Whether results repeat their documents; default: not at /v2/rerank."
    )
    max_tokens_per_doc: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Truncate documents to this number of tokens.",
        json_schema_extra=different("of texts; 4096 at /v2/rerank if it is not given"),
    )

    undeclared: ClassVar[Rows] = {
        **refused("documents have one text", "rank_fields"),
        **refused("use max_tokens_per_doc", "max_chunks_per_doc"),
    }


class DocumentText(msgspec.Struct):
    """A document."""

    text: str


class RerankResult(msgspec.Struct):
    """One document's place."""

    index: int
    """Where it was in the request."""
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class BilledUnits(msgspec.Struct):
    """What Cohere's clients look for."""

    search_units: int = 1


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API that the answer has the form of."""

    version: str = "2"


class RerankMeta(msgspec.Struct):
    """What Cohere's clients look for."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct):
    """Documents, the best one first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
    meta: RerankMeta | UnsetType = UNSET
