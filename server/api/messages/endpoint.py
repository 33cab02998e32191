"""POST /v1/messages and /v1/messages/count_tokens."""

from server.api.body import read_body
from server.api.context import Context
from server.api.generation import generate
from server.api.messages.content import TokenCount
from server.api.messages.parse import parse, parse_count
from server.api.messages.render import renderer
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.tokenize.count import count_tokens_of
from server.http.call import Call
from server.http.errors import ApiError


async def create_message(call: Call, context: Context) -> None:
    """Answer a conversation with its next turn, as Anthropic's clients know it."""
    await generate(call, context, read_body(MessagesRequest, call.body), parse, renderer)


async def count_tokens(call: Call, context: Context) -> None:
    """Count the tokens of a conversation as the model would read it."""
    request = read_body(CountTokensRequest, call.body)
    context.asked_model(request.model)
    source, blame = parse_count(request)
    try:
        count = await count_tokens_of(source, context, "messages")
    except ApiError as error:
        raise blame(error) from error
    await call.send_struct(TokenCount(count))
