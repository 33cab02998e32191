"""Rendering of messages: events of a stream, or one body."""

import msgspec

from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from server.api.answer_builder import AnswerBuilder, BuiltBody
from server.api.messages import schema
from server.api.rendering import Renderer
from server.errors import ApiError, MessagesErrorResponse, message_error
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable


def renderer(body: schema.MessagesRequest, request: GenerationRequest, _: TokenTable) -> Renderer:
    """Return the renderer for a request's answer."""
    builder = MessageBuilder(request)
    return builder if body.stream else BuiltBody(builder)


class MessageBuilder(AnswerBuilder[schema.Message, schema.ContentBlock, schema.MessageEvent]):
    """Builds a message block by block."""

    def __init__(self, request: GenerationRequest) -> None:
        message = schema.Message(
            id=f"msg_{request.request_id}",
            model=request.model,
            usage=schema.MessageUsage(request.num_prompt_tokens, 1),
        )
        super().__init__(message, request.plan)

    def _begin(self) -> list[schema.MessageEvent]:
        return [schema.MessageStart(self.answer)]

    def _end(self) -> list[schema.MessageEvent]:
        message = self.answer
        ending = schema.Ending(
            message.stop_reason, message.stop_sequence, message.unreadable_tool_use
        )
        return [schema.MessageDelta(ending, message.usage), schema.MessageStop()]

    def _failed(self, error: ApiError) -> schema.MessageEvent:
        return MessagesErrorResponse(message_error(error))

    def _add(self, part: Part) -> list[schema.MessageEvent]:
        match part:
            case ReasoningText(text):
                begun = isinstance(self._open, schema.ThinkingContent)
                emitted = [] if begun else self._switch(schema.ThinkingContent(""))
                return [*emitted, self._more(text, schema.MessageThinkingDelta(text))]
            case ContentText(text):
                emitted = (
                    []
                    if isinstance(self._open, schema.TextContent)
                    else self._switch(schema.TextContent(""))
                )
                return [*emitted, self._more(text, schema.MessageTextDelta(text))]
            case CallBegin(_, name):
                return self._switch(schema.ToolUseContent(self._new_call_id(), name, {}))
            case CallArguments(_, text):
                return [self._more(text, schema.MessageInputDelta(text))]

    def _more(self, text: str, delta: schema.ContentDelta) -> schema.MessageEvent:
        self._text.append(text)
        return schema.BlockDelta(len(self.items) - 1, delta)

    def _opened(self, index: int, item: schema.ContentBlock) -> schema.MessageEvent:
        return schema.BlockStart(index, item)

    def _closed(
        self, index: int, item: schema.ContentBlock, text: str
    ) -> list[schema.MessageEvent]:
        match item:
            case schema.TextContent():
                item.text = text
            case schema.ThinkingContent():
                item.thinking = text
            case schema.ToolUseContent():
                item.input = _object(text)
        return [schema.BlockStop(index)]

    def _complete(self, usage: Usage) -> list[schema.MessageEvent]:
        emitted, message = self._close_item(), self.answer
        message.content = self.items
        cached = usage.cached_tokens
        message.usage = schema.MessageUsage(
            usage.prompt_tokens - cached, usage.completion_tokens, cached
        )
        reasons: dict[str | None, schema.StopReason | None] = {
            None: None,
            "abort": None,
            "length": "max_tokens",
        }
        message.stop_reason = reasons.get(self._finish_reason, "end_turn")
        if isinstance(self._stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", self._stop_reason
        calls = [block.id for block in message.content if isinstance(block, schema.ToolUseContent)]
        if self._reader is not None and (unreadable := self._reader.unreadable_calls):
            message.unreadable_tool_use = [calls[index] for index in unreadable]
        if calls and message.stop_reason == "end_turn":
            message.stop_reason = "tool_use"
        return emitted


def _object(text: str) -> msgspec.Raw | dict[str, object]:
    """Return a call's input as JSON; `{}` if it is truncated or not an object."""
    try:
        decoded = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode()) if isinstance(decoded, dict) else {}
