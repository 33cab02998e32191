"""Base classes and helpers of the renderers of all endpoints."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from engine.shared.messages import TokenLogprob
from server.api.chat.schema import ChatChunkChoice, ChatLogprob, ChatLogprobs, TopLogprob
from server.api.completions.schema import CompletionChoice
from server.errors import ApiError
from server.generate.fold import Delta, ScoredToken
from server.generate.request import GenerationRequest
from server.generate.run import DeltaSum
from server.schema.answer import PromptLogprob, PromptLogprobs, RequestMetrics, Usage
from server.schema.kv_transfer import RemoteKvBlocks
from server.text.detokenizer import TokenTable

T = TypeVar("T")
S = TypeVar("S")

_encode = msgspec.json.Encoder().encode
_CHUNK_ITEMS = 256


def encoded_list(items: Iterable[T]) -> list[T]:
    """Return the JSON list of these items, encoded in chunks so that few are alive at once."""
    parts, rest = [], iter(items)
    while part := list(islice(rest, _CHUNK_ITEMS)):
        parts.append(_encode(part)[1:-1])
    return cast("list[T]", msgspec.Raw(b"[" + b",".join(parts) + b"]"))


def encoded_each(items: Sequence[T], show: Callable[[int, T], S]) -> list[S]:
    """Return the list of `show(index, item)` results, each already encoded as JSON."""
    shown = [msgspec.Raw(_encode(show(index, item))) for index, item in enumerate(items)]
    return cast("list[S]", shown)


_LARGE = 2000
"""Total tokens and scores from which on JSON is encoded off the event loop."""


def answer_timing(request: GenerationRequest, usage: Usage) -> RequestMetrics | UnsetType:
    """Return the timing of the answer if it is enabled and an engine has reported it."""
    timing, tokens = request.timing, usage.completion_tokens
    if timing is None or not request.shows_timing:
        return UNSET
    ran = timing.prefill + timing.decode
    return RequestMetrics(
        time_to_first_token_ms=timing.prefill * 1000,
        generation_time_ms=timing.decode * 1000,
        queue_time_ms=timing.queue * 1000,
        mean_itl_ms=timing.decode * 1000 / (tokens - 1) if tokens > 1 else UNSET,
        tokens_per_second=tokens / ran if ran > 0 else UNSET,
    )


def answer_kv_transfer(request: GenerationRequest) -> RemoteKvBlocks | UnsetType | None:
    """Return the answer's KV transfer parameters, if requested."""
    return UNSET if request.transfer_params is None else request.transfer_params()


class Renderer(Protocol):
    """Renders the answers to one request, as a stream of events or as one body.

    A state machine without I/O: deltas go in, bytes for the client come out. A renderer of whole
    answers returns nothing before the end.
    """

    @property
    def streams(self) -> bool:
        """Whether the response is a stream."""
        ...

    @property
    def large(self) -> bool:
        """Whether `finish` is too slow for the event loop."""
        ...

    def push(self, index: int, delta: Delta) -> bytes:
        """Add a delta of a sequence; return the frames that show it."""
        ...

    def finish(self, usage: Usage) -> bytes:
        """Return the last frames, or the whole body."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the last frames of a stream that failed."""
        ...


class WholeBody:
    """Base of renderers of whole answers: accumulates the deltas of each sequence."""

    streams = False

    def __init__(self, count: int) -> None:
        """Accumulate the deltas of `count` sequences."""
        self._sums = [DeltaSum() for _ in range(count)]

    def push(self, index: int, delta: Delta) -> bytes:
        """Add a delta of a sequence; always returns empty bytes."""
        self._sums[index].add(delta)
        return b""

    @property
    def large(self) -> bool:
        """Whether `finish` is too slow for the event loop."""
        return sum([one.size for one in self._sums]) > _LARGE

    def answers(self) -> list[Delta]:
        """Return all answers in order, and release them."""
        sums, self._sums = self._sums, []
        return [one.whole() for one in sums]

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error."""
        return error.body()


DONE = b"data: [DONE]\n\n"

ShownChoice = ChatChunkChoice | CompletionChoice
"""A choice in a chunk."""


class ChunkStream:
    """Base of renderers of chunk streams.

    Only the choice of a chunk is encoded; the bytes around it are precomputed.
    """

    streams, large = True, False

    def __init__(self, kind: str, id_: str, request: GenerationRequest, table: TokenTable) -> None:
        """`kind` is the `object` type of the chunks, `id_` the ID of the answer."""
        self._request = request
        self._table = table
        self._show_ids = bool(request.fields.return_token_ids)
        options = request.fields.stream_options
        include_usage = options is not None and bool(options.include_usage)
        self._include_usage = include_usage or request.force_usage
        every_chunk = options is not None and bool(options.continuous_usage_stats)
        counts_each = request.force_usage or (include_usage and every_chunk)
        self._counts: Counter[int] | None = Counter() if counts_each else None
        """Tokens per choice, updated before each chunk, if every chunk reports usage."""
        head = {"id": id_, "object": kind, "created": request.created, "model": request.model}
        self._prefix = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def _chunk(self, choice: ShownChoice) -> bytes:
        if self._counts is not None:
            return self._with_more(choice, {"usage": self._usage(self._counts, choice.index)})
        return self._prefix + _encode(choice) + self._suffix

    def _first_chunk(self, choice: ShownChoice, prompt_token_ids: Sequence[int]) -> bytes:
        """Like `_chunk`, with the token IDs of the prompt."""
        more: dict[str, object] = {"prompt_token_ids": prompt_token_ids}
        if self._counts is not None:
            more["usage"] = self._usage(self._counts, choice.index)
        elif self._include_usage:
            more["usage"] = None
        return self._with_more(choice, more)

    def _usage(self, counts: Counter[int], index: int) -> Usage:
        prompt = len(self._request.prompts[index // self._request.n].token_ids)
        return Usage(prompt, counts[index], prompt + counts[index], UNSET)

    def _with_more(self, choice: ShownChoice, more: dict[str, object]) -> bytes:
        return self._prefix + _encode(choice) + b"]," + _encode(more)[1:] + b"\n\n"

    def finish(self, usage: Usage) -> bytes:
        """Return the last frames, with a choiceless usage chunk if requested."""
        if not self._include_usage:
            return DONE
        metrics = answer_timing(self._request, usage)
        timed = b"" if metrics is UNSET else b',"metrics":' + _encode(metrics)
        return self._prefix + b'],"usage":' + _encode(usage) + timed + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the last frames after an error, without `[DONE]`."""
        return b"data: " + error.body() + b"\n\n"


MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON lacks; clients of compatible servers know this value."""


def token_names(request: GenerationRequest, table: TokenTable) -> Callable[[int], str]:
    """Return a function that names tokens: by text, or as IDs if the client wants unique names."""
    ids = request.fields.return_tokens_as_token_ids
    return "token_id:{}".format if ids else table.name_of


def prompt_scores(
    token_ids: Sequence[int], scores: Sequence[TokenLogprob], table: TokenTable
) -> PromptLogprobs:
    """Return one entry per prompt token, already encoded as JSON.

    Args:
        scores: of every token except the first.
    """

    def entries() -> Iterator[dict[str, PromptLogprob] | None]:
        yield None
        for token_id, score in zip(token_ids[1:], scores, strict=True):
            found = {str(token_id): _entry(token_id, score.logprob, score.rank, table)}
            best = zip(score.top_ids, score.top_logprobs, strict=True)
            for rank, (other, logprob) in enumerate(best, 1):
                found.setdefault(str(other), _entry(other, logprob, rank, table))
            yield found

    return encoded_list(entries())


def _entry(token_id: int, logprob: float, rank: int, table: TokenTable) -> PromptLogprob:
    return PromptLogprob(max(logprob, MIN_LOGPROB), rank, table.name_of(token_id))


def chat_logprobs(
    tokens: Sequence[ScoredToken] | None,
    request: GenerationRequest,
    table: TokenTable,
    *,
    whole: bool = False,
) -> ChatLogprobs | None:
    """Return log probabilities of tokens in the shape of chat completions.

    For a `whole` answer the entries are already encoded as JSON.
    """
    if tokens is None:
        return None
    shown = _shown(tokens, request, table)
    return ChatLogprobs(encoded_list(shown) if whole else list(shown))


def _shown(
    tokens: Sequence[ScoredToken], request: GenerationRequest, table: TokenTable
) -> Iterator[ChatLogprob]:
    alternatives = request.sampling.logprobs or 0
    name_of = token_names(request, table)
    for token in tokens:
        scores = token.logprob
        assert scores is not None, "only a prompt's first token has no log probability"
        shown = [
            *zip(scores.top_ids[:alternatives], scores.top_logprobs[:alternatives], strict=True)
        ]
        if request.sampling.logprob_token_ids and token.token_id not in scores.top_ids:
            shown.insert(0, (token.token_id, scores.logprob))
        yield ChatLogprob(
            name_of(token.token_id),
            max(scores.logprob, MIN_LOGPROB),
            list(table.bytes_of(token.token_id)),
            [
                TopLogprob(
                    name_of(token_id), max(logprob, MIN_LOGPROB), list(table.bytes_of(token_id))
                )
                for token_id, logprob in shown
            ],
        )
