"""What requests for vectors and scores have in common, and their answers."""

from typing import Annotated

import msgspec
from pydantic import Field

from server.access.limits import INT64_MAX, INT64_MIN, MAX_PROMPTS, MAX_TOKENS
from server.api.shared.body import Name, RequestBody
from server.api.shared.fields import CacheSalt, TokenIds

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenLists = Annotated[
    list[Annotated[TokenIds, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
]
Input = str | Texts | Annotated[TokenIds, Field(min_length=1)] | TokenLists
"""One text, several, or the token ids of one or of several."""


class PoolingFields(RequestBody):
    """Fields that these requests share; null always means the default."""

    model: Name | None = Field(None, description="One of the served names; default: the first.")
    user: Name | None = None
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    request_id: Name | None = None
    cache_salt: CacheSalt | None = None
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Cut longer inputs to so many tokens; -1: to as many as the model takes. "
        "Default: they are refused.",
    )
    truncation_side: str | None = Field(
        None, pattern="^(left|right)$", description="Which side is cut off; default: right."
    )
    use_activation: bool | None = Field(
        None,
        description="False: embeddings as they are, not normalized; scores as the model has them, "
        "without sigmoid or softmax.",
    )


class PoolingUsage(msgspec.Struct):
    """Token counts of a request for which nothing is generated."""

    prompt_tokens: int
    total_tokens: int
