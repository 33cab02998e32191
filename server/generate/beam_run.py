"""Beam search for one request: each beam's next token is an ordinary request to an engine."""

import asyncio

from engine.shared.messages import RequestOutput, SamplingParams, TokenLogprob
from server.generate.beams import Beam, Beams, BeamSearch
from server.generate.fold import ChoiceFold, Delta, failure
from server.generate.request import GenerationRequest, Prompt
from server.generate.run import first_token
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.router.generation_client import GenerationClient
from server.router.token_stream import RequestStream
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable


class BeamRun:
    """Runs the beam searches of one request; `close` must always be called.

    Every step resubmits all beams as prompts that include their tokens so far: all but the newest
    token of each is in the prefix cache. Beams move to other engines like any sequence.
    """

    def __init__(
        self,
        request: GenerationRequest,
        beams: Beams,
        client: GenerationClient,
        table: TokenTable,
        metrics: FrontEndMetrics,
    ) -> None:
        self._request = request
        self._beams = beams
        self._client = client
        self._table = table
        self._metrics = metrics
        self._streams: set[RequestStream] = set()
        self._timers: list[SequenceTimer] = []
        self._unfinished: list[SequenceTimer] = []
        self._num_sent = 0
        self._group = 0
        """Group ID of the request in engines, assigned with its first sequence."""
        self._num_tokens = 0
        self._cached: dict[int, int] = {}
        self.finish_reasons: list[str] = []
        """Finish reasons of the answers that have ended."""
        self.finished = False
        """Whether all searches have ended."""

    async def next(self) -> list[tuple[int, Delta]]:
        """Run the searches; return all of the best answers, each with its index.

        Raises:
            GenerationFailed: an engine failed on a beam.
            RequestRefused: an engine does not support the request.
            NoEngineAvailable: no engine accepts a beam.
        """
        prompts = self._request.prompts
        try:
            async with asyncio.TaskGroup() as group:
                searches = [
                    group.create_task(self._search(index, prompt))
                    for index, prompt in enumerate(prompts)
                ]
        except BaseExceptionGroup as failures:
            raise _first_of(failures) from None
        deltas = [
            self._shown(prompt, beam)
            for prompt, search in zip(prompts, searches, strict=True)
            for beam in search.result()
        ]
        self.finished = True
        return list(enumerate(deltas))

    async def _search(self, index: int, prompt: Prompt) -> list[Beam]:
        request, requested = self._request, self._request.sampling
        ends = frozenset(requested.stop_token_ids)
        if not requested.ignore_eos:
            ends |= self._table.tokenizer.eos_token_ids
        search = BeamSearch(self._beams, requested.max_tokens, ends, request.logprobs or 0)
        sampling = SamplingParams(
            max_tokens=1,
            seed=requested.seed,
            temperature=0.0,
            ignore_eos=True,
            logprobs=min(search.num_alternatives, self._table.tokenizer.vocab_size),
        )
        params = PromptParams(len(prompt.token_ids), requested.max_tokens, request.n, request.n)
        timers: list[SequenceTimer] = []
        while search.running:
            streams = [self._submit(prompt, beam, sampling) for beam in search.running]
            if not timers:
                timers = self._begin(params, streams[0])
            outputs = await asyncio.gather(*[self._next(stream) for stream in streams])
            if index not in self._cached:
                self._cached[index] = outputs[0].num_cached_tokens
            search.advance([_scores(each) for each in outputs])
        best = search.best(request.n)
        for timer, beam in zip(timers, best, strict=True):
            reason = "stop" if beam.ended else "length"
            timer.tokens(len(beam.token_ids), self._cached[index], reason)
            self._unfinished.remove(timer)
            self.finish_reasons.append(reason)
            self._num_tokens += len(beam.token_ids)
        return best

    def _begin(self, params: PromptParams, stream: RequestStream) -> list[SequenceTimer]:
        timers = []
        for _ in range(self._request.n):
            first = not self._timers
            timer = self._metrics.sequence(self._request.arrived, params, stream.times, first=first)
            self._timers.append(timer)
            self._unfinished.append(timer)
            timers.append(timer)
        return timers

    def _submit(self, prompt: Prompt, beam: Beam, sampling: SamplingParams) -> RequestStream:
        request = self._request
        self._num_sent += 1
        name = f"{request.request_id}-{self._num_sent}"
        token_ids = [*prompt.token_ids, *beam.token_ids]
        message = request.message(name, token_ids, sampling, self._group)
        stream = self._client.submit(message, request.pinned_rank)
        self._group = self._group or stream.id
        self._streams.add(stream)
        return stream

    async def _next(self, stream: RequestStream) -> RequestOutput:
        try:
            while True:
                output = await stream.next()
                if output.finish_reason in ("error", "abort"):
                    raise failure(output)
                if output.token_ids:
                    return output
        finally:
            stream.close()
            self._streams.discard(stream)

    def _shown(self, prompt: Prompt, beam: Beam) -> Delta:
        """Return a beam as if its tokens had been sampled."""
        scores = None if self._request.logprobs is None else list(beam.scores)
        end = beam.token_ids[-1] if beam.ended else None
        output = RequestOutput(
            0,
            list(beam.token_ids),
            "stop" if beam.ended else "length",
            stop_token_id=end,
            logprobs=scores,
        )
        return ChoiceFold(self._table, prompt, self._request).push(output)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache at the start of each search."""
        return sum(self._cached.values())

    @property
    def first_token(self) -> float | None:
        """Time of the first answer, in monotonic seconds."""
        return first_token(self._timers)

    def usage(self) -> Usage:
        """Return the tokens of prompts and answers; discarded beams are not counted."""
        return self._request.usage(self._num_tokens, self.cached_tokens)

    def close(self, reason: str = "abort") -> None:
        """Abort what still runs and count unfinished answers as ended; idempotent."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        for timer in self._unfinished:
            timer.finished(reason)
            self.finish_reasons.append(reason)
        self._unfinished.clear()


def _scores(output: RequestOutput) -> TokenLogprob:
    assert output.logprobs is not None, "they were asked for"
    return output.logprobs[0]


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
