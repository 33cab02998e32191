"""What can be said against a request before anything is rendered or tokenized."""

from collections.abc import Sequence
from typing import Any

import msgspec

from server.access.budget import (
    AnswerSize,
    check_named_tokens,
    check_sequences,
    room_for_output,
    scores_of,
)
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.schema import CompletionRequest
from server.api.shared.fields import SamplingFields
from server.api.shared.tools import NamedTool
from server.generate.structured_outputs import GrammarCheck
from server.http.errors import invalid


class Limits(msgspec.Struct, frozen=True):
    """What requests are held against."""

    max_model_len: int
    max_logprobs: int
    """-1: as many as there are tokens."""
    vocab_size: int
    grammars: GrammarCheck

    def alternatives(self, asked: int | None, field: str) -> int | None:
        """Return how many alternatives a request asks for; -1 asks for all tokens.

        Raises:
            ApiError: more than are served.
        """
        if asked is None:
            return None
        count = self.vocab_size if asked == -1 else asked
        if 0 <= self.max_logprobs < count:
            raise invalid(f"{field}: at most {self.max_logprobs} are served", field)
        return min(count, self.vocab_size)


def check_completion(request: CompletionRequest, limits: Limits) -> None:
    """Check what can be checked without tokenizing anything, and spell out what is meant by it.

    Raises:
        ApiError: the request is wrong, or asks for too much; `param` names the field.
    """
    _check_common(request, limits)
    if request.max_tokens is None:
        request.max_tokens = request.max_completion_tokens
    request.logprobs = limits.alternatives(request.logprobs, "logprobs")
    if request.suffix:
        raise invalid("suffix: infilling is not supported", "suffix")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: must be at least 1 unless echo is set", "max_tokens")
    if request.best_of is not None:
        if request.best_of < (request.n or 1):
            raise invalid("best_of: must not be less than n", "best_of")
        if request.stream and request.best_of > (request.n or 1):
            raise invalid("best_of: must equal n in a stream", "best_of")
    size = completion_size(request)
    _check_size(request, size, known_prompt_tokens(request.prompt), limits)


def check_chat(request: ChatCompletionRequest, limits: Limits) -> None:
    """Check what can be checked without tokenizing anything, and spell out what is meant by it.

    Raises:
        ApiError: the request is wrong, or asks for too much; `param` names the field.
    """
    _check_common(request, limits)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    request.top_logprobs = limits.alternatives(request.top_logprobs, "top_logprobs")
    if request.structured_outputs is not None and isinstance(request.tool_choice, NamedTool):
        raise invalid(
            "structured_outputs: the chosen tool says what the answer is", "structured_outputs"
        )
    if request.functions is not None:
        raise invalid("functions: use tools instead", "functions")
    if request.function_call is not None:
        raise invalid("function_call: use tool_choice instead", "function_call")
    size = chat_size(request)
    _check_size(request, size, 0, limits)


def _check_common(request: SamplingFields, limits: Limits) -> None:
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs: not available when stream is true", "prompt_logprobs")
    request.prompt_logprobs = limits.alternatives(request.prompt_logprobs, "prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed when stream is true", "stream_options")
    if "" in stop_strings(request):
        raise invalid("stop: strings must not be empty", "stop")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens: must be -1 or at least 1", "truncate_prompt_tokens")


def _check_size(
    request: SamplingFields, size: AnswerSize, prompt_tokens: int, limits: Limits
) -> None:
    check_sequences(size)
    check_named_tokens(request, size.sequences)
    room_for_output(size, prompt_tokens, limits.max_model_len)


def completion_size(request: CompletionRequest) -> AnswerSize:
    echoed = scores_of(request.logprobs) if request.echo else 0
    asks_for_prompt = request.prompt_logprobs is not None
    return AnswerSize(
        prompts=num_prompts(request.prompt),
        copies=request.best_of or request.n or 1,
        max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
        repeats_prompt=bool(request.echo or request.return_token_ids or asks_for_prompt),
        scores=0 if request.stream else scores_of(request.logprobs),
        prompt_scores=scores_of(request.prompt_logprobs) + echoed,
        tokens_field="max_tokens",
        scores_field="logprobs",
        prompt_scores_field="prompt_logprobs" if asks_for_prompt else "logprobs",
    )


def chat_size(request: ChatCompletionRequest) -> AnswerSize:
    wanted = (request.top_logprobs or 0) if request.logprobs else None
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return AnswerSize(
        prompts=1,
        copies=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        repeats_prompt=bool(
            request.return_token_ids or request.prompt_logprobs is not None or request.echo
        ),
        scores=0 if request.stream else scores_of(wanted),
        prompt_scores=scores_of(request.prompt_logprobs),
        tokens_field=field,
        scores_field="top_logprobs" if request.top_logprobs else "logprobs",
    )


def num_prompts(source: str | Sequence[Any]) -> int:
    """Return how many prompts the prompt field of a completion request holds."""
    return 1 if isinstance(source, str) or isinstance(source[0], int) else len(source)


def known_prompt_tokens(source: str | Sequence[Any]) -> int:
    """Return how many tokens the prompts have for certain, without tokenizing any."""
    if isinstance(source, str):
        return 0
    if isinstance(source[0], int):
        return len(source)
    return sum(len(item) for item in source if not isinstance(item, str))


def stop_strings(request: SamplingFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
