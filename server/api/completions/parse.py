"""A completion request in the terms of all requests."""

from typing import Any

from server.access.budget import AnswerSize, check_size
from server.api.completions.schema import CompletionRequest
from server.api.shared.checks import check_fields
from server.generate.request import GenerationRequest, Limits, Texts, TokenLists
from server.http.errors import invalid

DEFAULT_TOKENS = 16
"""Tokens of an answer where neither the request nor the model says."""


def parse(request: CompletionRequest, limits: Limits) -> GenerationRequest:
    """Return what a request asks for, checked as far as that needs no tokens.

    Raises:
        ApiError: the request is wrong, or asks for too much; `param` names the field.
    """
    stop = check_fields(request, limits)
    logprobs = limits.scored(request.logprob_token_ids, request.logprobs, "logprobs")
    if request.logprob_token_ids and request.echo:
        raise invalid("logprob_token_ids: not together with echo", "logprob_token_ids")
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    n = request.n or 1
    if request.suffix:
        raise invalid("suffix: infilling is not supported", "suffix")
    if max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: must be at least 1 unless echo is set", "max_tokens")
    if request.best_of is not None:
        if request.best_of < n:
            raise invalid("best_of: must not be less than n", "best_of")
        if request.stream and request.best_of > n:
            raise invalid("best_of: must equal n in a stream", "best_of")
    source = _source(request)
    size = _size(request, source, max_tokens, logprobs)
    known = 0 if isinstance(source, Texts) else sum(map(len, source.token_lists))
    check_size(size, request, known, limits.max_model_len)
    return GenerationRequest(
        fields=request,
        source=source,
        size=size,
        n=n,
        stop=stop,
        logprobs=logprobs,
        default_tokens=DEFAULT_TOKENS,
        echo=bool(request.echo),
        only_echo=bool(request.echo) and max_tokens == 0,
    )


def _source(request: CompletionRequest) -> Texts | TokenLists:
    source: Any = request.prompt
    if isinstance(source, str) or isinstance(source[0], int):
        source = [source]
    if isinstance(source[0], str):
        return Texts(source, request.add_special_tokens is not False)
    return TokenLists(source)


def _size(
    request: CompletionRequest,
    source: Texts | TokenLists,
    max_tokens: int | None,
    logprobs: int | None,
) -> AnswerSize:
    scores = 0 if logprobs is None else 1 + logprobs
    of_prompt = request.prompt_logprobs
    return AnswerSize(
        prompts=len(source.texts if isinstance(source, Texts) else source.token_lists),
        copies=request.best_of or request.n or 1,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        repeats_prompt=bool(request.echo or request.return_token_ids or of_prompt is not None),
        scores=0 if request.stream else scores,
        prompt_scores=(0 if of_prompt is None else 1 + of_prompt) + (scores if request.echo else 0),
        searched=bool(request.use_beam_search),
        tokens_field="max_tokens",
        scores_field="logprob_token_ids" if request.logprob_token_ids else "logprobs",
        prompt_scores_field="logprobs" if of_prompt is None else "prompt_logprobs",
    )
