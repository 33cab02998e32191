"""What the result of a step means for the requests that it computed."""

from engine.batch.batch import BatchResult
from engine.scheduler.arrivals import Arrivals
from engine.scheduler.fairness import Fairness
from engine.scheduler.gauges import InFlight
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.outputs import Outputs, accept_tokens, grammar_output, pooled_output
from engine.scheduler.request import Request, RequestStatus
from engine.scheduler.request_table import RequestTable
from engine.scheduler.slots import Slots
from engine.scheduler.speculation import Speculator
from engine.shared.messages import EngineCounters, RequestOutput


class Results:
    """Gives drawn tokens to their requests, and ends those that are done."""

    def __init__(
        self,
        books: RequestTable,
        arrivals: Arrivals,
        kv: KVCacheManager,
        slots: Slots,
        fairness: Fairness,
        speculator: Speculator | None,
        counters: EngineCounters,
    ) -> None:
        self._books = books
        self._arrivals = arrivals
        self._kv = kv
        self._slots = slots
        self._fairness = fairness
        self._speculator = speculator
        self._counters = counters

    def take(self, entry: InFlight, result: BatchResult, outputs: Outputs, now: float) -> None:
        """Add to `outputs` what the result of a plan adds to each request."""
        plan, requests, step_tokens, _ = entry
        for row, logprobs in result.prompt_logprobs.items():
            if requests[row].lacks_prompt_logprobs:
                requests[row].add_prompt_logprobs(plan.starts[row], logprobs)
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        slides = self._kv.slides
        masked = bool(result.mask_us) or self._fairness.any_costly_masks
        first = 0
        for row, (request, start, count, sampled) in enumerate(
            zip(requests, plan.starts, plan.counts, plan.samples, strict=True)
        ):
            drawn = range(first, first + sampled + result.accepted.get(row, 0))
            first = drawn.stop
            request.num_steps_in_flight -= 1
            if masked and sampled and request.status is running:
                self._fairness.masked(request, result.mask_us.get(request.slot, 0))
            if request.status is not finished:
                stalled = sampled and request.slot in result.grammar_stalls
                if row in result.accepted:
                    accepted = 0 if stalled else result.accepted[row]
                    self._settle_proposal(request, accepted)
                    count = 1 + accepted  # the others have to be computed again
                counts = sampled and not stalled
                vector = result.pooled.get(row)
                output = self._accept(request, result, drawn, vector, now) if counts else None
                computed = min(start + count, len(request.token_ids))
                table = request.table
                if computed >= table.next_commit or (slides and computed >= table.next_release):
                    self._settle_blocks(request, computed)
                if stalled:
                    output = self._arrivals.stall(request, result.grammar_stalls[request.slot], now)
                if output is not None:
                    step_tokens += len(output.token_ids)
                    outputs.setdefault(request.front_end, []).append(output)
                    if output.finish_reason is not None:
                        self._books.retire(request)
            if request.status is not running:
                self._slots.release_when_idle(request)
        if requests:
            self._counters.count_step(step_tokens)

    def _settle_blocks(self, request: Request, computed: int) -> None:
        """Share the blocks that its first tokens fill, and free those that it needs no longer."""
        table = request.table
        if computed >= table.next_commit:
            self._kv.commit(table, request.token_ids, computed)
        if computed >= table.next_release and request.status is RequestStatus.RUNNING:
            self._kv.release_behind(table, computed)

    def _settle_proposal(self, request: Request, accepted: int) -> None:
        """Count the proposed tokens that were right as computed."""
        if self._speculator is not None:
            self._speculator.verified(request, request.num_proposed_tokens, accepted)
        request.num_proposed_tokens = 0
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens += accepted
        else:  # preempted: everything will be computed again
            self._books.requeue_tokens(request, accepted)

    def _accept(
        self,
        request: Request,
        result: BatchResult,
        drawn: range,
        vector: bytes | None,
        now: float,
    ) -> RequestOutput:
        """Append drawn tokens to their request and return the output for them, or for a vector."""
        request.num_pending_tokens -= 1
        if not request.has_emitted and not request.was_taken_over:
            self._counters.prompt_tokens += request.num_prompt_tokens
        if vector is not None:
            self._counters.pooled_sequences += 1
            return pooled_output(request, vector, now)
        tokens = result.token_ids[drawn.start : drawn.stop]
        logprobs = None
        if result.logprobs is not None and request.sampling.logprobs is not None:
            entries = result.logprobs[drawn.start : drawn.stop]
            logprobs = [entry for entry in entries if entry is not None]
        output = accept_tokens(request, tokens, logprobs, now)
        self._counters.generation_tokens += len(output.token_ids)
        if request.slot in result.grammar_ends:
            output = grammar_output(request, output, result.grammar_ends[request.slot], now)
        return output
