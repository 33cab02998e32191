"""Rendering of responses: events of a stream, or one body."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET

from server.answer.json_value import is_object
from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from server.api.answer_builder import AnswerBuilder, BuiltBody, event_frames
from server.api.chat.schema import ChatLogprob
from server.api.rendering import chat_logprobs
from server.api.responses import events, items
from server.api.responses.events import ResponseEvent
from server.api.responses.schema import ConversationName, ResponsesRequest
from server.api.responses.tools import OfferedTool, offered_tools
from server.errors import ApiError
from server.generate.fold import Delta, ScoredToken
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable


class _ItemPosition(TypedDict):
    item_id: str
    output_index: int


class _CustomArguments(msgspec.Struct):
    """Arguments of the function that represents a custom tool."""

    input: str


class _ShellArguments(msgspec.Struct):
    """Arguments of the function that represents the client's shell."""

    command: list[str]
    timeout_ms: int | None = None
    working_directory: str | None = None

    def action(self) -> items.ShellAction:
        return items.ShellAction(self.command, self.timeout_ms, self.working_directory)


class ContentScores:
    """Finds the tokens, with log probabilities, that make up the content of an answer.

    Parts are consecutive pieces of the answer's text. A part that is not found in the text, because
    its parser rewrote it, is skipped.
    """

    def __init__(self) -> None:
        self._text = ""
        """Text after the last part found."""
        self._begin = 0
        """Offset of that text in the whole answer."""
        self._tokens: list[ScoredToken] = []
        """Tokens that start at or after that offset."""

    def add(self, text: str, tokens: Sequence[ScoredToken]) -> None:
        """Append answer text, and tokens; their text may be added before or after them."""
        self._text += text
        self._tokens += tokens

    def of(self, part: Part) -> list[ScoredToken]:
        """Return the tokens that start in a content part; none for other parts. Call in order."""
        text = part.name if isinstance(part, CallBegin) else part.text
        offset = self._text.find(text)
        if offset < 0:
            return []
        start, end = self._begin + offset, self._begin + offset + len(text)
        self._text, self._begin = self._text[offset + len(text) :], end
        found = [token for token in self._tokens if start <= token.text_offset < end]
        self._tokens = [token for token in self._tokens if token.text_offset >= end]
        return found if isinstance(part, ContentText) else []


class ResponseBuilder(AnswerBuilder[items.Response, items.OutputItem, ResponseEvent]):
    """Builds a response item by item."""

    def __init__(
        self,
        response: items.Response,
        request: GenerationRequest,
        table: TokenTable,
        tools: Mapping[str, OfferedTool],
    ) -> None:
        """`response` has no output yet; `tools` are keyed by function name."""
        super().__init__(response, request.plan)
        self._suffix = response.id.removeprefix("resp_")
        """Makes item IDs unique."""
        self._tools = tools
        self._request = request
        self._table = table
        self._scores = ContentScores()
        self._logprobs: list[ChatLogprob] = []
        self._status: items.ItemStatus = "completed"
        """Status of items that close from now on."""
        self._sequence_number = 0
        """Number of the next event."""

    def _begin(self) -> list[ResponseEvent]:
        kinds = (events.ResponseCreated, events.ResponseInProgress)
        return [kind(response=self.answer) for kind in kinds]

    def _grow(self, delta: Delta) -> list[ResponseEvent]:
        if delta.logprobs is None:
            return super()._grow(delta)
        self._finish_reason = delta.finish_reason
        if self._reader is None:
            logprobs = self._shown(delta.logprobs)
            return self._add_content(delta.text, logprobs) if delta.text or logprobs else []
        emitted: list[ResponseEvent] = []
        parts = self._parse(delta)
        self._scores.add(delta.text, delta.logprobs)
        for part in parts:
            scored = self._shown(self._scores.of(part))
            if isinstance(part, ContentText):
                emitted += self._add_content(part.text, scored)
            else:
                emitted += self._add(part)
        return emitted

    def _end(self) -> list[ResponseEvent]:
        response = self.answer
        match response.status:
            case "incomplete":
                return [events.ResponseIncomplete(response=response)]
            case "failed":
                return [events.ResponseFailed(response=response)]
            case _:
                return [events.ResponseCompleted(response=response)]

    def _failed(self, error: ApiError) -> ResponseEvent:
        code = error.code or error.kind
        return events.ErrorEvent(code=code, message=error.message, param=error.param)

    def frames(self, emitted: Sequence[ResponseEvent]) -> bytes:
        for event in emitted:
            event.sequence_number = self._sequence_number
            self._sequence_number += 1
        return event_frames(emitted)

    def _add(self, part: Part) -> list[ResponseEvent]:
        match part:
            case ReasoningText(text):
                emitted: list[ResponseEvent] = []
                if not isinstance(self._open, items.OutputReasoning):
                    emitted = self._switch(items.OutputReasoning(self._id("rs"), "in_progress", []))
                    empty = items.ReasoningTextPart("")
                    emitted.append(events.ContentPartAdded(**self._position(), part=empty))
                self._text.append(text)
                return [*emitted, events.ReasoningTextDelta(**self._position(), delta=text)]
            case ContentText(text):
                return self._add_content(text, [])
            case CallBegin(_, name):
                return self._switch(self._call(name))
            case CallArguments(_, text):
                self._text.append(text)
                if not isinstance(self._open, items.OutputFunctionCall):
                    return []  # emitted in another form, once complete
                return [events.ArgumentsDelta(**self._position(), delta=text)]

    def _complete(self, usage: Usage) -> list[ResponseEvent]:
        """Complete the response; if there is no output, add an empty message."""
        response, cut_off = self.answer, self._finish_reason != "stop"
        emitted = [] if self.items else self._add_content("", [])
        self._status = "incomplete" if cut_off else "completed"
        emitted += self._close_item()
        response.output = self.items
        response.usage = items.ResponseUsage(
            usage.prompt_tokens,
            items.InputTokensDetails(usage.cached_tokens),
            usage.completion_tokens,
            items.OutputTokensDetails(0 if self._reader is None else self._reader.reasoning_tokens),
            usage.total_tokens,
        )
        response.status = "completed"
        if self._finish_reason == "length":
            response.status = "incomplete"
            response.incomplete_details = items.IncompleteDetails("max_output_tokens")
        elif cut_off:
            response.status = "failed"
            response.error = items.ResponseError("server_error", "The generation was aborted.")
        return emitted

    def _opened(self, index: int, item: items.OutputItem) -> ResponseEvent:
        return events.OutputItemAdded(output_index=index, item=item)

    def _closed(self, index: int, item: items.OutputItem, text: str) -> list[ResponseEvent]:
        position, status = self._position(), self._status
        emitted: list[ResponseEvent]
        part: items.OutputText | items.ReasoningTextPart
        match item:
            case items.OutputMessage():
                logprobs, self._logprobs = self._logprobs, []
                part = items.OutputText(text, logprobs=logprobs)
                item.content = [part]
                emitted = [
                    events.TextDone(**position, text=text, logprobs=logprobs),
                    events.ContentPartDone(**position, part=part),
                ]
            case items.OutputReasoning():
                part = items.ReasoningTextPart(text)
                item.content = [part]
                emitted = [
                    events.ReasoningTextDone(**position, text=text),
                    events.ContentPartDone(**position, part=part),
                ]
            case items.OutputFunctionCall():
                item.arguments = text
                status = status if is_object(text) else "incomplete"
                emitted = [events.ArgumentsDone(**position, name=item.name, arguments=text)]
            case items.OutputCustomToolCall():
                try:
                    item.input = msgspec.json.decode(text, type=_CustomArguments).input
                except (msgspec.DecodeError, UnicodeEncodeError):
                    item.input = text  # malformed: keep the model's raw text
                emitted = [
                    events.CustomInputDelta(**position, delta=item.input),
                    events.CustomInputDone(**position, input=item.input),
                ]
            case items.OutputLocalShellCall():
                try:
                    item.action = msgspec.json.decode(text, type=_ShellArguments).action()
                except (msgspec.DecodeError, UnicodeEncodeError):
                    status = "incomplete"
                emitted = []
            case items.OutputToolSearchCall():
                status = status if is_object(text) else "incomplete"
                item.arguments = msgspec.json.decode(text) if is_object(text) else {}
                emitted = []
        item.status = status
        return [*emitted, events.OutputItemDone(output_index=index, item=item)]

    def _call(self, name: str) -> items.OutputItem:
        tool, call_id = self._tools.get(name), self._new_call_id()
        namespace = tool.namespace if tool is not None and tool.namespace is not None else UNSET
        if tool is not None and tool.name is not None:
            name = tool.name
        match None if tool is None else tool.kind:
            case "custom":
                return items.OutputCustomToolCall(
                    self._id("ctc"), "in_progress", call_id, name, "", namespace
                )
            case "local_shell":
                return items.OutputLocalShellCall(
                    self._id("lsh"), "in_progress", call_id, items.ShellAction([])
                )
            case "tool_search":
                return items.OutputToolSearchCall(self._id("tsc"), "in_progress", call_id, {})
            case _:
                return items.OutputFunctionCall(
                    self._id("fc"), "in_progress", call_id, name, "", namespace
                )

    def _add_content(self, text: str, logprobs: list[ChatLogprob]) -> list[ResponseEvent]:
        emitted: list[ResponseEvent] = []
        if not isinstance(self._open, items.OutputMessage):
            emitted = self._switch(items.OutputMessage(self._id("msg"), "in_progress", []))
            emitted.append(events.ContentPartAdded(**self._position(), part=items.OutputText("")))
        self._text.append(text)
        self._logprobs += logprobs
        return [*emitted, events.TextDelta(**self._position(), delta=text, logprobs=logprobs)]

    def _position(self) -> _ItemPosition:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.items)}"

    def _shown(self, tokens: Sequence[ScoredToken] | None) -> list[ChatLogprob]:
        scores = chat_logprobs(tokens, self._request, self._table)
        return [] if scores is None else scores.content


ResponseRenderer = BuiltBody[items.Response] | ResponseBuilder


def renderer(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable, name: str | None = None
) -> ResponseRenderer:
    """Return the renderer for a request's answer.

    If it is stored, the IDs of the response and of its items end with `name`.
    """
    builder = response_builder(body, request, table, name)
    return builder if body.stream else BuiltBody(builder)


def response_builder(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable, name: str | None
) -> ResponseBuilder:
    """Return a response builder without output; `name` as in `renderer`."""
    response = initial_response(body, name or request.request_id, request.created, request.model)
    response.temperature = request.sampling.temperature
    response.top_p = request.sampling.top_p
    response.store = name is not None
    tools = {tool.function["name"]: tool for tool in offered_tools(body, 0)}
    return ResponseBuilder(response, request, table, tools)


def initial_response(
    request: ResponsesRequest, name: str, created: int, model: str
) -> items.Response:
    """Return the response before there is any output."""

    def sent(value: Any, default: Any) -> Any:
        return default if value is None else value.model_dump(exclude_none=True, by_alias=True)

    choice, conversation = request.tool_choice, request.conversation
    if isinstance(conversation, ConversationName):
        conversation = conversation.id
    text = {"format": {"type": "text"}, **sent(request.text, {})}
    return items.Response(
        id=f"resp_{name}",
        created_at=created,
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_logprobs=request.top_logprobs or 0,
        text=text,
        tool_choice=choice if isinstance(choice, str) else sent(choice, "auto"),
        tools=[
            {"parameters": None, "strict": None, **tool.model_dump(exclude_unset=True)}
            for tool in request.tools or ()
        ],
        reasoning={"effort": None, "summary": None, **sent(request.reasoning, {})},
        user=request.user,
        previous_response_id=request.previous_response_id,
        conversation=None if conversation is None else items.ConversationId(conversation),
        background=bool(request.background),
        truncation=request.truncation or "disabled",
    )
