"""From a validated body to what the engines get: prompts as token ids, sampling, limits."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from engine.messages import SamplingParams
from server.chat_template import RESERVED_ARGUMENTS, TemplateFailed
from server.errors import ApiError, context_length_exceeded, invalid
from server.generation import FoldOptions, Prompt
from server.schemas.chat import ChatCompletionRequest, ChatMessage
from server.schemas.common import JsonObject, SamplingFields
from server.schemas.completions import CompletionRequest
from server.submission import GenerationSpec
from server.tokenizer import ServedTokenizer

T = TypeVar("T")

MAX_SEQUENCES = 2048
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


class Limits(msgspec.Struct, frozen=True):
    """What requests are held against."""

    max_model_len: int
    max_logprobs: int


async def prepare_completion(
    request: CompletionRequest, request_id: str, tokenizer: ServedTokenizer, limits: Limits
) -> GenerationSpec:
    """Return what to generate for a completion request.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    _check_completion(request, limits)
    prompts = await _completion_prompts(request, tokenizer, limits)
    _check_sequences(len(prompts) * (request.best_of or request.n or 1))
    scoring_only = request.max_tokens == 0
    max_tokens = _max_tokens(
        prompts,
        1 if scoring_only else request.max_tokens,
        limits,
        default=16,
        params=("prompt", "max_tokens"),
    )
    n, best_of = request.n or 1, request.best_of or request.n or 1
    logprobs = request.logprobs
    sampling = _sampling(request, tokenizer, max_tokens, logprobs)
    if logprobs is None and best_of > n:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    if request.echo and logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=logprobs)
    fold = _fold_options(request, sampling, logprobs is not None)
    if request.echo:
        fold = msgspec.structs.replace(fold, echo=True, discard_output=scoring_only)
    return GenerationSpec(
        request_id=request_id,
        prompts=prompts,
        sampling=sampling,
        fold=fold,
        n=n,
        best_of=best_of,
        priority=request.priority or 0,
    )


async def prepare_chat(
    request: ChatCompletionRequest, request_id: str, tokenizer: ServedTokenizer, limits: Limits
) -> GenerationSpec:
    """Return what to generate for a chat completion request.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    _check_chat(request, limits)
    text = render_chat(
        tokenizer,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        tools=request.tools,
        documents=request.documents,
        arguments=request.chat_template_kwargs,
    )
    prompt = await _text_prompt(
        text, request, tokenizer, limits, add_special_tokens=bool(request.add_special_tokens)
    )
    if not prompt.token_ids:
        raise invalid("messages: the rendered conversation has no tokens", "messages")
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = _max_tokens(
        [prompt],
        request.max_completion_tokens or request.max_tokens,
        limits,
        default=limits.max_model_len,
        params=("messages", param),
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = _sampling(request, tokenizer, max_tokens, logprobs)
    n = request.n or 1
    return GenerationSpec(
        request_id=request_id,
        prompts=[prompt],
        sampling=sampling,
        fold=_fold_options(request, sampling, logprobs is not None),
        n=n,
        best_of=n,
        priority=request.priority or 0,
    )


def render_chat(
    tokenizer: ServedTokenizer,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    tools: list[JsonObject] | None = None,
    documents: list[JsonObject] | None = None,
    arguments: JsonObject | None = None,
) -> str:
    """Return the text of a conversation.

    Raises:
        ApiError: there is no template, or it does not accept the conversation.
    """
    template = tokenizer.chat_template
    if template is None:
        raise invalid(
            "The model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE.",
            "messages",
        )
    if add_generation_prompt and continue_final_message:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    reserved = RESERVED_ARGUMENTS.intersection(arguments or ())
    if reserved:
        name = min(reserved)
        raise invalid(
            f"chat_template_kwargs.{name}: is a field of the request", "chat_template_kwargs"
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    try:
        return template.render(
            [_turn(message, index) for index, message in enumerate(messages)],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools or None,
            documents=documents,
            arguments=arguments,
        )
    except TemplateFailed as error:
        raise invalid(f"messages: {error}", "messages") from error


def _turn(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return a message as templates expect it: text parts joined, tool arguments as objects."""
    turn = message.model_dump(exclude_none=True)
    content = message.content
    if isinstance(content, list):
        turn["content"] = "\n".join([part.text for part in content])
    elif content is None:
        if message.role != "assistant":
            raise invalid(
                f"messages[{index}].content: may be absent from assistant messages only",
                f"messages[{index}].content",
            )
        turn["content"] = ""
    for call in turn.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                field = f"messages[{index}].tool_calls"
                raise invalid(f"{field}: arguments are not valid JSON: {error}", field) from error
    return turn


# -- checks --------------------------------------------------------------------------------------


def _check_completion(request: CompletionRequest, limits: Limits) -> None:
    _check_common(request)
    if request.suffix:
        raise invalid("suffix: infilling is not supported", "suffix")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: must be at least 1 unless echo is set", "max_tokens")
    if request.logprobs is not None and request.logprobs > limits.max_logprobs:
        raise invalid(f"logprobs: at most {limits.max_logprobs} are served", "logprobs")
    if request.best_of is not None:
        if request.best_of < (request.n or 1):
            raise invalid("best_of: must not be less than n", "best_of")
        if request.stream and request.best_of > (request.n or 1):
            raise invalid("best_of: must equal n in a stream", "best_of")


def _check_chat(request: ChatCompletionRequest, limits: Limits) -> None:
    _check_common(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    if (request.top_logprobs or 0) > limits.max_logprobs:
        raise invalid(f"top_logprobs: at most {limits.max_logprobs} are served", "top_logprobs")
    if request.response_format is not None and request.response_format.type != "text":
        raise invalid("response_format.type: only 'text' is supported", "response_format.type")
    if request.tool_choice not in (None, "none"):
        raise invalid("tool_choice: only 'none' is supported", "tool_choice")
    if request.tools and request.tool_choice != "none":
        raise invalid("tools: tool calls are not supported unless tool_choice is 'none'", "tools")


def _check_common(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed when stream is true", "stream_options")
    if "" in _stop_strings(request):
        raise invalid("stop: strings must not be empty", "stop")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens: must be -1 or at least 1", "truncate_prompt_tokens")


def _check_sequences(count: int) -> None:
    if count > MAX_SEQUENCES:
        raise invalid(
            f"prompt: {count} sequences (prompts times choices), more than {MAX_SEQUENCES}",
            "prompt",
        )


# -- prompts -------------------------------------------------------------------------------------


def num_prompts(source: str | Sequence[Any]) -> int:
    """Return how many prompts the prompt field of a completion request holds."""
    return 1 if isinstance(source, str) or isinstance(source[0], int) else len(source)


async def _completion_prompts(
    request: CompletionRequest, tokenizer: ServedTokenizer, limits: Limits
) -> list[Prompt]:
    add_special_tokens = request.add_special_tokens is not False
    source = request.prompt
    items: list[Any] = [source]
    if not isinstance(source, str) and not isinstance(source[0], int):
        items = list(source)
    prompts = []
    for index, item in enumerate(items):
        name = "prompt" if len(items) == 1 else f"prompt[{index}]"
        if isinstance(item, str):
            prompt = await _text_prompt(
                item, request, tokenizer, limits, add_special_tokens=add_special_tokens
            )
        else:
            check_vocabulary(item, tokenizer, name)
            prompt = Prompt(_truncated(item, request, limits), None)
        if not prompt.token_ids:
            raise invalid(f"{name}: must not be empty", "prompt")
        prompts.append(prompt)
    return prompts


async def _text_prompt(
    text: str,
    request: SamplingFields,
    tokenizer: ServedTokenizer,
    limits: Limits,
    *,
    add_special_tokens: bool,
) -> Prompt:
    token_ids = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    kept = _truncated(token_ids, request, limits)
    return Prompt(kept, text if len(kept) == len(token_ids) else None)


def _truncated(token_ids: list[int], request: SamplingFields, limits: Limits) -> list[int]:
    """Return the last tokens that the request wants to keep; -1 leaves room for one more."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    return token_ids[-(limits.max_model_len - 1 if keep == -1 else keep) :]


def check_vocabulary(token_ids: Sequence[int], tokenizer: ServedTokenizer, field: str) -> None:
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        raise invalid(
            f"{field}: token id {max(token_ids)} is outside the vocabulary of "
            f"{tokenizer.vocab_size}",
            field,
        )


def _max_tokens(
    prompts: Sequence[Prompt],
    asked: int | None,
    limits: Limits,
    *,
    default: int,
    params: tuple[str, str],
) -> int:
    """Return how many tokens to generate; a default is cut to what fits, a wish is not.

    `params` are the fields of the prompt and of the wish: what is too long is blamed.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + (asked or 1) > limits.max_model_len:
        of_prompt, of_wish = params
        param = of_prompt if longest >= limits.max_model_len else of_wish
        raise context_length_exceeded(limits.max_model_len, longest, asked or 1, param)
    return asked or min(default, limits.max_model_len - longest)


# -- sampling ------------------------------------------------------------------------------------


def _stop_strings(request: SamplingFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _fold_options(request: SamplingFields, sampling: SamplingParams, logprobs: bool) -> FoldOptions:
    return FoldOptions(
        skip_special_tokens=request.skip_special_tokens is not False,
        stop=_stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=logprobs,
    )


def _sampling(
    request: SamplingFields, tokenizer: ServedTokenizer, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens: {min_tokens} is more than max_tokens, which is {max_tokens}",
            "min_tokens",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_vocabulary(stop_token_ids, tokenizer, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        temperature=_or(request.temperature, 1.0),
        top_k=max(0, _or(request.top_k, 0)),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        logit_bias=_logit_bias(request.logit_bias, tokenizer) if request.logit_bias else {},
        logprobs=logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], tokenizer: ServedTokenizer) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= tokenizer.vocab_size:
            raise _bad_bias_key(key, tokenizer)
        found[int(key)] = value
    return found


def _bad_bias_key(key: str, tokenizer: ServedTokenizer) -> ApiError:
    return invalid(
        f"logit_bias: {key!r} is no token id of the vocabulary of {tokenizer.vocab_size}",
        "logit_bias",
    )
