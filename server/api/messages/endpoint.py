"""POST /v1/messages and /v1/messages/count_tokens."""

from server.access.limits import MAX_COUNTED_TOKENS
from server.api.context import Context
from server.api.generation import serve
from server.api.messages.content import Message, MessageUsage, TokenCount
from server.api.messages.parse import as_chat
from server.api.messages.render import MessageStream
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.tokenize.endpoint import known_max_model_len
from server.generate.checks import check_chat
from server.generate.specification import conversation_text, prepare_chat
from server.http.call import Call
from server.http.errors import ApiError, invalid
from server.text.prompt_text import TextTooLong, encode_prompt


async def create_message(call: Call, context: Context) -> None:
    """Answer a conversation with its next turn, as Anthropic's clients know it."""
    request = await call.body(MessagesRequest)
    model = context.model_name(request.model)
    limits = context.limits()
    conversion = as_chat(request)
    try:
        check_chat(conversion.chat, limits)
        context.admit(call, conversion.chat, 1, 1)
        spec, plan = await prepare_chat(
            conversion.chat, call.request_id, context.tokenizer, limits, context.formats
        )
    except ApiError as error:
        raise conversion.blame(error) from error
    usage = MessageUsage(len(spec.prompts[0].token_ids), 1)
    stream = MessageStream(Message(id=f"msg_{call.request_id}", model=model, usage=usage), plan)
    whole = await serve(call, context, spec, stream if request.stream else None)
    if whole is not None:
        stream.push(whole.answers[0])
        stream.close(whole.usage)
        await call.send_struct(stream.message)


async def count_tokens(call: Call, context: Context) -> None:
    """Count the tokens of a conversation as the model would read it."""
    request = await call.body(CountTokensRequest)
    context.model_name(request.model)
    conversion = as_chat(request)
    longest = max(MAX_COUNTED_TOKENS, known_max_model_len(context) or 0)
    try:
        text = await conversation_text(conversion.chat, context.tokenizer, context.formats)
        token_ids, _ = await encode_prompt(
            context.tokenizer, text, add_special_tokens=False, longest=longest, keep=None
        )
    except ApiError as error:
        raise conversion.blame(error) from error
    except TextTooLong as error:
        raise invalid(
            f"messages: texts of up to {longest} tokens are tokenized, but of this one {error}.",
            "messages",
            code="context_length_exceeded",
        ) from error
    await call.send_struct(TokenCount(len(token_ids)))
