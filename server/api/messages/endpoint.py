"""POST /v1/messages and /v1/messages/count_tokens."""

from server.access.limits import MAX_COUNTED_TOKENS
from server.api.body import read_body
from server.api.context import Context
from server.api.generation import generate
from server.api.messages.content import TokenCount
from server.api.messages.parse import parse, parse_count
from server.api.messages.render import renderer
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.tokenize.endpoint import known_max_model_len
from server.generate.specification import conversation_text
from server.http.call import Call
from server.http.errors import ApiError, invalid
from server.text.prompt_text import TextTooLong, encode_prompt


async def create_message(call: Call, context: Context) -> None:
    """Answer a conversation with its next turn, as Anthropic's clients know it."""
    await generate(call, context, read_body(MessagesRequest, call.body), parse, renderer)


async def count_tokens(call: Call, context: Context) -> None:
    """Count the tokens of a conversation as the model would read it."""
    request = read_body(CountTokensRequest, call.body)
    context.model_name(request.model)
    source, blame = parse_count(request)
    longest = max(MAX_COUNTED_TOKENS, known_max_model_len(context) or 0)
    try:
        text = await conversation_text(source, context.model)
        token_ids, _ = await encode_prompt(
            context.model.tokenizer, text, add_special_tokens=False, longest=longest, keep=None
        )
    except ApiError as error:
        raise blame(error) from error
    except TextTooLong as error:
        raise invalid(
            f"messages: texts of up to {longest} tokens are tokenized, but of this one {error}.",
            "messages",
            code="context_length_exceeded",
        ) from error
    await call.send_struct(TokenCount(len(token_ids)))
