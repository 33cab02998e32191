"""Responses as clients see them: events of a stream, or one body."""

from collections.abc import Sequence
from typing import Any

import msgspec

from server.answer.parts import CallBegin, ContentText, Part
from server.api.chat.schema import ChatLogprob
from server.api.chat.scores import chat_logprobs
from server.api.rendering import WholeBody, event_frames
from server.api.responses import events
from server.api.responses.events import ErrorEvent, ResponseEvent
from server.api.responses.items import (
    ConversationId,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from server.api.responses.output import OutputBuilder, ScoredPart
from server.api.responses.schema import ConversationName, ResponsesRequest
from server.api.responses.tools import offered_tools
from server.errors import ApiError
from server.generate.fold import Delta, FinishReason, ScoredToken
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable

_encode = msgspec.json.Encoder().encode


def renderer(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable, name: str | None = None
) -> "ResponseBody | ResponseEvents":
    """Return what shows the answer to a request.

    If it is stored, the ids of the response and of its items end with `name`.
    """
    growing = GrowingResponse(body, request, table, name)
    return ResponseEvents(growing) if body.stream else ResponseBody(growing)


def begun_response(
    request: ResponsesRequest,
    name: str,
    created: int,
    model: str,
    *,
    temperature: float,
    top_p: float,
) -> Response:
    """Return the response as it is before there is any output."""

    def sent(value: Any, default: Any) -> Any:
        return default if value is None else value.model_dump(exclude_none=True, by_alias=True)

    choice, conversation = request.tool_choice, request.conversation
    if isinstance(conversation, ConversationName):
        conversation = conversation.id
    text = {"format": {"type": "text"}, **sent(request.text, {})}
    return Response(
        id=f"resp_{name}",
        created_at=created,
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=temperature,
        top_p=top_p,
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
        conversation=None if conversation is None else ConversationId(conversation),
        background=bool(request.background),
        truncation=request.truncation or "disabled",
    )


class ContentScores:
    """Finds the tokens, with their log probabilities, that make up the content of an answer.

    Parts are pieces of the answer's text, in order. A part that is not found in the text, because
    its reader rewrote it, is skipped.
    """

    def __init__(self) -> None:
        self._text = ""
        """What no part has been found in yet."""
        self._begin = 0
        """Where it begins in the whole text."""
        self._tokens: list[ScoredToken] = []
        """Those that begin within it, or behind it."""

    def add(self, text: str, tokens: Sequence[ScoredToken]) -> None:
        """Add text of the answer, and tokens whose texts have come or will come."""
        self._text += text
        self._tokens += tokens

    def of(self, part: Part) -> list[ScoredToken]:
        """Return the tokens that begin in a part's text if it is content; parts come in order."""
        text = part.name if isinstance(part, CallBegin) else part.text
        place = self._text.find(text)
        if place < 0:
            return []
        start, end = self._begin + place, self._begin + place + len(text)
        self._text, self._begin = self._text[place + len(text) :], end
        found = [token for token in self._tokens if start <= token.text_offset < end]
        self._tokens = [token for token in self._tokens if token.text_offset >= end]
        return found if isinstance(part, ContentText) else []


class GrowingResponse:
    """Fills a response from deltas, and tells how it grows as typed events."""

    def __init__(
        self,
        body: ResponsesRequest,
        request: GenerationRequest,
        table: TokenTable,
        name: str | None,
    ) -> None:
        self.response = begun_response(
            body,
            name or request.request_id,
            request.created,
            request.model,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
        )
        self.response.store = name is not None
        self._last: list[ResponseEvent] | None = None
        """What there was to tell when the response was completed."""
        self._request = request
        self._table = table
        self._reader = request.plan.reader()
        tools = {tool.function["name"]: tool for tool in offered_tools(body, 0)}
        self._builder = OutputBuilder(name or request.request_id, request.plan.new_call_id, tools)
        self._scores = ContentScores()
        self._finish_reason: FinishReason | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can be added."""
        return self._last is not None

    def push(self, delta: Delta) -> list[ResponseEvent]:
        """Add what is new of the answer; return what there is to tell."""
        parts = self._taken_apart(delta)
        return [event for part, scores in parts for event in self._builder.push(part, scores)]

    def close(self, usage: Usage, answer: Delta | None = None) -> list[ResponseEvent]:
        """Complete the response, once, with a whole answer if it has none yet.

        Returns what there is to tell of what is new.
        """
        if self._last is not None:
            return self._last
        parts = [] if answer is None else self._taken_apart(answer)
        response, cut_off = self.response, self._finish_reason != "stop"
        told = self._builder.close(parts, "incomplete" if cut_off else "completed")
        response.output = self._builder.output
        response.usage = self._usage(usage)
        response.status = "completed"
        if self._finish_reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        elif cut_off:
            response.status = "failed"
            response.error = ResponseError("server_error", "The generation was aborted.")
        self._last = told
        return told

    def _taken_apart(self, piece: Delta) -> list[ScoredPart]:
        self._finish_reason = piece.finish_reason
        if self._reader is None:
            logprobs = self._shown(piece.logprobs)
            return [(ContentText(piece.text), logprobs)] if piece.text or logprobs else []
        parts = self._reader.push(piece.text, piece.token_ids)
        if piece.finish_reason is not None:
            parts += self._reader.finish()
        if piece.logprobs is None:
            return [(part, []) for part in parts]
        self._scores.add(piece.text, piece.logprobs)
        return [(part, self._shown(self._scores.of(part))) for part in parts]

    def _shown(self, tokens: Sequence[ScoredToken] | None) -> list[ChatLogprob]:
        scores = chat_logprobs(tokens, self._request, self._table)
        return [] if scores is None else scores.content

    def _usage(self, usage: Usage) -> ResponseUsage:
        details = usage.prompt_tokens_details
        cached = 0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens
        reasoning = 0 if self._reader is None else self._reader.reasoning_tokens
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(cached),
            usage.completion_tokens,
            OutputTokensDetails(reasoning),
            usage.total_tokens,
        )


class ResponseBody(WholeBody):
    """Shows the sum of deltas as one response."""

    def __init__(self, growing: GrowingResponse) -> None:
        super().__init__(1)
        self._growing = growing

    def complete(self, usage: Usage) -> Response:
        """Return the whole response, of which no more will come."""
        if not self._growing.is_complete:
            self._growing.close(usage, self.answers()[0])
        return self._growing.response

    def finish(self, usage: Usage) -> bytes:
        """Return the body."""
        return _encode(self.complete(usage))


class ResponseEvents:
    """Shows deltas as events."""

    streams, large = True, False

    def __init__(self, growing: GrowingResponse) -> None:
        self._growing = growing
        self._sequence_number = 0

    def push(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta."""
        begin = [] if self._sequence_number else self._begin()
        return self._frames([*begin, *self._growing.push(delta)])

    def complete(self, usage: Usage) -> Response:
        """Return the whole response, of which no more will come."""
        self._growing.close(usage)
        return self._growing.response

    def finish(self, usage: Usage) -> bytes:
        """Return the frames behind those of the last delta."""
        told = self._growing.close(usage)
        response = self._growing.response
        last: ResponseEvent
        match response.status:
            case "incomplete":
                last = events.ResponseIncomplete(response=response)
            case "failed":
                last = events.ResponseFailed(response=response)
            case _:
                last = events.ResponseCompleted(response=response)
        return self._frames([*told, last])

    def error(self, error: ApiError) -> bytes:
        """Return the last frame of a stream in which something went wrong."""
        code = error.code or error.kind
        return self._frames([ErrorEvent(code=code, message=error.message, param=error.param)])

    def _begin(self) -> list[ResponseEvent]:
        response = self._growing.response
        return [
            events.ResponseCreated(response=response),
            events.ResponseInProgress(response=response),
        ]

    def _frames(self, told: Sequence[ResponseEvent]) -> bytes:
        for event in told:
            event.sequence_number = self._sequence_number
            self._sequence_number += 1
        return event_frames(told)
