"""POST /v1/completions."""

from collections.abc import Callable, Sequence

from server.api.completions.schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from server.api.context import Context
from server.api.generation import chunk_frames, chunk_head, serve
from server.api.shared.chunks import ChunkFrames
from server.api.shared.fields import UNSET
from server.api.shared.scores import MIN_LOGPROB, prompt_scores, token_names
from server.generate.checks import check_completion, num_prompts
from server.generate.fold import Answer, Delta, ScoredToken
from server.generate.run import GenerationSpec
from server.generate.specification import prepare_completion
from server.http.call import Call
from server.http.encoded import encoded, encoded_each
from server.text.detokenizer import TokenTable


async def create_completion(call: Call, context: Context) -> None:
    """Continue prompts."""
    request = await call.body(CompletionRequest)
    call.request_id = request.request_id or call.request_id
    model = context.model_name(request.model)
    limits = context.limits()
    check_completion(request, limits)
    context.admit(call, request, num_prompts(request.prompt), request.best_of or request.n or 1)
    spec = await prepare_completion(request, call.request_id, context.tokenizer, limits)
    head = chunk_head("cmpl", "text_completion", call, model)
    show_ids = bool(request.return_token_ids)
    writer = None
    if request.stream:
        frames = chunk_frames(request, head, spec, force_usage=context.force_usage)
        writer = CompletionChunks(frames, context.table, spec, show_ids=show_ids)
    whole = await serve(call, context, spec, writer)
    if whole is None:
        return

    def shown(index: int, answer: Answer) -> CompletionChoice:
        choice = _choice(index, answer, context.table, spec, show_ids=show_ids)
        if answer.prompt_logprobs is not None:
            prompt = spec.prompts[index // spec.n]
            choice.prompt_logprobs = prompt_scores(
                prompt.token_ids, answer.prompt_logprobs, context.table
            )
        answer.drop_scores()
        return choice

    def response() -> CompletionResponse:
        choices = encoded_each(whole.answers, shown)
        return CompletionResponse(head.id, head.created, model, choices, whole.usage)

    await call.send_json(200, await encoded(response, large=whole.large))


class CompletionChunks:
    """Shows deltas as chunks of a completion."""

    def __init__(
        self, frames: ChunkFrames, table: TokenTable, spec: GenerationSpec, *, show_ids: bool
    ) -> None:
        self._frames = frames
        self.end, self.error = frames.end, frames.error
        self._table = table
        self._spec = spec
        self._show_ids = show_ids
        self._begun: set[int] = set()

    def write(self, index: int, delta: Delta) -> bytes:
        """Return the frame of a delta; none if it has no text yet and nothing else to show."""
        self._frames.count(index, delta)
        shown = delta.text or delta.logprobs or delta.finish_reason
        if not shown and not (self._show_ids and delta.token_ids):
            return b""
        choice = _choice(index, delta, self._table, self._spec, show_ids=self._show_ids)
        if self._show_ids:
            if index in self._begun:
                choice.prompt_token_ids = UNSET
            self._begun.add(index)
        return self._frames.choice(choice)


def _choice(
    index: int, part: Answer | Delta, table: TokenTable, spec: GenerationSpec, *, show_ids: bool
) -> CompletionChoice:
    choice = CompletionChoice(
        index,
        part.text,
        None
        if part.logprobs is None
        else _logprobs(part.logprobs, token_names(table, ids=spec.names_ids)),
        part.finish_reason,
        part.stop_reason,
    )
    if show_ids:
        choice.prompt_token_ids = spec.prompts[index // spec.n].token_ids
        choice.token_ids = list(part.token_ids)
    return choice


def _logprobs(tokens: Sequence[ScoredToken], name_of: Callable[[int], str]) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=[token.text_offset for token in tokens],
        token_logprobs=[
            None if token.logprob is None else max(token.logprob.logprob, MIN_LOGPROB)
            for token in tokens
        ],
        tokens=[name_of(token.token_id) for token in tokens],
        top_logprobs=[_alternatives(token, name_of) for token in tokens],
    )


def _alternatives(token: ScoredToken, name_of: Callable[[int], str]) -> dict[str, float] | None:
    """Return the most likely tokens, best first, and the token itself if it is none of them."""
    scores = token.logprob
    if scores is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True):
        found.setdefault(name_of(token_id), max(logprob, MIN_LOGPROB))
    found.setdefault(name_of(token.token_id), max(scores.logprob, MIN_LOGPROB))
    return found
