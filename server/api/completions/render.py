"""Completions as clients see them: chunks of a stream, or one body."""

from collections.abc import Callable, Sequence

from msgspec import UNSET
from msgspec.json import encode

from server.api.completions.schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from server.api.shared.answer import Usage
from server.api.shared.chunks import ChunkFrames, error_frames
from server.api.shared.rendering import Answering, Renderer
from server.api.shared.scores import MIN_LOGPROB, prompt_scores, token_names
from server.api.shared.whole import WholeAnswers
from server.generate.answer import Answer
from server.generate.fold import Delta, ScoredToken
from server.http.encoded import encoded_each
from server.http.errors import ApiError

_KIND = "text_completion"


def renderer(request: CompletionRequest, answering: Answering) -> Renderer:
    """Return what shows the answers to a request."""
    shows = CompletionChunks if request.stream else CompletionBody
    return shows(request, answering)


class CompletionChunks:
    """Shows deltas as chunks of a completion."""

    streams, large = True, False

    def __init__(self, request: CompletionRequest, answering: Answering) -> None:
        self._frames = ChunkFrames(_KIND, _id(answering), answering, request)
        self._answering = answering
        self._show_ids = bool(request.return_token_ids)
        self._begun: set[int] = set()
        self.finish, self.error = self._frames.end, error_frames

    def push(self, index: int, delta: Delta) -> bytes:
        """Return the frame of a delta; none if it has no text yet and nothing else to show."""
        if self._frames.so_far is not None:
            self._frames.so_far.add(index, len(delta.token_ids))
        shown = delta.text or delta.logprobs or delta.finish_reason
        if not shown and not (self._show_ids and delta.token_ids):
            return b""
        choice = _choice(index, delta, self._answering, show_ids=self._show_ids)
        if self._show_ids:
            if index in self._begun:
                choice.prompt_token_ids = UNSET
            self._begun.add(index)
        return self._frames.chunk(choice)


class CompletionBody:
    """Shows the sums of deltas as one completion."""

    streams = False

    def __init__(self, request: CompletionRequest, answering: Answering) -> None:
        self._answering = answering
        self._show_ids = bool(request.return_token_ids)
        spec = answering.spec
        self._whole = WholeAnswers(spec.n * len(spec.prompts))
        self.push, self.error = self._whole.add, ApiError.body

    @property
    def large(self) -> bool:
        """Whether `finish` takes more than a moment."""
        return self._whole.large

    def finish(self, usage: Usage) -> bytes:
        """Return the body."""
        answering, answers = self._answering, self._whole.answers()
        return encode(
            CompletionResponse(
                _id(answering),
                answering.created,
                answering.model,
                encoded_each(answers, self._shown),
                usage,
                metrics=answering.metrics(usage),
            )
        )

    def _shown(self, index: int, answer: Answer) -> CompletionChoice:
        answering = self._answering
        choice = _choice(index, answer, answering, show_ids=self._show_ids)
        if answer.prompt_logprobs is not None:
            prompt = answering.spec.prompts[index // answering.spec.n]
            choice.prompt_logprobs = prompt_scores(
                prompt.token_ids, answer.prompt_logprobs, answering.table
            )
        answer.logprobs = answer.prompt_logprobs = None  # most of its memory
        return choice


def _id(answering: Answering) -> str:
    return f"cmpl-{answering.request_id}"


def _choice(
    index: int, part: Answer | Delta, answering: Answering, *, show_ids: bool
) -> CompletionChoice:
    spec, logprobs = answering.spec, None
    if part.logprobs is not None:
        logprobs = _logprobs(part.logprobs, token_names(answering.table, ids=spec.names_ids))
    choice = CompletionChoice(index, part.text, logprobs, part.finish_reason, part.stop_reason)
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
