"""Outputs of requests to front ends, and detection of the end of a request."""

import msgspec

from engine.batch.batch import GRAMMAR_CONFLICT
from engine.batch.grammars import Grammar
from engine.scheduler.request import Request
from engine.shared.messages import FinishReason, RequestOutput, TokenLogprob

Outputs = dict[int, list[RequestOutput]]
"""Outputs of one step by front end."""


def accept_tokens(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprob] | None,
    now: float = 0.0,
) -> RequestOutput:
    """Append tokens sampled by `now` to a request, and return the output for them.

    The output includes a token that ends the request; tokens after it are dropped.
    """
    known, sampling = request.token_ids, request.sampling
    finish_reason: FinishReason | None = None
    stop_token_id = None
    for count, token_id in enumerate(token_ids, 1):
        known.append(token_id)
        if token_id in request.stop_ids and request.num_output_tokens >= sampling.min_tokens:
            finish_reason, stop_token_id = "stop", token_id
        elif len(known) >= request.max_total_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            token_ids = token_ids[:count]
            logprobs = None if logprobs is None else logprobs[:count]
            break
    if request.has_emitted:
        if finish_reason is None:
            return RequestOutput(request.id, token_ids, None, None, logprobs)
        timing = request.timing(now)
        return RequestOutput(
            request.id, token_ids, finish_reason, stop_token_id, logprobs, timing=timing
        )
    request.has_emitted = True
    request.first_token_at = now
    # The first engine has sent the first output of a request that was taken over.
    reports_prompt = sampling.prompt_logprobs is not None and not request.was_taken_over
    return RequestOutput(
        request.id,
        token_ids,
        finish_reason,
        stop_token_id,
        logprobs,
        request.prompt_logprobs if reports_prompt else None,
        request.num_cached_tokens,
        timing=request.timing(now),
    )


def pooled_output(request: Request, vector: bytes, now: float = 0.0) -> RequestOutput:
    """Return the single output of a pooling request, available at `now`."""
    request.has_emitted = True
    request.first_token_at = now
    return RequestOutput(
        request.id,
        [],
        "stop",
        num_cached_tokens=request.num_cached_tokens,
        timing=request.timing(now),
        pooled=vector,
    )


def grammar_output(
    request: Request, output: RequestOutput, error: str | None, now: float = 0.0
) -> RequestOutput:
    """Return the final output after the grammar has ended or rejected the last token.

    A token that only ends the request, like the model's EOS, was accepted as the grammar's end,
    even if the request ignores EOS.
    """
    if error is not None:
        return refused_output(request, error)
    if output.finish_reason == "stop":
        return output
    last = output.token_ids[-1]
    return msgspec.structs.replace(
        output,
        finish_reason="stop",
        stop_token_id=last if last in request.stop_ids else None,
        timing=request.timing(now),
    )


def refused_output(request: Request, error: str) -> RequestOutput:
    """Return the output for a request that its grammar or its bans prevent from continuing."""
    sampling = request.sampling
    param = None
    if error == GRAMMAR_CONFLICT:
        suspects = {
            "allowed_token_ids": sampling.allowed_token_ids is not None,
            "bad_words": bool(sampling.bad_words),
            "logit_bias": bool(sampling.logit_bias),
            "min_tokens": sampling.min_tokens > 0,
        }
        param = next((name for name, is_set in suspects.items() if is_set), None)
    return RequestOutput(
        request.id,
        [],
        finish_reason="error",
        error=error if param is None else f"{param}: {error}",
        refused=True,
        error_param=param,
    )


def uncompiled_output(request: Request, grammar: Grammar) -> RequestOutput:
    """Return the output for a request whose grammar failed to compile."""
    error = grammar.error or "the grammar was not compiled"
    if grammar.no_room:
        return RequestOutput(request.id, [], finish_reason="error", error=error, no_room=True)
    return refused_output(request, error)
