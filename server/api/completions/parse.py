"""Conversion of completion bodies to generation requests."""

from typing import Any

from server.api.completions.schema import CompletionRequest
from server.errors import invalid_field
from server.generate.budget import check_size
from server.generate.model import ServedModel
from server.generate.request import GenerationRequest

DEFAULT_TOKENS = 16
"""Default of `max_tokens` if neither the request nor the model specifies one."""


def parse(body: CompletionRequest, model: ServedModel, max_model_len: int) -> GenerationRequest:
    """Convert a body to a generation request, with all checks that need no tokens.

    Raises:
        ApiError: the request is invalid or exceeds a limit; `param` names the field.
    """
    stop = model.check_fields(body)
    logprobs = model.scored(body.logprob_token_ids, body.logprobs, "logprobs")
    if body.logprob_token_ids and body.echo:
        raise invalid_field("logprob_token_ids", "cannot be combined with echo")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    n = body.n or 1
    if body.suffix:
        raise invalid_field("suffix", "infilling is not supported")
    if max_tokens == 0 and not body.echo:
        raise invalid_field("max_tokens", "must be at least 1 unless echo is set")
    if body.best_of is not None:
        if body.best_of < n:
            raise invalid_field("best_of", "must not be less than n")
        if body.stream and body.best_of > n:
            raise invalid_field("best_of", "must equal n in a stream")
    prompts: Any = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    are_texts = isinstance(prompts[0], str)
    scores, of_prompt = 0 if logprobs is None else 1 + logprobs, body.prompt_logprobs
    request = GenerationRequest(
        fields=body,
        texts=prompts if are_texts else [],
        token_lists=[] if are_texts else prompts,
        add_special_tokens=body.add_special_tokens is not False,
        max_model_len=max_model_len,
        n=n,
        best_of=body.best_of or n,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        default_tokens=DEFAULT_TOKENS,
        stop=stop,
        logprobs=logprobs,
        echo=bool(body.echo),
        only_echo=bool(body.echo) and max_tokens == 0,
        repeats_prompt=bool(body.echo or body.return_token_ids or of_prompt is not None),
        scores=0 if body.stream else scores,
        prompt_scores=(0 if of_prompt is None else 1 + of_prompt) + (scores if body.echo else 0),
        scores_field="logprob_token_ids" if body.logprob_token_ids else "logprobs",
        prompt_scores_field="logprobs" if of_prompt is None else "prompt_logprobs",
    )
    check_size(request)
    return request
