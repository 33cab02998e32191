"""POST /v1/chat/completions."""

from server.api.body import read_body
from server.api.chat.parse import parse
from server.api.chat.render import renderer
from server.api.chat.schema import ChatCompletionRequest
from server.api.context import Context
from server.api.generation import generate
from server.http.call import Call


async def create_chat_completion(call: Call, context: Context) -> None:
    """Write the next turn of a conversation."""
    await generate(call, context, read_body(ChatCompletionRequest, call.body), parse, renderer)
