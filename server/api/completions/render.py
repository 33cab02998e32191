"""Rendering of completions: chunks of a stream, or one body."""

from collections.abc import Callable, Sequence

from msgspec import UNSET
from msgspec.json import encode

from server.api.completions.schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from server.api.rendering import (
    MIN_LOGPROB,
    ChunkStream,
    Renderer,
    WholeBody,
    answer_kv_transfer,
    answer_timing,
    encoded_each,
    prompt_scores,
    token_names,
)
from server.generate.fold import Delta, ScoredToken
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable


def renderer(body: CompletionRequest, request: GenerationRequest, table: TokenTable) -> Renderer:
    """Return the renderer for a request's answers."""
    shows = CompletionChunks if body.stream else CompletionBody
    return shows(request, table)


class CompletionChunks(ChunkStream):
    """Renders deltas as completion chunks."""

    def __init__(self, request: GenerationRequest, table: TokenTable) -> None:
        super().__init__("text_completion", _id(request), request, table)
        self._begun: set[int] = set()

    def push(self, index: int, delta: Delta) -> bytes:
        """Return the frame of a delta; empty if there is nothing to show yet."""
        if self._counts is not None:
            self._counts[index] += len(delta.token_ids)
        shown = delta.text or delta.logprobs or delta.finish_reason
        if not shown and not (self._show_ids and delta.token_ids):
            return b""
        choice = _choice(index, delta, self._request, self._table)
        if self._show_ids:
            if index in self._begun:
                choice.prompt_token_ids = UNSET
            self._begun.add(index)
        return self._chunk(choice)


class CompletionBody(WholeBody):
    """Renders accumulated deltas as one completion."""

    def __init__(self, request: GenerationRequest, table: TokenTable) -> None:
        super().__init__(request.num_answers)
        self._request = request
        self._table = table

    def finish(self, usage: Usage) -> bytes:
        """Return the response body."""
        request, answers = self._request, self.answers()
        return encode(
            CompletionResponse(
                _id(request),
                request.created,
                request.model,
                encoded_each(answers, self._shown),
                usage,
                metrics=answer_timing(request, usage),
                kv_transfer_params=answer_kv_transfer(request),
            )
        )

    def _shown(self, index: int, answer: Delta) -> CompletionChoice:
        request = self._request
        choice = _choice(index, answer, request, self._table)
        choice.prompt_logprobs = None
        # Fields that were not requested are null in a body, but absent in a stream.
        if not request.fields.return_token_ids:
            choice.prompt_token_ids = choice.token_ids = None
        if answer.prompt_logprobs is not None:
            prompt = request.prompts[index // request.n]
            choice.prompt_logprobs = prompt_scores(
                prompt.token_ids, answer.prompt_logprobs, self._table
            )
        answer.logprobs = answer.prompt_logprobs = None  # frees most of its memory
        return choice


def _id(request: GenerationRequest) -> str:
    return f"cmpl-{request.request_id}"


def _choice(
    index: int, part: Delta, request: GenerationRequest, table: TokenTable
) -> CompletionChoice:
    logprobs = None
    if part.logprobs is not None:
        logprobs = _logprobs(part.logprobs, token_names(request, table))
    choice = CompletionChoice(index, part.text, logprobs, part.finish_reason, part.stop_reason)
    if request.fields.return_token_ids:
        choice.prompt_token_ids = request.prompts[index // request.n].token_ids
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
    """Return log probabilities of the token itself and of the most likely ones, best first."""
    scores = token.logprob
    if scores is None:
        return None
    found = {name_of(token.token_id): max(scores.logprob, MIN_LOGPROB)}
    for token_id, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True):
        found.setdefault(name_of(token_id), max(logprob, MIN_LOGPROB))
    return found
