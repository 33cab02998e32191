"""POST /invocations: what hosts of models call, whatever they want of it."""

from server.api.body import fields_of
from server.api.chat.endpoint import create_chat_completion
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.endpoint import create_completion
from server.api.completions.schema import CompletionRequest
from server.api.context import Context
from server.api.responses.endpoint import create_response
from server.api.responses.schema import ResponsesRequest
from server.http.call import Call
from server.http.errors import invalid

AnyRequest = ChatCompletionRequest | CompletionRequest | ResponsesRequest


async def invoke(call: Call, context: Context) -> None:
    """Answer as the endpoint does whose request it is: messages, a prompt, or input."""
    fields = fields_of(call.body)
    if "messages" in fields:
        await create_chat_completion(call, context)
    elif "prompt" in fields:
        await create_completion(call, context)
    elif "input" in fields:
        await create_response(call, context)
    else:
        raise invalid("one of messages, prompt and input is needed", "messages")
