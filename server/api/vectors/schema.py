"""POST /v1/embeddings, /pooling, /classify, /score and /rerank: requests and responses."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from engine.shared.pooling import Task, TokenTask
from server.limits import INT64_MAX, INT64_MIN, MAX_PROMPTS
from server.schema.body import Alternatives, Count, Name, RequestBody, Tokens
from server.schema.fields import CacheSalt, TokenIds
from server.schema.support import LABELS, NO_MEDIA, PRIORITY, USER, Rows, different, refused

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenLists = Annotated[
    list[Annotated[TokenIds, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
]
Input = str | Texts | Annotated[TokenIds, Field(min_length=1)] | TokenLists
"""One text or several, or the token IDs of one input or of several."""


class PoolingFields(RequestBody):
    """Fields that these requests share; null always selects the default."""

    model: Name | None = Field(None, description="One of the served names; default: the first.")
    user: Name | None = Field(None, json_schema_extra=USER)
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, json_schema_extra=PRIORITY)
    request_id: Name | None = None
    cache_salt: CacheSalt | None = None
    truncate_prompt_tokens: Alternatives | None = Field(
        None,
        description="Truncate longer inputs to this number of tokens; -1: to the model's limit. "
        "Default: longer inputs are refused.",
    )
    truncation_side: str | None = Field(
        None, pattern="^(left|right)$", description="The side to truncate; default: right."
    )
    use_activation: bool | None = Field(
        None,
        description="False: embeddings are not normalized, and scores have no sigmoid or softmax.",
    )

    undeclared: ClassVar[Rows] = {
        **LABELS,
        **NO_MEDIA,
        **refused("use use_activation", "normalize activation softmax"),
        **refused("inputs are not padded", "padding", "do_not_pad", example="max_length"),
    }


_NO_TURNS = "inputs are texts or token ids"
NO_TURNS: Rows = {
    **refused(_NO_TURNS, "messages chat_template"),
    **refused(_NO_TURNS, "chat_template_kwargs", {}),
    **refused(_NO_TURNS, "add_generation_prompt continue_final_message", False),
}
"""Fields of bodies whose `input` is not a conversation."""


class PoolingUsage(msgspec.Struct):
    """Token counts of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int


OneOrMore = str | Texts


class EmbeddingsRequest(PoolingFields):
    """Texts or token IDs to embed."""

    id_fields: ClassVar[frozenset[str]] = frozenset({"input"})

    input: Input
    encoding_format: Literal["float", "base64"] | None = Field(
        None,
        description="base64: little-endian float32 numbers.",
        json_schema_extra=different("float or base64, not bytes"),
    )
    dimensions: Tokens | None = Field(
        None,
        description="Number of dimensions to truncate embeddings to, for models trained for it.",
    )
    prompt_name: Name | None = Field(
        None,
        description="Name of the model's prompt to prepend to texts.",
        json_schema_extra=different("vLLM has no prompts; as in sentence-transformers"),
    )
    add_special_tokens: bool | None = True

    undeclared: ClassVar[Rows] = {
        **NO_TURNS,
        **refused("numbers are float32", "embed_dtype", "float32", "float", example="float16"),
        **refused("numbers are little-endian", "endianness", "native", "little", example="big"),
        **refused("there is one type of embedding for all inputs", "input_type task_type"),
    }


class Embedding(msgspec.Struct):
    """The embedding of one input."""

    index: int
    embedding: list[float] | str
    """A list of numbers, or their bytes as base64."""
    object: Literal["embedding"] = "embedding"


class EmbeddingsResponse(msgspec.Struct):
    """An embedding of each input, in order."""

    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class PoolingRequest(EmbeddingsRequest):
    """Texts or token IDs to pool, into embeddings or scores of all classes."""

    task: Task | TokenTask | None = Field(
        None,
        description="token_embed, token_classify: a vector of each token.",
        json_schema_extra=different(
            "no plugins; token tasks of decoders need tok_pooling_type ALL"
        ),
    )

    undeclared: ClassVar[Rows] = refused("there are no plugins that could read it", "data")


class PooledData(msgspec.Struct):
    """The vector of one input, or those of its tokens."""

    index: int
    data: list[float | list[float]] | str
    """Numbers, one list of numbers per token, or all of them as base64."""
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
    """Classification of one input."""

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
    """Pairs of texts: one with each of several, or two lists of equal length."""

    queries: OneOrMore | None = None
    documents: OneOrMore | None = None
    items: OneOrMore | None = Field(None, description="Alias of documents.")
    text_1: OneOrMore | None = Field(None, description="Alias of queries.")
    text_2: OneOrMore | None = Field(None, description="Alias of documents.")
    data_1: OneOrMore | None = Field(None, description="Alias of queries.")
    data_2: OneOrMore | None = Field(None, description="Alias of documents.")

    undeclared: ClassVar[Rows] = refused("models that write do not score", "label_token_ids")


class Score(msgspec.Struct):
    """Score of one pair."""

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
    """A query, and documents to sort by relevance to it."""

    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    ]
    top_n: Count | None = Field(None, description="Number of results to return; default: all.")
    return_documents: bool | None = Field(
        None, description="Whether results include their documents; default: not at /v2/rerank."
    )
    max_tokens_per_doc: Tokens | None = Field(
        None,
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
    """One ranked document."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class BilledUnits(msgspec.Struct):
    """Present for compatibility with Cohere's clients."""

    search_units: int = 1


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API that the response conforms to."""

    version: str = "2"


class RerankMeta(msgspec.Struct):
    """Present for compatibility with Cohere's clients."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct):
    """Documents, most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
    meta: RerankMeta | UnsetType = UNSET
