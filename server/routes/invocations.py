"""POST /invocations: what hosts of models call, whatever they want of it."""

from server.http.call import Call
from server.http.errors import invalid
from server.routes.chat import create_chat_completion
from server.routes.completions import create_completion
from server.routes.context import Context
from server.routes.responses import create_response
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.responses import ResponsesRequest

AnyRequest = ChatCompletionRequest | CompletionRequest | ResponsesRequest


async def invoke(call: Call, context: Context) -> None:
    """Answer as the endpoint does whose request it is: messages, a prompt, or input."""
    fields = await call.fields()
    if "messages" in fields:
        await create_chat_completion(call, context)
    elif "prompt" in fields:
        await create_completion(call, context)
    elif "input" in fields:
        await create_response(call, context)
    else:
        raise invalid("one of messages, prompt and input is needed", "messages")
