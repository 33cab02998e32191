"""POST /v1/chat/completions and /v1/chat/completions/batch."""

from server.api.body import read_body
from server.api.chat.parse import parse, parse_batch
from server.api.chat.render import renderer
from server.api.chat.schema import BatchChatRequest, ChatCompletionRequest
from server.api.context import Context
from server.api.generation import generate
from server.http.call import Call


async def create_chat_completion(call: Call, context: Context) -> None:
    """Write the next turn of a conversation."""
    await generate(call, context, read_body(ChatCompletionRequest, call.body), parse, renderer)


async def create_chat_completions(call: Call, context: Context) -> None:
    """Write the next turn of each of several conversations: a choice for each, in their order."""
    await generate(call, context, read_body(BatchChatRequest, call.body), parse_batch, renderer)
