"""What a front end is told about a request, and when a request is over."""

from engine.messages import FinishReason, RequestOutput, TokenLogprob
from engine.scheduler.request import Request

Outputs = dict[int, list[RequestOutput]]
"""Outputs of one step by front end."""


def token_output(request: Request, token_id: int, logprob: TokenLogprob | None) -> RequestOutput:
    """Return the output for a token that was just appended to the request's tokens.

    A token that ends the request is part of the output.
    """
    finish_reason: FinishReason | None = None
    stop_token_id = None
    if token_id in request.stop_ids and request.num_output_tokens >= request.sampling.min_tokens:
        finish_reason, stop_token_id = "stop", token_id
    elif len(request.token_ids) >= request.max_total_tokens:
        finish_reason = "length"
    logprobs = None if logprob is None else [logprob]
    if request.has_emitted:
        return RequestOutput(request.id, [token_id], finish_reason, stop_token_id, logprobs)
    request.has_emitted = True
    return RequestOutput(
        request.id,
        [token_id],
        finish_reason,
        stop_token_id,
        logprobs,
        _prompt_logprobs(request),
        request.num_cached_tokens,
    )


def _prompt_logprobs(request: Request) -> list[TokenLogprob] | None:
    # The first output of a request that was taken over has been sent by its first engine.
    if request.sampling.prompt_logprobs is None or request.was_taken_over:
        return None
    return request.prompt_logprobs
