"""POST /invocations: what hosts of models call, whatever they want of it."""

from collections.abc import Set

from engine.shared.pooling import Task
from server.api.body import fields_of
from server.api.chat.endpoint import create_chat_completion
from server.api.chat.schema import ChatCompletionRequest
from server.api.classify.endpoint import classify
from server.api.completions.endpoint import create_completion
from server.api.completions.schema import CompletionRequest
from server.api.context import Context
from server.api.embeddings.endpoint import create_embeddings
from server.api.responses.endpoint import create_response
from server.api.responses.schema import ResponsesRequest
from server.api.scores.endpoint import rerank, score
from server.http.call import Call
from server.http.errors import invalid

AnyRequest = ChatCompletionRequest | CompletionRequest | ResponsesRequest


async def invoke(call: Call, context: Context) -> None:
    """Answer as the endpoint does whose request it is: messages, a prompt, or input.

    Of a model that makes vectors: input, a query with documents, or pairs.
    """
    fields = fields_of(call.body)
    pooling = context.model.pooling
    if pooling is not None:
        await _pooled(call, context, fields, pooling.spec.task)
    elif "messages" in fields:
        await create_chat_completion(call, context)
    elif "prompt" in fields:
        await create_completion(call, context)
    elif "input" in fields:
        await create_response(call, context)
    else:
        raise invalid("one of messages, prompt and input is needed", "messages")


async def _pooled(call: Call, context: Context, fields: Set[str], task: Task) -> None:
    if "query" in fields:
        await rerank(call, context)
    elif "input" in fields:
        await (create_embeddings if task == "embed" else classify)(call, context)
    else:
        await score(call, context)
