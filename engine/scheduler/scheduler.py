"""Plans the computation of each step, and turns step results into outputs.

There are no prefill and decode phases: a request has computed tokens and tokens to compute, and
every step assigns each request a part of a common token budget. `schedule` can be called again
before the previous plan's result is known; resources used by a plan in flight stay reserved until
`update` has processed its result.
"""

from collections import deque
from typing import NamedTuple

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import ExecutorInfo
from engine.batch.grammars import Grammars
from engine.kv.events import KvEventLog
from engine.kv.tiers import KvTiers
from engine.scheduler.adapter_slots import AdapterSlots
from engine.scheduler.admission import UNLIMITED, Grant, RankState, StepBudget
from engine.scheduler.block_table import CacheShape, lookahead_tokens
from engine.scheduler.encoder_cache import EncoderCache
from engine.scheduler.fairness import Fairness
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.outputs import Outputs, accept_tokens, grammar_output, pooled_output
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.planner import Planner
from engine.scheduler.preemption import Capacity
from engine.scheduler.prefix_cache import BlockChanges
from engine.scheduler.refusal import check_whole_prompts
from engine.scheduler.request import Request, RequestStatus
from engine.scheduler.request_table import RequestTable
from engine.scheduler.speculation import Speculator, draft_prices
from engine.scheduler.step_costs import StepCosts
from engine.shared.config import CacheConfig, SchedulerConfig
from engine.shared.messages import AddRequest, EngineCounters, RequestOutput


class Gauges(NamedTuple):
    """Current load."""

    waiting: int
    running: int
    kv_usage: float
    queued_prefill_tokens: int


class InFlight(NamedTuple):
    """A plan whose result is pending, with the request of each row."""

    plan: BatchPlan
    requests: list[Request]
    num_prefill_tokens: int
    planned_at: float = 0.0
    """In seconds of the loop's clock."""
    num_masked: int = 0
    """Rows of requests with a grammar."""


class Scheduler:
    """Continuous batching of requests over one executor's slots and KV blocks."""

    def __init__(
        self,
        scheduling: SchedulerConfig,
        cache: CacheConfig,
        executor: ExecutorInfo,
        grammars: Grammars | None = None,
        *,
        max_loras: int = 0,
        tiers: KvTiers | None = None,
        events: KvEventLog | None = None,
    ) -> None:
        """Plan for an executor.

        Args:
            max_loras: maximum number of adapters per step.
            tiers: storage of KV blocks beyond the executor's memory.
            events: log that is notified of blocks that become cached or are evicted.

        Raises:
            ValueError: prompts are to be computed in one step, which cannot hold the longest.
        """
        # Without a KV cache, a block stands for a whole sequence.
        block_size = cache.block_size if executor.has_kv else executor.max_model_len
        lookahead = lookahead_tokens(
            scheduling,
            executor.max_model_len,
            num_stages=executor.num_stages,
            in_one_step=executor.in_one_step,
        )
        shape = CacheShape(block_size, executor.cache_windows, lookahead)
        self.max_model_len = shape.longest(executor.num_kv_blocks, executor.max_model_len)
        """Maximum sequence length that the model supports and that fits into an empty KV cache."""
        check_whole_prompts(scheduling, cache, executor, self.max_model_len)
        counters = EngineCounters() if tiers is None else tiers.counters
        self.counters = counters
        by_priority = scheduling.scheduling_policy == "priority"
        self._kv = KVCacheManager(
            executor.num_kv_blocks,
            block_size,
            enable_prefix_caching=cache.enable_prefix_caching and not executor.in_one_step,
            shape=shape,
            tiers=tiers,
            events=events,
        )
        self._tiers = tiers
        self.adapters = AdapterSlots(max_loras)
        self._costs = StepCosts()
        self._fairness = Fairness(
            self._costs,
            Capacity(scheduling.max_num_seqs, executor.num_kv_blocks),
            max_prefill=scheduling.max_tenant_prefill_tokens
            or max(1, scheduling.max_num_batched_tokens // 4),
            max_slowdown=scheduling.max_slowdown or None,
            by_priority=by_priority,
        )
        self._speculator = None
        if scheduling.max_draft_tokens:
            prices = draft_prices(scheduling, executor)
            self._speculator = Speculator(scheduling, prices, counters)
        self.encoder = EncoderCache(
            executor,
            counters,
            step_tokens=scheduling.encoder_budget,
            num_bytes=cache.encoder_cache_bytes,
        )
        self._requests = RequestTable(
            executor=executor,
            max_num_seqs=scheduling.max_num_seqs,
            max_model_len=self.max_model_len,
            by_priority=by_priority,
            kv=self._kv,
            fairness=self._fairness,
            adapters=self.adapters,
            encoder=self.encoder,
            grammars=grammars,
            speculator=self._speculator,
            counters=counters,
        )
        self._isolation = self._requests.isolation
        self._planner = Planner(self._requests, scheduling)
        self._has_kv = executor.has_kv
        self._refused: Outputs = {}  # outputs of suspects that failed before their first step
        self._in_flight: deque[InFlight] = deque()
        self._num_plans = 0
        self._num_passed_over = 0
        self._ended_at = 0.0
        self.admits = True
        """Whether waiting requests are admitted; if not, running ones finish and others wait."""

    # -- queries ---------------------------------------------------------------------------------

    @property
    def next_tokens(self) -> int:
        """Maximum tokens that the next step can compute, plus image patches, each of which costs
        about as much as a token."""
        tokens = len(self._requests.running) + self._requests.queued_tokens
        return min(tokens, self._planner.max_tokens) + self.encoder.max_patches

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any plan's result is pending."""
        return bool(self._requests.all or self._in_flight)

    @property
    def has_requests(self) -> bool:
        """Whether any unfinished request will be computed, or any final output is unsent."""
        return bool(
            (self._requests.all if self._may_admit else self._requests.running) or self._refused
        )

    @property
    def runs_any(self) -> bool:
        """Whether any request has a slot, or is in a plan in flight."""
        in_flight = any(each.requests for each in self._in_flight)
        return bool(self._requests.running or in_flight or self._isolation.current_id)

    @property
    def _may_admit(self) -> bool:
        """Whether requests are admitted; always for a begun suspect, which blocks the others."""
        return self.admits or bool(self._isolation.current_id)

    @property
    def needs_plan(self) -> bool:
        """Whether the next plan can have rows.

        Requests waiting for grammars get none, nor do those whose last token is in flight.
        """
        requests = self._requests
        if self._isolation.current_id in requests.compiling:
            return False
        others = (
            len(requests.all) - len(requests.compiling)
            if self._may_admit
            else len(requests.running)
        )
        if not self._in_flight or others > len(requests.running):
            return others > 0
        return any(each.queued_tokens or each.can_decode for each in requests.running.values())

    @property
    def exclusive_request(self) -> int:
        """Id of the request that runs alone; 0 if none does."""
        return self._isolation.current_id

    def gauges(self) -> Gauges:
        """Return the current load."""
        requests, usage = self._requests, self._kv.usage if self._has_kv else 0.0
        return Gauges(requests.num_waiting, len(requests.running), usage, requests.queued_tokens)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that wait for grammars or KV blocks, not for a slot."""
        return len(self._requests.compiling)

    def rank_state(self, last_step_us: int = 0, last_prefill_tokens: int = 0) -> RankState:
        """Return this rank's input to the admission policy.

        The arguments describe the newest completed step, for policies that weigh costs.
        """
        return self._planner.rank_state(self._num_passed_over, last_step_us, last_prefill_tokens)

    def describe_in_flight(self) -> str:
        """Describe the plans in flight, using only numbers and names, for the log."""
        lines = [
            f"{len(self._in_flight)} plan(s) in flight, {len(self._requests.running)} running, "
            f"{len(self._requests.waiting)} waiting, {self._kv.pool.num_free} free blocks"
        ]
        for plan, requests, *_ in self._in_flight:
            lines.append(
                f"step {plan.step}: {len(requests)} rows, {plan.num_tokens} tokens, "
                f"{len(plan.starting)} starting"
            )
            lines += [
                f"  {request.id} ({request.request_id}): slot {slot}, start {start}, "
                f"count {count}, {request.num_tokens} tokens, {request.table.num_blocks} blocks"
                for request, slot, start, count in zip(
                    requests, plan.slots, plan.starts, plan.counts, strict=True
                )
            ]
        return "\n".join(lines)

    # -- arrival and removal of requests ---------------------------------------------------------

    def add(self, message: AddRequest, now: float = 0.0) -> RequestOutput | None:
        """See `RequestTable.add`. Times, here and below, are only used to report durations."""
        return self._requests.add(message, now)

    def queue_compiled(self) -> Outputs:
        """See `RequestTable.queue_compiled`."""
        return self._requests.queue_compiled()

    def abort(self, ids: list[int]) -> None:
        """Drop requests without sending output; unknown ids are ignored."""
        for request_id in ids:
            request = self._requests.all.get(request_id)
            if request is not None:
                self._requests.retire(request)

    def abort_all(self) -> Outputs:
        """Drop all requests; return their abort outputs by front end."""
        outputs: Outputs = {}
        for request in list(self._requests.all.values()):
            output = RequestOutput(request.id, [], "abort")
            outputs.setdefault(request.front_end, []).append(output)
            self._requests.retire(request)
        return outputs

    def abort_front_end(self, front_end: int) -> None:
        """Drop all requests of a front end."""
        self.abort([r.id for r in self._requests.all.values() if r.front_end == front_end])

    def preempt_all(self) -> None:
        """Preempt all running requests, which are requeued in order, and vacate all slots.

        No plan may be in flight.
        """
        assert not self._in_flight
        for request in self._fairness.in_order(self._requests.running.values()):
            self._requests.preempt(request)
        self.adapters.vacate()
        self.encoder.reset()

    @property
    def waiting_adapters(self) -> list[str]:
        """Adapters of requests that wait for a slot."""
        return list(self._requests.waiting.adapters)

    def uses_adapter(self, version: str) -> bool:
        """Return whether any request, or a plan in flight, uses an adapter version."""
        in_flight = (r for entry in self._in_flight for r in entry.requests)
        return any(r.adapter == version for r in (*self._requests.all.values(), *in_flight))

    def reset_prefix_cache(self, *, tiers: bool = False) -> int:
        """Drop all cached prefixes, with `tiers` also stored ones; return the number of blocks."""
        if tiers and self._tiers is not None:
            self._tiers.clear()
        return self._kv.reset_prefix_cache()

    def blocks_since(self, after: int) -> BlockChanges | None:
        """Return the KV blocks cached or evicted since change number `after`."""
        return self._kv.blocks_since(after)

    # -- one step --------------------------------------------------------------------------------

    def schedule(self, grant: Grant = UNLIMITED, now: float = 0.0) -> BatchPlan:
        """Plan the next step; every plan must be passed to `update`, in order."""
        self._num_plans += 1
        builder = PlanBuilder(self._num_plans, now)
        if not self._may_admit:
            grant = grant._replace(admit_new=False)
        budget = StepBudget(self._planner.max_tokens, grant)
        if self._isolation.is_due and self.admits:
            # An empty step: an isolated request is announced before it runs. Its grammar is
            # compiled within its turn, since compiling may be what crashes the engine.
            if not any(entry.requests for entry in self._in_flight):
                suspect = self._isolation.begin()
                answer = self._requests.compile(suspect)
                if answer is not None:
                    self._refused.setdefault(suspect.front_end, []).append(answer)
        else:
            self._planner.plan(builder, budget, self._num_passed_over)
        if self._speculator is not None:
            headroom = self._planner.headroom
            self._speculator.propose(builder, budget, self._kv, self._fairness, headroom=headroom)
        self._num_passed_over = len(self._requests.waiting)
        plan, requests = builder.seal()
        masked = 0
        if self._fairness.num_masked:
            masked = sum([each.sampling.grammar is not None for each in requests])
        self._in_flight.append(InFlight(plan, requests, plan.num_prefill_tokens, now, masked))
        return plan

    def update(self, plan: BatchPlan, result: BatchResult, now: float = 0.0) -> Outputs:
        """Process the result of the oldest plan in flight; return the new outputs by front end."""
        entry = self._in_flight[0]
        assert plan is entry.plan, "results have to come in the order of the plans"
        outputs, self._refused = self._refused, {}
        self._process(entry, result, outputs, now)
        self._observe(entry, result, now)
        self._in_flight.popleft()
        if self._isolation.current is not None:
            self._isolation.landed(entry.requests, plan.samples)
        return outputs

    def _process(self, entry: InFlight, result: BatchResult, outputs: Outputs, now: float) -> None:
        plan, requests, step_tokens, *_ = entry
        for row, logprobs in result.prompt_logprobs.items():
            if requests[row].lacks_prompt_logprobs:  # recomputed after a preemption
                start = plan.starts[row]
                requests[row].prompt_logprobs[start : start + len(logprobs)] = logprobs
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        slides = self._kv.slides
        masked = bool(result.mask_us or self._fairness.mask_us)
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
                    count = 1 + accepted  # the others have to be recomputed
                counts = sampled and not stalled
                vector = result.pooled.get(row)
                output = self._accept(request, result, drawn, vector, now) if counts else None
                computed = min(start + count, len(request.token_ids))
                table = request.table
                if computed >= table.next_commit or (slides and computed >= table.next_release):
                    self._settle_blocks(request, computed)
                if stalled:
                    output = self._requests.stall(request, result.grammar_stalls[request.slot], now)
                if output is not None:
                    step_tokens += len(output.token_ids)
                    outputs.setdefault(request.front_end, []).append(output)
                    if output.finish_reason is not None:
                        self._requests.retire(request)
            if request.status is not running:
                self._requests.release_when_idle(request)
        if requests:
            self.counters.count_step(step_tokens)

    def _settle_blocks(self, request: Request, computed: int) -> None:
        """Commit the blocks filled by computed tokens, and free those behind the window."""
        table = request.table
        if computed >= table.next_commit:
            self._kv.commit(table, request.token_ids, computed)
        if computed >= table.next_release and request.status is RequestStatus.RUNNING:
            self._kv.release_behind(table, computed)

    def _settle_proposal(self, request: Request, accepted: int) -> None:
        """Count the accepted draft tokens as computed."""
        if self._speculator is not None:
            self._speculator.verified(request, request.num_proposed_tokens, accepted)
        request.num_proposed_tokens = 0
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens += accepted
        else:  # preempted: everything will be recomputed
            self._requests.requeue_tokens(request, accepted)

    def _accept(
        self,
        request: Request,
        result: BatchResult,
        drawn: range,
        vector: bytes | None,
        now: float,
    ) -> RequestOutput:
        """Append sampled tokens to their request; return the output for them or a vector."""
        request.num_pending_tokens -= 1
        if not request.has_emitted and not request.was_taken_over:
            self.counters.prompt_tokens += request.num_prompt_tokens
        if vector is not None:
            self.counters.pooled_sequences += 1
            return pooled_output(request, vector, now)
        tokens = result.token_ids[drawn.start : drawn.stop]
        logprobs = None
        if result.logprobs is not None and request.sampling.logprobs is not None:
            entries = result.logprobs[drawn.start : drawn.stop]
            logprobs = [entry for entry in entries if entry is not None]
        output = accept_tokens(request, tokens, logprobs, now)
        self.counters.generation_tokens += len(output.token_ids)
        if request.slot in result.grammar_ends:
            output = grammar_output(request, output, result.grammar_ends[request.slot], now)
        return output

    def _observe(self, entry: InFlight, result: BatchResult, now: float) -> None:
        # From its plan or the end of the previous step.
        seconds = now - max(entry.planned_at, self._ended_at)
        self._ended_at = now
        plan = entry.plan
        if plan.encoded:
            return  # the cost of rows cannot be separated from encoding
        prefill = entry.num_prefill_tokens - sum(plan.counts[row] for row in plan.proposed)
        rows = plan.num_tokens - prefill
        self._costs.observe(
            rows, prefill, seconds, num_masked=entry.num_masked, mask_wait_us=result.mask_wait_us
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if anything is leaked, wrongly shared or miscounted."""
        known = {id(r): r for r in self._requests.all.values()}
        known |= {id(r): r for entry in self._in_flight for r in entry.requests}
        self._requests.check_integrity(known)
        assert all(r.num_steps_in_flight > 0 for r in known.values() if r.num_proposed_tokens)
