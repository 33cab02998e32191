"""The beam searches of one request: each beam's next token is a normal request to the engines."""

import asyncio

from engine.shared.messages import RequestOutput, SamplingParams, TokenLogprob
from server.api.shared.answer import Usage
from server.generate.beams import Beam, Beams, BeamSearch
from server.generate.fold import ChoiceFold, Delta, Prompt, failure
from server.generate.run import Output, Sender, first_token
from server.generate.specification import GenerationSpec
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.router.generation_client import GenerationClient, TokenStream
from server.text.detokenizer import TokenTable


class BeamRun:
    """Searches for the answers to one request; `close` must be called whatever happens.

    Every step hands all beams to the engines again, as their prompts with what they have come to:
    the prefix cache has all but the newest tokens of them. Beams move to other engines as all
    sequences do.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        beams: Beams,
        sender: Sender,
        client: GenerationClient,
        table: TokenTable,
        metrics: FrontEndMetrics,
    ) -> None:
        """Nothing runs before `push_to`."""
        self._spec = spec
        self._beams = beams
        self._sender = sender
        self._client = client
        self._table = table
        self._metrics = metrics
        self._streams: set[TokenStream] = set()
        self._timers: list[SequenceTimer] = []
        self._unfinished: list[SequenceTimer] = []
        self._num_sent = 0
        self._group = 0
        """What engines call the request, once it has a sequence."""
        self._num_tokens = 0
        self._cached: dict[int, int] = {}
        self._finish_reasons: list[str] = []

    async def push_to(self, output: Output) -> None:
        """Search, and hand the best answers to `output` at once.

        Raises:
            GenerationFailed: an engine gave a beam up.
            RequestRefused: an engine cannot do what the request asks for.
            NoEngineAvailable: no engine takes a beam.
        """
        prompts = self._spec.prompts
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
        await output.push(list(enumerate(deltas)), self.usage())

    async def _search(self, index: int, prompt: Prompt) -> list[Beam]:
        spec = self._spec
        ends = frozenset(spec.sampling.stop_token_ids)
        if not spec.sampling.ignore_eos:
            ends |= self._table.tokenizer.eos_token_ids
        search = BeamSearch(self._beams, spec.sampling.max_tokens, ends, self._shown_alternatives)
        sampling = SamplingParams(
            max_tokens=1,
            seed=spec.sampling.seed,
            temperature=0.0,
            ignore_eos=True,
            logprobs=min(search.num_alternatives, self._table.tokenizer.vocab_size),
        )
        params = PromptParams(len(prompt.token_ids), spec.sampling.max_tokens, spec.n, spec.n)
        timers: list[SequenceTimer] = []
        while search.running:
            streams = [self._submit(prompt, beam, sampling) for beam in search.running]
            if not timers:
                timers = self._begin(params, streams[0])
            outputs = await asyncio.gather(*[self._next(stream) for stream in streams])
            if index not in self._cached:
                self._cached[index] = outputs[0].num_cached_tokens
            search.advance([_scores(each) for each in outputs])
        best = search.best(spec.n)
        for timer, beam in zip(timers, best, strict=True):
            reason = "stop" if beam.ended else "length"
            timer.tokens(len(beam.token_ids), self._cached[index], reason)
            self._unfinished.remove(timer)
            self._finish_reasons.append(reason)
            self._num_tokens += len(beam.token_ids)
        return best

    def _begin(self, params: PromptParams, stream: TokenStream) -> list[SequenceTimer]:
        timers = []
        for _ in range(self._spec.n):
            first = not self._timers
            timer = self._metrics.sequence(self._sender.arrived, params, stream.times, first=first)
            self._timers.append(timer)
            self._unfinished.append(timer)
            timers.append(timer)
        return timers

    def _submit(self, prompt: Prompt, beam: Beam, sampling: SamplingParams) -> TokenStream:
        sender = self._sender
        self._num_sent += 1
        stream = self._client.submit(
            f"{self._spec.request_id}-{self._num_sent}",
            [*prompt.token_ids, *beam.token_ids],
            sampling,
            priority=self._spec.priority,
            pinned_rank=sender.pinned_rank,
            tenant=sender.tenant,
            cache_root=sender.cache_root,
            adapter=sender.adapter,
            group=self._group,
        )
        self._group = self._group or stream.id
        self._streams.add(stream)
        return stream

    async def _next(self, stream: TokenStream) -> RequestOutput:
        """Wait for a beam's next token."""
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

    @property
    def _shown_alternatives(self) -> int:
        return (self._spec.sampling.logprobs or 0) if self._spec.fold.logprobs else 0

    def _shown(self, prompt: Prompt, beam: Beam) -> Delta:
        """Return a beam as what would have come of it had it been drawn."""
        scores = list(beam.scores) if self._spec.fold.logprobs else None
        end = beam.token_ids[-1] if beam.ended else None
        output = RequestOutput(
            0,
            list(beam.token_ids),
            "stop" if beam.ended else "length",
            stop_token_id=end,
            logprobs=scores,
        )
        return ChoiceFold(self._table, prompt, self._spec.fold).push(output)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had when each search began."""
        return sum(self._cached.values())

    @property
    def first_token(self) -> float | None:
        """When the first answer came, in monotonic seconds."""
        return first_token(self._timers)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each answer ended, as far as they have."""
        return list(self._finish_reasons)

    def usage(self) -> Usage:
        """Return the tokens of prompts and answers; beams that were left do not count."""
        return self._sender.usage(
            self._spec.num_prompt_tokens, self._num_tokens, self.cached_tokens
        )

    def close(self, reason: str = "abort") -> None:
        """Abort whatever still runs, counting answers that did not come to be; idempotent."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        for timer in self._unfinished:
            timer.finished(reason)
            self._finish_reasons.append(reason)
        self._unfinished.clear()


def _scores(output: RequestOutput) -> TokenLogprob:
    assert output.logprobs is not None, "they were asked for"
    return output.logprobs[0]


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of searches that failed together."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
