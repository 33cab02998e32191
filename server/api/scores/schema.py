"""POST /score and POST /rerank: requests and responses."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from server.limits import MAX_PROMPTS, MAX_TOKENS
from server.schema.body import RequestBody
from server.schema.pooling import PoolingFields, PoolingUsage, Texts
from server.schema.support import Rows, different, refused

OneOrMore = str | Texts


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
