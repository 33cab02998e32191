"""Rendering of chat completions: chunks of a stream, or one body."""

from collections.abc import Iterable

from msgspec import UNSET, UnsetType
from msgspec.json import encode

from server.answer.parts import (
    CallArguments,
    CallBegin,
    ContentText,
    Message,
    Part,
    ReasoningText,
    whole_message,
)
from server.answer.reader import AnswerPlan, AnswerReader
from server.api.chat.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionResponse,
    ChatDelta,
    ChatFields,
    ChatFinishReason,
)
from server.api.rendering import (
    ChunkStream,
    Renderer,
    WholeBody,
    answer_kv_transfer,
    answer_timing,
    chat_logprobs,
    encoded_each,
    prompt_scores,
)
from server.generate.fold import Delta, FinishReason
from server.generate.request import GenerationRequest
from server.schema.answer import CompletionTokensDetails, Usage
from server.schema.tools import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from server.text.detokenizer import TokenTable


def renderer(body: ChatFields, request: GenerationRequest, table: TokenTable) -> Renderer:
    """Return the renderer for a request's answers."""
    shows = ChatChunks if body.stream else ChatBody
    return shows(request, table)


def _id(request: GenerationRequest) -> str:
    return f"chatcmpl-{request.request_id}"


class ChatBody(WholeBody):
    """Renders accumulated deltas as one chat completion."""

    def __init__(self, request: GenerationRequest, table: TokenTable) -> None:
        super().__init__(request.num_answers)
        self._request = request
        self._table = table
        self._show_ids = bool(request.fields.return_token_ids)
        self._readers = [request.plan.reader() for _ in range(request.num_answers)]

    def finish(self, usage: Usage) -> bytes:
        """Return the response body."""
        request, answers = self._request, self.answers()
        prompt, scores = request.prompts[0].token_ids, answers[0].prompt_logprobs
        choices = encoded_each(answers, self._shown)
        _add_details(usage, self._readers)
        made = ChatCompletionResponse(_id(request), request.created, request.model, choices, usage)
        made.metrics = answer_timing(request, usage)
        made.kv_transfer_params = answer_kv_transfer(request)
        if scores is not None:
            made.prompt_logprobs = prompt_scores(prompt, scores, self._table)
        if self._show_ids and len(request.prompts) == 1:
            made.prompt_token_ids = prompt
        return encode(made)

    def _shown(self, index: int, answer: Delta) -> ChatChoice:
        reader, plan = self._readers[index], self._request.plan
        message = AssistantMessage(answer.text)
        if reader is not None:
            parts = reader.push(answer.text, answer.token_ids) + reader.finish()
            message = _message(whole_message(parts), plan)
        if plan.echo:
            message.content = plan.echo + (message.content or "")
        choice = ChatChoice(
            index,
            message,
            chat_logprobs(answer.logprobs, self._request, self._table, whole=True),
            _finish_reason(answer.finish_reason, reader, plan),
            answer.stop_reason,
        )
        choice.unreadable_tool_calls = _unreadable(reader)
        if self._show_ids:
            choice.token_ids = list(answer.token_ids)
        answer.logprobs = answer.prompt_logprobs = None  # frees most of its memory
        return choice


def _add_details(usage: Usage, readers: Iterable[AnswerReader | None]) -> None:
    """Add the number of reasoning tokens to the usage, if there are any."""
    if count := sum([reader.reasoning_tokens for reader in readers if reader is not None]):
        usage.completion_tokens_details = CompletionTokensDetails(count)


def _message(parts: Message, plan: AnswerPlan) -> AssistantMessage:
    content = parts.content
    if content is None and not parts.calls and parts.reasoning is None:
        content = ""
    message = AssistantMessage(content)
    if parts.reasoning is not None or (plan.reasoning is not None and plan.show_reasoning):
        _show_reasoning(message, parts.reasoning, plan)
    if parts.calls:
        message.tool_calls = [
            ToolCall(plan.new_call_id(), FunctionCall(call.name, call.arguments))
            for call in parts.calls
        ]
    return message


def _show_reasoning(
    shown: AssistantMessage | ChatDelta, text: str | None, plan: AnswerPlan
) -> None:
    if plan.reasoning_field != "reasoning":
        shown.reasoning_content = text
    if plan.reasoning_field != "reasoning_content":
        shown.reasoning = text


def _finish_reason(
    reason: FinishReason | None, reader: AnswerReader | None, plan: AnswerPlan
) -> ChatFinishReason | None:
    """Return "tool_calls" for answers with calls, unless the client itself chose the tool."""
    called = reader is not None and reader.num_calls > 0
    return "tool_calls" if reason == "stop" and called and plan.tools.mode != "named" else reason


def _unreadable(reader: AnswerReader | None) -> list[int] | UnsetType:
    return UNSET if reader is None else reader.unreadable_calls or UNSET


class ChatChunks(ChunkStream):
    """Renders deltas as chat completion chunks; each choice starts with its role."""

    def __init__(self, request: GenerationRequest, table: TokenTable) -> None:
        super().__init__("chat.completion.chunk", _id(request), request, table)
        self._plan = request.plan
        self._readers: dict[int, AnswerReader | None] = {}
        taken_apart = self._plan.reader() is not None
        scored = request.logprobs is not None
        self._only_text = not (taken_apart or self._show_ids or scored)
        """Whether deltas are plain text, except for the first and the last."""

    def push(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta; empty if there is nothing to show yet."""
        first = index not in self._readers
        begun = self._begin(index) if first else b""
        if self._counts is not None:
            self._counts[index] += len(delta.token_ids)
        if self._only_text and delta.finish_reason is None and not first:
            content = ChatDelta(content=delta.text)
            choice = ChatChunkChoice(index, content, None, None)
            return self._chunk(choice) if delta.text else b""
        return begun + b"".join(map(self._chunk, self._new(index, delta, self._readers[index])))

    def _begin(self, index: int) -> bytes:
        """Return the frames that precede the first token of a choice."""
        self._readers[index] = self._plan.reader()
        role = ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None)
        if self._show_ids:
            begun = self._first_chunk(role, self._request.prompts[0].token_ids)
        else:
            begun = self._chunk(role)
        if self._plan.echo:
            echo = ChatDelta(content=self._plan.echo)
            begun += self._chunk(ChatChunkChoice(index, echo, None, None))
        return begun

    def _new(self, index: int, delta: Delta, reader: AnswerReader | None) -> list[ChatChunkChoice]:
        if reader is None:
            shown = [ChatDelta(content=delta.text or UNSET)]
            has_text = delta.text != ""
        else:
            shown = self._parsed(reader, delta)
            has_text = shown[0] != ChatDelta()
        if not (has_text or delta.logprobs or delta.finish_reason) and not (
            self._show_ids and delta.token_ids
        ):
            return []
        choices = [ChatChunkChoice(index, each, None, None) for each in shown]
        choices[0].logprobs = chat_logprobs(delta.logprobs, self._request, self._table)
        if self._show_ids:
            choices[0].token_ids = list(delta.token_ids)
        if delta.finish_reason is not None:
            choices[-1].finish_reason = _finish_reason(delta.finish_reason, reader, self._plan)
            choices[-1].stop_reason = delta.stop_reason
            choices[-1].unreadable_tool_calls = _unreadable(reader)
        return choices

    def _parsed(self, reader: AnswerReader, delta: Delta) -> list[ChatDelta]:
        """Return at least one chat delta; the finish reason after calls gets an empty one."""
        parts = reader.push(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            parts += reader.finish()
        shown = [_delta_of(part, self._plan) for part in parts]
        if not shown or (delta.finish_reason is not None and reader.num_calls):
            shown.append(ChatDelta())
        return shown

    def finish(self, usage: Usage) -> bytes:
        """Return the frames that follow the last delta."""
        _add_details(usage, self._readers.values())
        return super().finish(usage)


def _delta_of(part: Part, plan: AnswerPlan) -> ChatDelta:
    match part:
        case ReasoningText(text):
            delta = ChatDelta()
            _show_reasoning(delta, text, plan)
            return delta
        case ContentText(text):
            return ChatDelta(content=text)
        case CallBegin(index, name):
            function = FunctionCallDelta(name, "")
            begin = ToolCallDelta(index, plan.new_call_id(), "function", function)
            return ChatDelta(tool_calls=[begin])
        case CallArguments(index, text):
            arguments = FunctionCallDelta(arguments=text)
            return ChatDelta(tool_calls=[ToolCallDelta(index, function=arguments)])
