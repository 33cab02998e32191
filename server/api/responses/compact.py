"""POST /v1/responses/compact: a conversation in a few words, for requests that go on with it."""

from collections.abc import Sequence
from typing import Any

from server.api.growing import GrowingBody
from server.api.responses.items import Compaction, OutputMessage, Response, packed_summary
from server.api.responses.keeping import item_of, own_items
from server.api.responses.render import growing_response
from server.api.responses.schema import MessageItem, ResponsesRequest
from server.generate.request import GenerationRequest
from server.text.detokenizer import TokenTable

_ASKED = (
    "Summarize the conversation so far for an assistant that goes on with it and sees nothing "
    "else of it: the task, what was decided and done, names and numbers that matter, what is left "
    "to do. Write the summary only."
)
_LEFT_OUT = ("tools", "tool_choice", "text", "structured_outputs", "stream", "store", "background")
"""Fields that are about an answer, not about the conversation."""


def asking_for_summary(request: ResponsesRequest) -> ResponsesRequest:
    """Return the request that summarizes as much of a request's conversation as fits."""
    asked = [*own_items(request), MessageItem(role="user", content=_ASKED)]
    changed: dict[str, Any] = {**dict.fromkeys(_LEFT_OUT), "input": asked, "truncation": "auto"}
    return request.model_copy(update=changed)


def compaction_renderer(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable
) -> GrowingBody[Response]:
    """Return what shows the answer to such a request: what takes the conversation's place."""
    items = own_items(body)[:-1]
    said = [item for item in items if isinstance(item, MessageItem) and item.role == "user"]
    kept = [item_of(item) for item in said]
    growing = growing_response(body, request, table, None)
    return GrowingBody(growing, lambda response: _compaction(response, kept))


def _compaction(response: Response, said: Sequence[dict[str, Any]]) -> Compaction:
    """Return a response's text as a summary, behind the messages of users."""
    messages = [item for item in response.output if isinstance(item, OutputMessage)]
    summary = "\n".join([part.text for item in messages for part in item.content])
    packed = {
        "type": "compaction",
        "id": response.id.replace("resp_", "cmp_"),
        "encrypted_content": packed_summary(summary),
    }
    return Compaction(
        id=response.id,
        created_at=response.created_at,
        output=[*said, packed],
        usage=response.usage,
    )
