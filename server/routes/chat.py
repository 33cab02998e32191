"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence

from server.asgi import Call, CancelOnDisconnect
from server.detokenizer import TokenTable
from server.generation import Delta, ScoredToken
from server.preprocess import prepare_chat
from server.routes.completions import MIN_LOGPROB
from server.routes.context import Context
from server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
)
from server.schemas.common import UNSET
from server.sse import ChunkFrames, ChunkHead, send_stream
from server.submission import GenerationSpec, Submission


async def create_chat_completion(call: Call, context: Context) -> None:
    """Write the next turn of a conversation."""
    request = await call.body(ChatCompletionRequest)
    call.request_id = request.request_id or call.request_id
    model = context.model_name(request.model)
    spec = await prepare_chat(request, call.request_id, context.tokenizer, context.limits())
    name = "chat.completion.chunk" if request.stream else "chat.completion"
    head = ChunkHead(f"chatcmpl-{call.request_id}", name, int(time.time()), model)
    show_ids = bool(request.return_token_ids)
    with CancelOnDisconnect(call.receive):
        submission = Submission(context.client, context.table, context.metrics, spec, call.arrived)
        try:
            if request.stream:
                options = request.stream_options
                frames = ChunkFrames(
                    head, include_usage=options is not None and bool(options.include_usage)
                )
                writer = ChatChunks(frames, context.table, spec, show_ids=show_ids)
                await send_stream(call, submission, writer)
                return
            answers = await submission.collect()
        finally:
            submission.close()
    await call.send_struct(
        ChatCompletionResponse(
            head.id,
            head.created,
            model,
            [
                ChatChoice(
                    index,
                    AssistantMessage(answer.text),
                    _logprobs(answer.logprobs, context.table, spec),
                    answer.finish_reason,
                    answer.stop_reason,
                    answer.token_ids if show_ids else UNSET,
                )
                for index, answer in enumerate(answers)
            ],
            submission.usage(),
            prompt_token_ids=spec.prompts[0].token_ids if show_ids else UNSET,
        )
    )


class ChatChunks:
    """Shows deltas as chunks of a chat completion; each choice begins with its role."""

    def __init__(
        self, frames: ChunkFrames, table: TokenTable, spec: GenerationSpec, *, show_ids: bool
    ) -> None:
        self.frames = frames
        self._table = table
        self._spec = spec
        self._show_ids = show_ids
        self._begun: set[int] = set()

    def write(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta; none if it has no text yet and nothing else to show."""
        begin = b"" if index in self._begun else self._begin(index)
        shown = delta.text or delta.logprobs or delta.finish_reason
        if not shown and not (self._show_ids and delta.token_ids):
            return begin
        choice = ChatChunkChoice(
            index,
            ChatDelta(content=delta.text or UNSET),
            _logprobs(delta.logprobs, self._table, self._spec),
            delta.finish_reason,
            delta.stop_reason,
        )
        if self._show_ids:
            choice.token_ids = delta.token_ids
        return begin + self.frames.choice(choice)

    def _begin(self, index: int) -> bytes:
        self._begun.add(index)
        choice = ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None)
        if self._show_ids:
            choice.prompt_token_ids = self._spec.prompts[0].token_ids
        return self.frames.choice(choice)


def _logprobs(
    tokens: Sequence[ScoredToken] | None, table: TokenTable, spec: GenerationSpec
) -> ChatLogprobs | None:
    if tokens is None:
        return None
    shown = spec.sampling.logprobs or 0
    content = []
    for token in tokens:
        scores = token.logprob
        assert scores is not None, "only a prompt's first token has no log probability"
        alternatives = zip(scores.top_ids[:shown], scores.top_logprobs[:shown], strict=True)
        content.append(
            ChatLogprob(
                table.name_of(token.token_id),
                max(scores.logprob, MIN_LOGPROB),
                list(table.bytes_of(token.token_id)),
                [
                    TopLogprob(
                        table.name_of(token_id),
                        max(logprob, MIN_LOGPROB),
                        list(table.bytes_of(token_id)),
                    )
                    for token_id, logprob in alternatives
                ],
            )
        )
    return ChatLogprobs(content)
