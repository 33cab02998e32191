"""POST /v1/responses: events of a stream, each named by its `type`."""

import msgspec

from server.api.chat.schema import ChatLogprob
from server.api.responses.items import OutputItem, OutputText, ReasoningTextPart, Response


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    """Fields common to all events."""

    sequence_number: int = 0
    """Counts the events of a stream from 0."""


class _ResponseEvent(_Event, kw_only=True):
    response: Response


class ResponseCreated(_ResponseEvent, tag="response.created"):
    """The first event."""


class ResponseInProgress(_ResponseEvent, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_ResponseEvent, tag="response.completed"):
    """The last event of a completed response."""


class ResponseIncomplete(_ResponseEvent, tag="response.incomplete"):
    """The last event of a truncated response."""


class ResponseFailed(_ResponseEvent, tag="response.failed"):
    """The last event of a failed response."""


class OutputItemAdded(_Event, tag="response.output_item.added", kw_only=True):
    """Start of an output item."""

    output_index: int
    item: OutputItem


class OutputItemDone(OutputItemAdded, tag="response.output_item.done"):
    """End of an output item."""


class _ItemEvent(_Event, kw_only=True):
    item_id: str
    output_index: int


class ContentPartAdded(_ItemEvent, tag="response.content_part.added", kw_only=True):
    """Start of a part of a message or of reasoning."""

    content_index: int = 0
    part: OutputText | ReasoningTextPart


class ContentPartDone(ContentPartAdded, tag="response.content_part.done"):
    """End of a part of a message or of reasoning."""


class TextDelta(_ItemEvent, tag="response.output_text.delta", kw_only=True):
    """New text of a message."""

    content_index: int = 0
    delta: str
    logprobs: list[ChatLogprob] = []


class TextDone(_ItemEvent, tag="response.output_text.done", kw_only=True):
    """Complete text of a message."""

    content_index: int = 0
    text: str
    logprobs: list[ChatLogprob] = []


class ReasoningTextDelta(_ItemEvent, tag="response.reasoning_text.delta", kw_only=True):
    """New text of the reasoning."""

    content_index: int = 0
    delta: str


class ReasoningTextDone(_ItemEvent, tag="response.reasoning_text.done", kw_only=True):
    """Complete text of the reasoning."""

    content_index: int = 0
    text: str


class ArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """New text of a call's arguments."""

    delta: str


class ArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """Complete arguments of a call."""

    name: str
    arguments: str


class CustomInputDelta(_ItemEvent, tag="response.custom_tool_call_input.delta", kw_only=True):
    """New text of a custom tool's input."""

    delta: str


class CustomInputDone(_ItemEvent, tag="response.custom_tool_call_input.done", kw_only=True):
    """Complete input of a custom tool."""

    input: str


class ErrorEvent(_Event, tag="error", kw_only=True):
    """An error after the stream started; the last event."""

    code: str | None
    message: str
    param: str | None


ResponseEvent = (
    ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete
    | ResponseFailed | OutputItemAdded | OutputItemDone | ContentPartAdded | ContentPartDone
    | TextDelta | TextDone | ReasoningTextDelta | ReasoningTextDone | ArgumentsDelta
    | ArgumentsDone | CustomInputDelta | CustomInputDone | ErrorEvent
)  # fmt: skip
