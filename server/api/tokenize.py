"""POST /tokenize and /detokenize, and token counts of conversations."""

from collections.abc import Callable
from typing import Annotated, ClassVar

import msgspec
from fastapi import APIRouter
from pydantic import Field

from server.answer.tool_choice import ToolUse
from server.api.media import with_counted_images
from server.api.route import ModelRoute
from server.api.services import Services, ServicesDep
from server.errors import ApiError, invalid, invalid_field
from server.generate.conversation import rendered
from server.generate.request import Conversation
from server.generate.specification import conversation_text
from server.limits import MAX_COUNTED_TOKENS, MAX_MESSAGES, MAX_TEMPLATE, MAX_TOOLS
from server.schema.body import JsonObject, Name, RequestBody
from server.schema.fields import TokenIds
from server.schema.messages import ChatMessage
from server.schema.support import CHAT_TEMPLATE, NO_MEDIA, Rows, different
from server.schema.tools import Tool
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.tokenizer import check_vocabulary


class TokenizeRequest(RequestBody):
    """Tokenize a text or a conversation; exactly one of `prompt` and `messages` is set."""

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
    """Token IDs and, if requested, their vocabulary strings."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Decode token IDs to text."""

    id_fields: ClassVar[frozenset[str]] = frozenset({"tokens"})

    tokens: TokenIds
    model: Name | None = None
    skip_special_tokens: bool | None = Field(
        False, json_schema_extra=different("vLLM has no such field")
    )


class DetokenizeResponse(msgspec.Struct):
    """The decoded text."""

    prompt: str


router = APIRouter(route_class=ModelRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, services: ServicesDep) -> TokenizeResponse:
    """Return the token IDs of a prompt or a conversation."""
    services.requested_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages must be given", "prompt")
    if body.messages is None:
        text, add_special_tokens = body.prompt or "", body.add_special_tokens is not False
        if (placeholders := services.model.tokenizer.placeholders) is not None:
            text = placeholders.hide(text)
    else:
        source = Conversation(
            messages=body.messages,
            template=body.chat_template,
            template_arguments=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        )
        shown = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
        text = await rendered(source, ToolUse(shown=shown), services.model)
        add_special_tokens = bool(body.add_special_tokens)
    field = "prompt" if body.messages is None else "messages"
    token_ids = await tokenized(text, services, field, add_special_tokens=add_special_tokens)
    names = None
    if body.return_token_strs:
        names = [services.model.tokenizer.id_to_token(token_id) for token_id in token_ids]
    return TokenizeResponse(len(token_ids), services.known_max_model_len, token_ids, names)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, services: ServicesDep) -> DetokenizeResponse:
    """Return the text of token IDs."""
    services.requested_model(body.model)
    check_vocabulary(body.tokens, services.model.tokenizer.vocab_size, "tokens")
    text = await services.model.tokenizer.decode_async(
        body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
    )
    return DetokenizeResponse(text)


async def count_tokens_of(
    source: Conversation, services: Services, field: str, blame: Callable[[ApiError], ApiError]
) -> int:
    """Return the number of tokens of a conversation, which `field` of the request contains.

    Raises:
        ApiError: the conversation is invalid, or too long to count; rewritten by `blame`.
    """
    try:
        source = await with_counted_images(source, services)
        text = await conversation_text(source, services.model)
        return len(await tokenized(text, services, field, add_special_tokens=False))
    except ApiError as error:
        raise blame(error) from error


async def tokenized(
    text: str, services: Services, field: str, *, add_special_tokens: bool
) -> list[int]:
    """Return the token IDs of a text, which `field` of the request contains.

    Raises:
        ApiError: it is too long to count.
    """
    longest = max(MAX_COUNTED_TOKENS, services.known_max_model_len or 0)
    try:
        token_ids, _ = await encode_prompt(
            services.model.tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            longest=longest,
            keep=None,
        )
    except TextTooLong as error:
        raise invalid_field(
            field,
            f"texts of up to {longest} tokens are tokenized, this one has more: {error}.",
            code="context_length_exceeded",
        ) from error
    return token_ids
