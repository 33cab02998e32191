"""POST /v1/chat/completions."""

from collections.abc import Callable, Iterable, Sequence

from server.answer.parts import (
    CallArguments,
    CallBegin,
    ContentText,
    Message,
    Part,
    ReasoningText,
    whole_message,
)
from server.answer.plan import AnswerPlan
from server.answer.reader import AnswerReader
from server.api.chat.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatFinishReason,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
)
from server.api.context import Context
from server.api.generation import chunk_frames, chunk_head, serve
from server.api.shared.chunks import ChunkFrames
from server.api.shared.fields import UNSET, CompletionTokensDetails, Usage
from server.api.shared.scores import MIN_LOGPROB, prompt_scores, token_names
from server.api.shared.tools import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from server.generate.checks import check_chat
from server.generate.fold import Answer, Delta, FinishReason, ScoredToken
from server.generate.run import GenerationSpec
from server.generate.specification import prepare_chat
from server.http.call import Call
from server.http.encoded import encoded, encoded_each, encoded_list
from server.text.detokenizer import TokenTable


async def create_chat_completion(call: Call, context: Context) -> None:
    """Write the next turn of a conversation."""
    request = await call.body(ChatCompletionRequest)
    call.request_id = request.request_id or call.request_id
    model = context.model_name(request.model)
    limits = context.limits()
    check_chat(request, limits)
    context.admit(call, request, 1, request.n or 1)
    spec, plan = await prepare_chat(
        request, call.request_id, context.tokenizer, limits, context.formats
    )
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    head = chunk_head("chatcmpl", kind, call, model)
    show_ids = bool(request.return_token_ids)
    writer = None
    if request.stream:
        frames = chunk_frames(request, head, spec, force_usage=context.force_usage)
        writer = ChatChunks(frames, context.table, spec, plan, show_ids=show_ids)
    whole = await serve(call, context, spec, writer)
    if whole is None:
        return
    readers = [plan.reader() for _ in whole.answers]

    def shown(index: int, answer: Answer) -> ChatChoice:
        choice = _choice(index, answer, readers[index], context.table, spec, plan)
        if show_ids:
            choice.token_ids = list(answer.token_ids)
        answer.drop_scores()
        return choice

    def response() -> ChatCompletionResponse:
        prompt, scores = spec.prompts[0].token_ids, whole.answers[0].prompt_logprobs
        choices = encoded_each(whole.answers, shown)
        _add_details(whole.usage, readers)
        made = ChatCompletionResponse(head.id, head.created, model, choices, whole.usage)
        if scores is not None:
            made.prompt_logprobs = prompt_scores(prompt, scores, context.table)
        if show_ids:
            made.prompt_token_ids = prompt
        return made

    await call.send_json(200, await encoded(response, large=whole.large))


def _add_details(usage: Usage, readers: Iterable[AnswerReader | None]) -> None:
    """Say how many tokens were for reasoning, if there is any."""
    if count := sum(reader.reasoning_tokens for reader in readers if reader is not None):
        usage.completion_tokens_details = CompletionTokensDetails(count)


def _choice(
    index: int,
    answer: Answer,
    reader: AnswerReader | None,
    table: TokenTable,
    spec: GenerationSpec,
    plan: AnswerPlan,
) -> ChatChoice:
    message = AssistantMessage(answer.text)
    if reader is not None:
        parts = reader.push(answer.text, answer.token_ids) + reader.finish()
        message = _message(whole_message(parts), plan)
    if plan.echo:
        message.content = plan.echo + (message.content or "")
    return ChatChoice(
        index,
        message,
        _whole_logprobs(answer.logprobs, table, spec),
        _finish_reason(answer.finish_reason, reader, plan),
        answer.stop_reason,
    )


def _message(parts: Message, plan: AnswerPlan) -> AssistantMessage:
    content = parts.content
    if content is None and not parts.calls and parts.reasoning is None:
        content = ""
    message = AssistantMessage(content)
    if parts.reasoning is not None:
        _show_reasoning(message, parts.reasoning, plan)
    if parts.calls:
        message.tool_calls = [
            ToolCall(plan.new_call_id(), FunctionCall(call.name, call.arguments))
            for call in parts.calls
        ]
    return message


def _show_reasoning(shown: AssistantMessage | ChatDelta, text: str, plan: AnswerPlan) -> None:
    if plan.reasoning_field != "reasoning":
        shown.reasoning_content = text
    if plan.reasoning_field != "reasoning_content":
        shown.reasoning = text


def _finish_reason(
    reason: FinishReason | None, reader: AnswerReader | None, plan: AnswerPlan
) -> ChatFinishReason | None:
    """Say that the model waits for tools, unless the client knows because it chose the tool."""
    called = reader is not None and reader.num_calls > 0
    return "tool_calls" if reason == "stop" and called and plan.tools.mode != "named" else reason


class ChatChunks:
    """Shows deltas as chunks of a chat completion; each choice begins with its role."""

    def __init__(
        self,
        frames: ChunkFrames,
        table: TokenTable,
        spec: GenerationSpec,
        plan: AnswerPlan,
        *,
        show_ids: bool,
    ) -> None:
        self._frames = frames
        self.error = frames.error
        self._table = table
        self._spec = spec
        self._plan = plan
        self._show_ids = show_ids
        self._readers: dict[int, AnswerReader | None] = {}

    def write(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta; none if it has no text yet and nothing else to show."""
        self._frames.count(index, delta)
        begin = b"" if index in self._readers else self._begin(index)
        reader = self._readers[index]
        if reader is None:
            first, more = ChatDelta(content=delta.text or UNSET), []
            has_text = delta.text != ""
        else:
            first, *more = self._parsed(reader, delta)
            has_text = first != ChatDelta()
        if not (has_text or delta.logprobs or delta.finish_reason) and not (
            self._show_ids and delta.token_ids
        ):
            return begin
        logprobs = chat_logprobs(delta.logprobs, self._table, self._spec)
        choice = ChatChunkChoice(index, first, logprobs, None)
        if self._show_ids:
            choice.token_ids = delta.token_ids
        frames = begin
        for each in more:
            frames += self._frames.choice(choice)
            choice = ChatChunkChoice(index, each, None, None)
        if delta.finish_reason is not None:
            choice.finish_reason = _finish_reason(delta.finish_reason, reader, self._plan)
            choice.stop_reason = delta.stop_reason
        return frames + self._frames.choice(choice)

    def _parsed(self, reader: AnswerReader, delta: Delta) -> list[ChatDelta]:
        """Return what a delta shows, at least one thing; an end after calls is one of its own."""
        parts = reader.push(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            parts += reader.finish()
        shown = [_delta_of(part, self._plan) for part in parts]
        if not shown or (delta.finish_reason is not None and reader.num_calls):
            shown.append(ChatDelta())
        return shown

    def end(self, usage: Usage) -> bytes:
        """Return the frames behind those of the last delta."""
        _add_details(usage, self._readers.values())
        return self._frames.end(usage)

    def _begin(self, index: int) -> bytes:
        self._readers[index] = self._plan.reader()
        choice = ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None)
        prompt = self._spec.prompts[0].token_ids if self._show_ids else None
        frames = self._frames.choice(choice, prompt)
        if self._plan.echo:
            repeated = ChatDelta(content=self._plan.echo)
            frames += self._frames.choice(ChatChunkChoice(index, repeated, None, None))
        return frames


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


def chat_logprobs(
    tokens: Sequence[ScoredToken] | None, table: TokenTable, spec: GenerationSpec
) -> ChatLogprobs | None:
    """Return the log probabilities of tokens as chat completions show them."""
    if tokens is None:
        return None
    shown = spec.sampling.logprobs or 0
    name_of = token_names(table, ids=spec.names_ids)
    return ChatLogprobs([_logprob(token, table, name_of, shown) for token in tokens])


def _whole_logprobs(
    tokens: Sequence[ScoredToken] | None, table: TokenTable, spec: GenerationSpec
) -> ChatLogprobs | None:
    """Return the same as JSON already."""
    if tokens is None:
        return None
    shown = spec.sampling.logprobs or 0
    name_of = token_names(table, ids=spec.names_ids)
    return ChatLogprobs(encoded_list(_logprob(token, table, name_of, shown) for token in tokens))


def _logprob(
    token: ScoredToken, table: TokenTable, name_of: Callable[[int], str], shown: int
) -> ChatLogprob:
    scores = token.logprob
    assert scores is not None, "only a prompt's first token has no log probability"
    alternatives = zip(scores.top_ids[:shown], scores.top_logprobs[:shown], strict=True)
    return ChatLogprob(
        name_of(token.token_id),
        max(scores.logprob, MIN_LOGPROB),
        list(table.bytes_of(token.token_id)),
        [
            TopLogprob(
                name_of(token_id),
                max(logprob, MIN_LOGPROB),
                list(table.bytes_of(token_id)),
            )
            for token_id, logprob in alternatives
        ],
    )
