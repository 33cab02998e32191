"""The tokens of texts, and how many a conversation has as the model reads it."""

from server.api.media import with_counted_images
from server.api.services import Services
from server.errors import invalid
from server.generate.request import Conversation
from server.generate.specification import conversation_text
from server.limits import MAX_COUNTED_TOKENS
from server.router.generation_client import NoEngineAvailable
from server.text.prompt_text import TextTooLong, encode_prompt


def known_max_model_len(services: Services) -> int | None:
    """Return the longest sequence that the engines take, None before the first has joined."""
    try:
        return services.client.max_model_len
    except NoEngineAvailable:
        return None


async def count_tokens_of(source: Conversation, services: Services, field: str) -> int:
    """Return the number of tokens of a conversation, which the field of the request has.

    Raises:
        ApiError: the conversation is wrong, or too long to be counted.
    """
    source = await with_counted_images(source, services)
    text = await conversation_text(source, services.model)
    return len(await tokenized(text, services, field, add_special_tokens=False))


async def tokenized(
    text: str, services: Services, field: str, *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a text, which the field of the request has.

    Raises:
        ApiError: it is too long to be counted.
    """
    longest = max(MAX_COUNTED_TOKENS, known_max_model_len(services) or 0)
    try:
        token_ids, _ = await encode_prompt(
            services.model.tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            longest=longest,
            keep=None,
        )
    except TextTooLong as error:
        raise invalid(
            f"{field}: texts of up to {longest} tokens are tokenized, but of this one {error}.",
            field,
            code="context_length_exceeded",
        ) from error
    return token_ids
