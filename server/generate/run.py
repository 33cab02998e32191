"""All sequences of one request, from the hand-over to the engines to the last delta."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from engine.shared.messages import RequestOutput, RequestTiming
from server.access.admission import Reservation
from server.access.limits import INT64_MAX
from server.api.shared.answer import PromptTokensDetails, Usage
from server.generate.fold import ChoiceFold, Delta, Prompt, folds_of
from server.generate.specification import GenerationSpec
from server.generate.unread import Unread, parts
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.router.generation_client import GenerationClient, ReaderTooSlow, TokenStream
from server.text.detokenizer import TokenTable


def _seed(base: int, index: int) -> int:
    """Return base + index, wrapped to a signed 64-bit integer."""
    seed = base + index
    return seed if seed <= INT64_MAX else seed - 2**64


_SLICE = 32
"""Sequences that are handed over without a break: each takes some forty microseconds."""
_READER_CHECK = 0.5
"""Seconds between looks at whether a reader of very much goes on."""


class Output(Protocol):
    """Where deltas go."""

    async def push(self, deltas: Sequence[tuple[int, Delta]], usage: Usage | None) -> None:
        """Take deltas, each with its sequence; with `usage` they are the last."""
        ...


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request, and what engines are told of that."""

    arrived: float
    """When the request came, in monotonic seconds."""
    pinned_rank: int | None = None
    """The engine that it has to run on."""
    reservation: Reservation | None = None
    tenant: int = 0
    cache_root: bytes = b""
    """These two as in `engine.shared.messages.AddRequest`."""
    adapter: str = ""
    """Version of the adapter that it is computed with, if any."""
    shows_cached: bool = True
    """Whether the usage says how much of the prompt was cached."""

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """Return token counts as this client may see them."""
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens) if self.shows_cached else UNSET,
        )


def first_token(timers: Iterable[SequenceTimer]) -> float | None:
    """Return when the first token of any sequence came, in monotonic seconds."""
    times = [timer.first_token for timer in timers]
    return min((each for each in times if each is not None), default=None)


class Run:
    """The sequences of one request; `close` must be called whatever happens.

    More than 15 attributes: five are what it is made with, and most others a list by sequence.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        sender: Sender,
        client: GenerationClient,
        table: TokenTable,
        metrics: FrontEndMetrics,
    ) -> None:
        """Nothing runs before `push_to`."""
        self._spec = spec
        self._sender = sender
        self._client = client
        self._table = table
        self._metrics = metrics
        self._unfinished = len(spec.prompts) * spec.best_of
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
        """Whether `_next` is under way: what is unread then waits for nobody but this process."""

    async def push_to(self, output: Output) -> None:
        """Hand every sequence to an engine, and all that comes of them to `output`.

        Raises:
            GenerationFailed: an engine gave a sequence up.
            RequestRefused: an engine cannot do what the request asks for.
            NoEngineAvailable: no engine takes a sequence, or one was lost and nothing can take it
                over.
        """
        await self._start()
        while True:
            deltas = await self._next()
            if not self._unfinished:
                break
            await output.push(deltas, None)
        await output.push(deltas, self.usage())

    async def _start(self) -> None:
        """Hand every sequence to an engine, the pinned one if there is one.

        Others get their turn in between: a request may have thousands of sequences.
        """
        spec, arrived = self._spec, self._sender.arrived
        for prompt in spec.prompts:
            params = PromptParams(
                len(prompt.token_ids), spec.sampling.max_tokens, spec.n, spec.best_of
            )
            for fold in folds_of(prompt, spec.best_of, spec.fold, self._table):
                if self._streams and len(self._streams) % _SLICE == 0:
                    await asyncio.sleep(0)
                stream = self._submit(prompt)
                self._folds.append(fold)
                timer = self._metrics.sequence(
                    arrived, params, stream.times, first=not self._timers
                )
                self._timers.append(timer)

    def _submit(self, prompt: Prompt) -> TokenStream:
        spec, sender, index = self._spec, self._sender, len(self._streams)
        sampling, request_id = spec.sampling, spec.request_id
        if index:
            seed = _seed(sampling.seed, index)
            sampling = msgspec.structs.replace(sampling, seed=seed)
            request_id = f"{request_id}-{index}"
        stream = self._client.submit(
            request_id,
            prompt.token_ids,
            sampling,
            priority=spec.priority,
            pinned_rank=sender.pinned_rank,
            tenant=sender.tenant,
            cache_root=sender.cache_root,
            group=self._streams[0].id if index else 0,
            adapter=sender.adapter,
        )
        self._streams.append(stream)
        return stream

    async def _next(self) -> list[tuple[int, Delta]]:
        """Wait for and return everything new, as (sequence, delta)."""
        if len(self._streams) == 1:
            if self._parts:
                await asyncio.sleep(0)
                return [(0, self._fold(0, self._parts.popleft()))]
            first, *more = parts(await self._streams[0].next())
            self._parts.extend(more)
            return [(0, self._fold(0, first))]
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
        timer.tokens(fold.num_tokens - counted, fold.num_cached_tokens, delta.finish_reason)
        reservation = self._sender.reservation
        if not counted and reservation is not None:
            prompt = self._spec.prompts[index // self._spec.best_of]
            reservation.computed(len(prompt.token_ids))
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._finish_reasons.append(delta.finish_reason)
            if self._pumps:
                self._pumps[index].cancel()
            self._streams[index].close()
        return delta

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; a prompt counts once, whatever its choices."""
        return sum([fold.num_cached_tokens for fold in self._folds[:: self._spec.best_of]])

    def usage(self) -> Usage:
        """Return the token counts so far; a prompt counts once however many choices it has."""
        completion_tokens = sum([fold.num_tokens for fold in self._folds])
        return self._sender.usage(
            self._spec.num_prompt_tokens, completion_tokens, self.cached_tokens
        )

    @property
    def timing(self) -> RequestTiming | None:
        """How long the first sequence took in engines; None as long as it has not ended in one."""
        return self._timers[0].timing if self._timers else None

    @property
    def first_token(self) -> float | None:
        """When the first token of any sequence came, in monotonic seconds."""
        return first_token(self._timers)

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
