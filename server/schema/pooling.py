"""What requests for vectors and scores have in common, and their answers."""

from typing import Annotated, ClassVar

import msgspec
from pydantic import Field

from server.limits import INT64_MAX, INT64_MIN, MAX_PROMPTS, MAX_TOKENS
from server.schema.body import Name, RequestBody
from server.schema.fields import CacheSalt, TokenIds
from server.schema.support import LABELS, NO_MEDIA, PRIORITY, USER, Rows, refused

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
    user: Name | None = Field(None, json_schema_extra=USER)
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, json_schema_extra=PRIORITY)
    request_id: Name | None = None
    cache_salt: CacheSalt | None = None
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Truncate longer inputs to this number of tokens; -1: to the model's limit. "
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
"""Of bodies whose `input` is no conversation."""


class PoolingUsage(msgspec.Struct):
    """Token counts of a request for which nothing is generated."""

    prompt_tokens: int
    total_tokens: int
