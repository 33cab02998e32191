"""POST /tokenize and /detokenize."""

from typing import Annotated, ClassVar

import msgspec
from pydantic import Field

from server.limits import MAX_MESSAGES, MAX_TEMPLATE, MAX_TOOLS
from server.schema.body import JsonObject, Name, RequestBody
from server.schema.fields import TokenIds
from server.schema.messages import ChatMessage
from server.schema.support import CHAT_TEMPLATE, NO_MEDIA, Rows, different
from server.schema.tools import Tool


class TokenizeRequest(RequestBody):
    """Token ids of a text or of a conversation; exactly one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] | None = Field(
        None,
        description="Instead of the model's, where the operator allows it.",
        json_schema_extra=CHAT_TEMPLATE,
    )
    chat_template_kwargs: JsonObject | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = False

    undeclared: ClassVar[Rows] = NO_MEDIA


class TokenizeResponse(msgspec.Struct):
    """Token ids and, if asked for, the vocabulary's strings for them."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Text of token ids."""

    id_fields: ClassVar[frozenset[str]] = frozenset({"tokens"})

    tokens: TokenIds
    model: Name | None = None
    skip_special_tokens: bool | None = Field(
        False, json_schema_extra=different("vLLM has no such field")
    )


class DetokenizeResponse(msgspec.Struct):
    """The decoded text."""

    prompt: str
