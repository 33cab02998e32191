"""All sequences of one request, from submission to the last delta."""

import asyncio
from array import array
from collections.abc import Iterable

import msgspec

from engine.shared.messages import RequestOutput, TokenLogprob
from server.generate.fold import ChoiceFold, Delta, FinishReason, PromptEcho, ScoredToken
from server.generate.request import GenerationRequest, Prompt
from server.limits import INT64_MAX
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.router.generation_client import GenerationClient
from server.router.request import EnginePeriod
from server.router.token_stream import RequestStream, UnreadOutputs
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable

_SLICE = 8
"""Sequences submitted before yielding to the event loop: each takes about 40 microseconds."""


def first_token(timers: Iterable[SequenceTimer]) -> float | None:
    """Return the time of the first token of any sequence, in monotonic seconds."""
    times = [timer.first_token for timer in timers]
    return min((each for each in times if each is not None), default=None)


class Run:
    """The sequences of one request; `close` must always be called."""

    def __init__(
        self,
        request: GenerationRequest,
        client: GenerationClient,
        table: TokenTable,
        metrics: FrontEndMetrics,
    ) -> None:
        self._request = request
        self._client = client
        self._table = table
        self._metrics = metrics
        self._unfinished = request.num_sequences
        self._streams: list[RequestStream] = []
        self._folds: list[ChoiceFold] = []
        self._timers: list[SequenceTimer] = []
        self.finish_reasons: list[str] = []
        """Finish reasons of the sequences that have ended."""
        self._unread = UnreadOutputs()
        self._sums: list[DeltaSum] | None = None
        """Accumulated deltas of all sequences, if only the best are returned."""
        if request.best_of > request.n:
            self._sums = [DeltaSum() for _ in range(request.num_sequences)]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return not self._unfinished

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for new output and return all of it as (answer, delta); the first call submits.

        If only the best sequences are returned, nothing is returned until all have ended.

        Raises:
            GenerationFailed: an engine failed on a sequence.
            RequestRefused: an engine does not support the request.
            NoEngineAvailable: no engine accepts a sequence, or takes over one whose engine was
                lost.
        """
        if not self._streams:
            await self._start()
        deltas = []
        for index, output in await self._unread.next():
            if not self._folds[index].finished:
                deltas.append((index, self._fold(index, output)))
        if self._sums is None:
            return deltas
        for index, delta in deltas:
            self._sums[index].add(delta)
        return [] if self._unfinished else self._best(self._sums)

    def _best(self, sums: "list[DeltaSum]") -> list[tuple[int, Delta]]:
        """Return the sequences of each prompt with the highest mean log probability per token."""
        best: list[Delta] = []
        for first in range(0, len(sums), self._request.best_of):
            of_prompt = sums[first : first + self._request.best_of]
            of_prompt.sort(key=lambda one: one.logprob_sum / max(1, len(one)), reverse=True)
            best += [one.whole() for one in of_prompt[: self._request.n]]
        return list(enumerate(best))

    async def _start(self) -> None:
        """Submit every sequence, yielding in between, as there can be thousands."""
        request = self._request
        for prompt in request.prompts:
            params = PromptParams(
                len(prompt.token_ids), request.sampling.max_tokens, request.n, request.best_of
            )
            echo = PromptEcho(self._table, prompt) if request.echo else None
            for _ in range(request.best_of):
                if self._streams and len(self._streams) % _SLICE == 0:
                    await asyncio.sleep(0)
                stream = self._submit(prompt)
                self._folds.append(ChoiceFold(self._table, prompt, request, echo))
                timer = self._metrics.sequence(
                    request.arrived, params, stream.times, first=not self._timers
                )
                self._timers.append(timer)

    def _submit(self, prompt: Prompt) -> RequestStream:
        request, index = self._request, len(self._streams)
        sampling, name, group = request.sampling, request.request_id, 0
        if index:
            seed = sampling.seed + index
            seed = seed if seed <= INT64_MAX else seed - 2**64  # wrap to a signed 64-bit integer
            sampling = msgspec.structs.replace(sampling, seed=seed)
            name, group = f"{name}-{index}", self._streams[0].id
        message = request.message(name, prompt.token_ids, sampling, group, prompt.encoder_inputs)
        stream = self._client.submit(message, request.pinned_rank, self._unread)
        self._streams.append(stream)
        return stream

    def _fold(self, index: int, output: RequestOutput) -> Delta:
        fold, timer = self._folds[index], self._timers[index]
        counted = fold.num_tokens
        delta = fold.push(output)
        timer.tokens(fold.num_tokens - counted, fold.num_cached_tokens, delta.finish_reason)
        request = self._request
        if not counted and request.reservation is not None:
            prompt = request.prompts[index // request.best_of]
            request.reservation.computed(len(prompt.token_ids))
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self.finish_reasons.append(delta.finish_reason)
            if not index:
                request.timing = timer.timing
            self._streams[index].close()
        return delta

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; a prompt counts once for all its choices."""
        return sum([fold.num_cached_tokens for fold in self._folds[:: self._request.best_of]])

    def usage(self) -> Usage:
        """Return the usage so far; a prompt counts once for all its choices."""
        completion_tokens = sum([fold.num_tokens for fold in self._folds])
        return self._request.usage(completion_tokens, self.cached_tokens)

    @property
    def engine_periods(self) -> list[list[EnginePeriod]]:
        """The engines that each sequence ran on, known once it has ended."""
        return [timer.engine_periods for timer in self._timers]

    @property
    def engine(self) -> int:
        """Rank of the engine that runs the first sequence; -1 before it is assigned."""
        return self._streams[0].times.engine if self._streams else -1

    @property
    def first_token(self) -> float | None:
        """Time of the first token of any sequence, in monotonic seconds."""
        return first_token(self._timers)

    def close(self, reason: str = "abort") -> None:
        """Abort what still runs and count it as ended for `reason`; idempotent."""
        for stream in self._streams:
            stream.close()
        for fold, timer in zip(self._folds, self._timers, strict=True):
            if not fold.finished:
                fold.finished = True
                timer.finished(reason)
                self.finish_reasons.append(reason)
        if self._timers:
            self._request.timing = self._timers[0].timing


_PIECES = 256
"""Number of text pieces that are joined at a time."""


class DeltaSum:
    """Accumulates the deltas of one sequence, keeping no more than the answer needs."""

    __slots__ = (
        "_logprobs", "_pieces", "_prompt_logprobs", "_reasons", "_token_ids", "logprob_sum",
    )  # fmt: skip

    def __init__(self) -> None:
        self.logprob_sum = 0.0
        """Sum over all tokens, if the engine reports log probabilities."""
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._pieces: list[str] = []
        self._token_ids = array("i")
        self._logprobs: list[ScoredToken] | None = None
        self._reasons: tuple[FinishReason | None, int | str | None] = (None, None)

    def add(self, delta: Delta) -> None:
        """Add a delta; the last one has the finish reason."""
        if delta.text:
            self._pieces.append(delta.text)
            if len(self._pieces) == _PIECES:
                self._pieces = ["".join(self._pieces)]
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self.logprob_sum += delta.logprob_sum
        self._reasons = delta.finish_reason, delta.stop_reason

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._token_ids)

    @property
    def size(self) -> int:
        """Number of tokens and of their log probabilities."""
        count = len(self._token_ids)
        for each in self._logprobs or ():
            count += 1 if each.logprob is None else 1 + len(each.logprob.top_ids)
        for score in self._prompt_logprobs or ():
            count += 1 + len(score.top_ids)
        return count

    def whole(self) -> Delta:
        """Return the sum of all deltas."""
        text, scores = "".join(self._pieces), self._logprobs
        token_ids, prompt_scores = self._token_ids, self._prompt_logprobs
        return Delta(text, token_ids, scores, *self._reasons, prompt_scores, self.logprob_sum)
