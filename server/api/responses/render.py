"""POST /v1/responses."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.shared.messages import SamplingParams
from server.answer.parts import ContentText, Part
from server.answer.plan import AnswerPlan
from server.api.chat.render import chat_logprobs
from server.api.chat.schema import ChatLogprob
from server.api.context import Context
from server.api.generation import serve
from server.api.responses import events
from server.api.responses.events import ErrorEvent, ResponseEvent
from server.api.responses.items import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from server.api.responses.output import OutputBuilder
from server.api.responses.parse import as_chat, wants_logprobs
from server.api.responses.schema import ResponsesRequest
from server.api.shared.fields import Usage
from server.generate.checks import check_chat
from server.generate.fold import Answer, Delta, FinishReason
from server.generate.run import GenerationSpec
from server.generate.specification import prepare_chat
from server.http.call import Call
from server.http.errors import ApiError, invalid
from server.text.detokenizer import TokenTable

_encode = msgspec.json.Encoder().encode


async def create_response(call: Call, context: Context) -> None:
    """Answer a list of items with more items; nothing is kept for a later request."""
    request = await call.body(ResponsesRequest)
    call.request_id = request.request_id or call.request_id
    model = context.model_name(request.model)
    limits = context.limits()
    conversion = as_chat(request)
    try:
        check_chat(conversion.chat, limits)
        context.admit(call, request, 1, 1)
        spec, plan = await prepare_chat(
            conversion.chat, call.request_id, context.tokenizer, limits, context.formats
        )
    except ApiError as error:
        raise conversion.blame(error) from error
    if wants_logprobs(request) and plan.reader() is not None:
        raise invalid("top_logprobs: not together with tools or reasoning", "top_logprobs")
    response = _response(request, spec.sampling, call.request_id, model)
    stream = ResponseStream(response, call.request_id, context.table, spec, plan)
    whole = await serve(call, context, spec, stream if request.stream else None)
    if whole is not None:
        stream.push(whole.answers[0])
        stream.close(whole.usage)
        await call.send_struct(response)


def _response(
    request: ResponsesRequest, sampling: SamplingParams, request_id: str, model: str
) -> Response:
    """Return the response as it is before there is any output."""

    def sent(value: Any, default: Any) -> Any:
        return default if value is None else value.model_dump(exclude_none=True, by_alias=True)

    choice = request.tool_choice
    text = {"format": {"type": "text"}, **sent(request.text, {})}
    return Response(
        id=f"resp_{request_id}",
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_logprobs=request.top_logprobs or 0,
        text=text,
        tool_choice=choice if isinstance(choice, str) else sent(choice, "auto"),
        tools=[
            {"parameters": None, "strict": None, **tool.model_dump(exclude_unset=True)}
            for tool in request.tools or ()
        ],
        reasoning={"effort": None, "summary": None, **sent(request.reasoning, {})},
        user=request.user,
    )


class ResponseStream:
    """Fills a response from deltas, and shows how it grows as typed events."""

    def __init__(
        self,
        response: Response,
        request_id: str,
        table: TokenTable,
        spec: GenerationSpec,
        plan: AnswerPlan,
    ) -> None:
        self._response = response
        self._table = table
        self._spec = spec
        self._reader = plan.reader()
        self._builder = OutputBuilder(request_id, plan.new_call_id)
        self._finish_reason: FinishReason | None = None
        self._sequence_number = 0

    def write(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta."""
        begin = b"" if self._sequence_number else self._begin()
        return begin + self._frames(self.push(delta))

    def end(self, usage: Usage) -> bytes:
        """Return the frames behind those of the last delta."""
        told = self.close(usage)
        response = self._response
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

    def push(self, piece: Delta | Answer) -> list[ResponseEvent]:
        """Add what is new of the answer; return what there is to tell."""
        self._finish_reason = piece.finish_reason
        logprobs: list[ChatLogprob] = []
        parts: list[Part]
        if self._reader is None:
            scores = chat_logprobs(piece.logprobs, self._table, self._spec)
            logprobs = [] if scores is None else scores.content
            parts = [ContentText(piece.text)] if piece.text or logprobs else []
        else:
            parts = self._reader.push(piece.text, piece.token_ids)
            if piece.finish_reason is not None:
                parts += self._reader.finish()
        return [event for part in parts for event in self._builder.push(part, logprobs)]

    def close(self, usage: Usage) -> list[ResponseEvent]:
        """Complete the response; return what there is to tell of its last item."""
        response, builder = self._response, self._builder
        told = []
        if not builder.output:
            told = builder.push(ContentText(""))
        cut_off = self._finish_reason != "stop"
        told += builder.finish("incomplete" if cut_off else "completed")
        response.output = builder.output
        response.usage = self._usage(usage)
        response.status = "completed"
        if self._finish_reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        elif cut_off:
            response.status = "failed"
            response.error = ResponseError("server_error", "The generation was aborted.")
        return told

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

    def _begin(self) -> bytes:
        response = self._response
        return self._frames(
            [
                events.ResponseCreated(response=response),
                events.ResponseInProgress(response=response),
            ]
        )

    def _frames(self, told: Sequence[ResponseEvent]) -> bytes:
        frames = []
        for event in told:
            event.sequence_number = self._sequence_number
            self._sequence_number += 1
            name = type(event).__struct_config__.tag
            frames.append(b"event: %b\ndata: %b\n\n" % (str(name).encode(), _encode(event)))
        return b"".join(frames)
