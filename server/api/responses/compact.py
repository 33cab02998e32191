"""POST /v1/responses/compact: a conversation in a few words, for requests that go on with it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from server.api.responses.items import Compaction, OutputMessage, packed_summary
from server.api.responses.keeping import item_of, own_items
from server.api.responses.render import GrowingResponse, ResponseBody
from server.api.responses.schema import MessageItem, ResponsesRequest
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
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
) -> "CompactionBody":
    """Return what shows the answer to such a request."""
    growing = GrowingResponse(body, request, table, None)
    items = own_items(body)[:-1]
    said = [item for item in items if isinstance(item, MessageItem) and item.role == "user"]
    return CompactionBody(growing, [item_of(item) for item in said])


class CompactionBody(ResponseBody):
    """Shows a summary, with the messages of users, that replaces the conversation."""

    def __init__(self, growing: GrowingResponse, said: Sequence[dict[str, Any]]) -> None:
        super().__init__(growing)
        self._said = said

    def finish(self, usage: Usage) -> bytes:
        """Return the body."""
        response = self.complete(usage)
        messages = [item for item in response.output if isinstance(item, OutputMessage)]
        summary = "\n".join([part.text for item in messages for part in item.content])
        packed = {
            "type": "compaction",
            "id": response.id.replace("resp_", "cmp_"),
            "encrypted_content": packed_summary(summary),
        }
        made = Compaction(
            id=response.id,
            created_at=response.created_at,
            output=[*self._said, packed],
            usage=response.usage,
        )
        return msgspec.json.encode(made)
