"""All sequences of one HTTP request, from the hand-over to the engines to the last delta."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import msgspec

from engine.shared.messages import RequestOutput, SamplingParams
from server.access.admission import Reservation
from server.access.limits import INT64_MAX
from server.api.shared.fields import UNSET, PromptTokensDetails, Usage
from server.generate.fold import (
    Answer,
    ChoiceFold,
    Delta,
    DeltaSum,
    FoldOptions,
    Prompt,
    PromptEcho,
)
from server.generate.unread import Unread, parts
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.router.generation_client import GenerationClient, ReaderTooSlow, TokenStream
from server.text.detokenizer import TokenTable


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: what to generate, and what to show of it.

    `sampling` holds for every sequence but for the seed: sequence i draws with seed + i.
    """

    request_id: str
    prompts: list[Prompt]
    sampling: SamplingParams
    fold: FoldOptions
    n: int = 1
    best_of: int = 1
    """Sequences per prompt, of which the n best are shown."""
    priority: int = 0
    cache_salt: str | None = None
    """What the client wants its cached prompts to be set apart by."""
    names_ids: bool = False
    """Whether scores name tokens by their ids, not their texts."""


def _seed(base: int, index: int) -> int:
    """Return base + index, wrapped to a signed 64-bit integer."""
    seed = base + index
    return seed if seed <= INT64_MAX else seed - 2**64


_SLICE = 32
"""Sequences that are handed over without a break: each takes some forty microseconds."""
_READER_CHECK = 0.5
"""Seconds between looks at whether a reader of very much goes on."""


class Submission:
    """The running sequences of one request; `close` must be called whatever happens."""

    def __init__(
        self,
        client: GenerationClient,
        table: TokenTable,
        metrics: FrontEndMetrics,
        spec: GenerationSpec,
        *,
        arrived: float,
        pinned_rank: int | None = None,
        reservation: Reservation | None = None,
        tenant: int = 0,
        cache_root: bytes = b"",
        show_cached: bool = True,
    ) -> None:
        """Nothing runs before `start`.

        `tenant` and `cache_root` are what engines are told (`engine.shared.messages.AddRequest`).
        `arrived` is when the request came, in monotonic seconds.
        """
        self._client = client
        self._table = table
        self._metrics = metrics
        self._arrived = arrived
        self._unfinished = len(spec.prompts) * spec.best_of
        self._spec = spec
        self._show_cached = show_cached
        self._pinned_rank = pinned_rank
        self._reservation = reservation
        self._tenant = tenant
        self._cache_root = cache_root
        self._streams: list[TokenStream] = []
        self._folds: list[ChoiceFold] = []
        self._timers: list[SequenceTimer] = []
        self._finish_reasons: list[str] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._parts: deque[RequestOutput] = deque()
        """Of an only sequence: what has been read and is still to be folded."""
        self._unread = Unread()
        self._something_arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._reading = False
        """Whether `next` is under way: what is unread then waits for nobody but this process."""

    async def start(self) -> None:
        """Hand every sequence to an engine, the pinned one if there is one.

        Others get their turn in between: a request may have thousands of sequences.

        Raises:
            NoEngineAvailable: `close` ends those that run already.
        """
        spec = self._spec
        for prompt in spec.prompts:
            echo = PromptEcho(self._table, prompt)
            params = PromptParams(
                prompt_tokens=len(prompt.token_ids),
                max_tokens=spec.sampling.max_tokens,
                n=spec.n,
                sequences=spec.best_of,
            )
            for _ in range(spec.best_of):
                if self._streams and len(self._streams) % _SLICE == 0:
                    await asyncio.sleep(0)
                stream = self._submit(self._client, prompt)
                self._folds.append(ChoiceFold(self._table, prompt, spec.fold, echo))
                self._timers.append(self._metrics.sequence(self._arrived, params, stream.times))
        self._metrics.submitted(self._arrived)

    def _submit(self, client: GenerationClient, prompt: Prompt) -> TokenStream:
        spec, index = self._spec, len(self._streams)
        sampling, request_id = spec.sampling, spec.request_id
        if index:
            seed = _seed(sampling.seed, index)
            sampling = msgspec.structs.replace(sampling, seed=seed)
            request_id = f"{request_id}-{index}"
        stream = client.submit(
            request_id,
            prompt.token_ids,
            sampling,
            priority=spec.priority,
            pinned_rank=self._pinned_rank,
            tenant=self._tenant,
            cache_root=self._cache_root,
        )
        self._streams.append(stream)
        return stream

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return self._unfinished == 0

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for and return everything new, as (sequence, delta).

        Raises:
            GenerationFailed: an engine gave a sequence up.
            RequestRefused: an engine cannot do what the request asks for.
            NoEngineAvailable: a sequence was lost and nothing can take it over.
        """
        if len(self._streams) == 1:
            if self._parts:
                await asyncio.sleep(0)
            else:
                self._parts.extend(parts(await self._streams[0].next()))
            return [(0, self._fold(0, self._parts.popleft()))]
        if not self._pumps:
            self._pumps = [
                asyncio.create_task(self._pump(index)) for index in range(len(self._streams))
            ]
        self._reading = True
        if self._unread:
            await asyncio.sleep(0)  # others may have something to do between parts of much
        else:
            await self._something_arrived.wait()
        self._something_arrived.clear()
        self._reading = False
        outputs = self._unread.take()
        if self._unread.has_room:
            self._taken.set()
            self._taken.clear()
        return [
            (index, self._fold(index, output))
            for index, output in outputs
            if not self._folds[index].finished
        ]

    async def _pump(self, index: int) -> None:
        finished = False
        while not finished:
            try:
                output = await self._streams[index].next()
            except Exception as error:
                self._unread.fail(error)
                finished = True
            else:
                finished = output.finish_reason is not None
                self._unread.put(index, output)
            self._something_arrived.set()
            if self._unread.full and not finished:
                await self._wait_for_reader()

    async def _wait_for_reader(self) -> None:
        """Hold a pump until something has been read; give up if nobody wants to read."""
        while self._unread.full:
            if not self._reading:
                slow = ReaderTooSlow("The client read too slowly: the request was aborted.")
                self._unread.fail(slow)
                self._stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._taken.wait(), _READER_CHECK)

    def _stop(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.close()

    def _fold(self, index: int, output: RequestOutput) -> Delta:
        fold, timer = self._folds[index], self._timers[index]
        counted = fold.num_tokens
        delta = fold.push(output)
        timer.tokens(fold.num_tokens - counted, fold.num_cached_tokens)
        if not counted and self._reservation is not None:
            prompt = self._spec.prompts[index // self._spec.best_of]
            self._reservation.computed(len(prompt.token_ids))
        if delta.finish_reason is not None:
            self._unfinished -= 1
            timer.finished(delta.finish_reason)
            self._finish_reasons.append(delta.finish_reason)
            if self._pumps:
                self._pumps[index].cancel()
            self._streams[index].close()
        return delta

    async def collect(self) -> list[Answer]:
        """Wait for all sequences; return the answers to show, prompt by prompt, best first."""
        sums = [DeltaSum() for _ in self._streams]
        while not self.done:
            for index, delta in await self.next():
                sums[index].add(delta)
        answers = [one.answer() for one in sums]
        for answer, fold in zip(answers, self._folds, strict=True):
            answer.prompt_logprobs = fold.prompt_logprobs
        spec = self._spec
        if spec.best_of == spec.n:
            return answers
        return [
            answers[index]
            for first in range(0, len(answers), spec.best_of)
            for index in self._best(range(first, first + spec.best_of))[: spec.n]
        ]

    def _best(self, indices: Sequence[int]) -> list[int]:
        """Order sequences by mean log probability per token, best first."""

        def score(index: int) -> float:
            fold = self._folds[index]
            return fold.cumulative_logprob / max(1, fold.num_tokens)

        return sorted(indices, key=score, reverse=True)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; a prompt counts once, whatever its choices."""
        return sum(fold.num_cached_tokens for fold in self._folds[:: self._spec.best_of])

    def usage(self) -> Usage:
        """Return the token counts so far; a prompt counts once however many choices it has."""
        spec = self._spec
        prompt_tokens = sum(len(prompt.token_ids) for prompt in spec.prompts)
        completion_tokens = sum(fold.num_tokens for fold in self._folds)
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(self.cached_tokens) if self._show_cached else UNSET,
        )

    @property
    def first_token(self) -> float | None:
        """When the first token of any sequence came, in monotonic seconds."""
        times = [timer.first_token for timer in self._timers]
        return min((each for each in times if each is not None), default=None)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each sequence ended, as far as they have."""
        return list(self._finish_reasons)

    def close(self, reason: str = "abort") -> None:
        """Abort whatever still runs, counting it as ended for `reason`; idempotent."""
        self._stop()
        for fold, timer in zip(self._folds, self._timers, strict=True):
            if not fold.finished:
                fold.finished = True
                timer.finished(reason)
                self._finish_reasons.append(reason)
