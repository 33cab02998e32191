"""POST /v1/chat/completions."""

from collections.abc import Sequence

from server.asgi import Call
from server.detokenizer import TokenTable
from server.generation import Delta, ScoredToken
from server.preprocess import prepare_chat
from server.routes.completions import MIN_LOGPROB
from server.routes.context import Context
from server.routes.serve import chunk_frames, chunk_head, serve
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
from server.sse import ChunkFrames
from server.submission import GenerationSpec


async def create_chat_completion(call: Call, context: Context) -> None:
    """Write the next turn of a conversation."""
    request = await call.body(ChatCompletionRequest)
    call.request_id = request.request_id or call.request_id
    model = context.model_name(request.model)
    context.admit(call, 1, request.n or 1)
    spec = await prepare_chat(request, call.request_id, context.tokenizer, context.limits())
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    head = chunk_head("chatcmpl", kind, call, model)
    show_ids = bool(request.return_token_ids)
    writer = None
    if request.stream:
        frames = chunk_frames(request, head)
        writer = ChatChunks(frames, context.table, spec, show_ids=show_ids)
    whole = await serve(call, context, spec, writer)
    if whole is None:
        return
    choices = [
        ChatChoice(
            index,
            AssistantMessage(answer.text),
            _logprobs(answer.logprobs, context.table, spec),
            answer.finish_reason,
            answer.stop_reason,
            answer.token_ids if show_ids else UNSET,
        )
        for index, answer in enumerate(whole.answers)
    ]
    response = ChatCompletionResponse(head.id, head.created, model, choices, whole.usage)
    if show_ids:
        response.prompt_token_ids = spec.prompts[0].token_ids
    await call.send_struct(response)


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
