"""Decides what each step computes, and turns what it produced into outputs.

There are no prefill and decode phases: a request has tokens computed and tokens to compute, and
every step gives each request some of a common token budget. `schedule` may be called again before
the result of the plan before is known; everything a plan in flight uses stays reserved until
`update` has seen that plan's result.
"""

import logging
import sys
from collections import deque

from engine.config import CacheConfig, SchedulerConfig
from engine.executor.interface import ExecutorInfo
from engine.messages import AddRequest, RequestOutput
from engine.scheduler.accounts import Counters, Gauges, InFlight
from engine.scheduler.admission import UNLIMITED, Grant, RankState, StepBudget
from engine.scheduler.batch import BatchPlan, BatchResult, SlotBlocks
from engine.scheduler.draft import Draft
from engine.scheduler.fairness import PrefillParts, Shares
from engine.scheduler.grammars import Grammars
from engine.scheduler.isolation import Isolation
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.outputs import Outputs, accept_tokens, grammar_output, refused_output
from engine.scheduler.precedence import Precedence
from engine.scheduler.preemption import Engine, Room
from engine.scheduler.refusal import refusal
from engine.scheduler.request import Request, RequestStatus, request_from_message
from engine.scheduler.slots import Slots
from engine.scheduler.speculation import Speculator
from engine.scheduler.waiting import WaitingQueue

ADMISSION_HEADROOM = 0.01
"""Share of the KV blocks that an admission leaves free for the running sequences to grow into,
so that the newcomer is not preempted by the next step."""

MAX_RENEWALS = 4
"""How often the grammar of one request is compiled anew, each time at the cost of a prefill."""

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching of requests over one executor's slots and KV blocks."""

    def __init__(
        self,
        scheduling: SchedulerConfig,
        cache: CacheConfig,
        executor: ExecutorInfo,
        grammars: Grammars | None = None,
    ) -> None:
        self.max_model_len = min(executor.max_model_len, executor.num_kv_blocks * cache.block_size)
        """Longest sequence that the model takes and that fits into the KV cache alone."""
        self.counters = Counters()
        self._speculator = (
            Speculator(scheduling, self.counters) if scheduling.speculative_ngram else None
        )
        self._vocab_size = executor.vocab_size
        self._eos_token_ids = frozenset(executor.eos_token_ids)
        self._max_batched_tokens = scheduling.max_num_batched_tokens
        self._kv = KVCacheManager(
            executor.num_kv_blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._headroom = int(executor.num_kv_blocks * ADMISSION_HEADROOM)
        self._by_priority = scheduling.scheduling_policy == "priority"
        self._shares = Shares(scheduling.most_tenant_prefill)
        self._parts = self._shares.parts()
        self._waiting = WaitingQueue(self._shares)
        self._precedence = Precedence(
            self._shares,
            Engine(scheduling.max_num_seqs, executor.num_kv_blocks),
            by_priority=self._by_priority,
        )
        self._max_prefill_tokens = scheduling.long_prefill_token_threshold or sys.maxsize
        self._grammars = grammars
        self._compiling: dict[int, Request] = {}  # wait for their grammars, not in the queue yet
        self._requests: dict[int, Request] = {}
        self._running: dict[int, Request] = {}  # in order of admission
        self._num_slots = scheduling.max_num_seqs
        self._slots = Slots(self._num_slots, self._kv, grammars)
        self._isolation = Isolation()
        self._refused: Outputs = {}  # answers to suspects whose turn ended before its first step
        self._in_flight: deque[InFlight] = deque()
        self._num_plans = 0
        self._num_arrivals = 0
        self._queued_tokens = 0
        self._num_passed_over = 0

    # -- what is there ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any plan's result is not known."""
        return bool(self._requests or self._in_flight)

    @property
    def needs_step(self) -> bool:
        """Whether a step would do anything now: it would not for requests without their grammar."""
        if self._isolation.current_id in self._compiling:
            return bool(self._in_flight)
        return len(self._requests) > len(self._compiling) or bool(self._in_flight)

    @property
    def alone(self) -> int:
        """Id of the request that nobody else is planned beside; 0 if all run together."""
        return self._isolation.current_id

    def gauges(self) -> Gauges:
        """Return the load right now."""
        waiting = len(self._waiting) + len(self._compiling) + len(self._isolation)
        return Gauges(waiting, len(self._running), self._kv.usage, self._queued_tokens)

    @property
    def num_deferred(self) -> int:
        """Those of the waiting requests that have no use for a slot before their grammar."""
        return len(self._compiling)

    def rank_state(self, last_step_us: int = 0, last_prefill_tokens: int = 0) -> RankState:
        """Return what an admission policy is told about this rank.

        The arguments describe the newest step that is over, for policies that weigh costs.
        """
        cap = self._max_prefill_tokens
        parts = self._shares.parts()
        running = self._isolation.planned(self._running.values())
        partials = [
            parts.take(r.tenant, min(r.queued_tokens, cap)) for r in running if r.queued_tokens
        ]
        decodes = len(running) - len(partials)
        ready_tokens, ready_requests = self._ready_prefill(partials, decodes, parts)
        return RankState(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prefill_tokens=self._queued_tokens,
            free_kv_blocks=self._kv.num_free_blocks,
            decodes=decodes,
            ready_prefill_tokens=ready_tokens,
            ready_prefills=ready_requests,
            passed_over=self._num_passed_over,
            last_step_us=last_step_us,
            last_prefill_tokens=last_prefill_tokens,
        )

    def _ready_prefill(
        self, partials: list[int], decodes: int, parts: PrefillParts
    ) -> tuple[int, int]:
        """Return how many prefill tokens, of how many requests, the next step has room for."""
        room = max(0, self._max_batched_tokens - decodes)
        tokens, requests = sum(partials), len(partials)
        slots = self._slots.num_free
        blocks = self._kv.num_free_blocks - (self._headroom if self._running else 0)
        for request in self._isolation.admissible(self._waiting, self._compiling):
            if tokens >= room or slots == 0 or request.num_steps_in_flight:
                break
            cached, needed = self._kv.needs(
                request.table, request.token_ids, use_cache=not request.lacks_prompt_logprobs
            )
            if needed > blocks:
                break
            slots -= 1
            blocks -= needed
            wanted = min(request.queued_tokens - cached, self._max_prefill_tokens)
            tokens += parts.take(request.tenant, wanted)
            requests += 1
        return min(tokens, room), requests

    def describe_in_flight(self) -> str:
        """Return what was scheduled and is not done, in numbers and names only, for the log."""
        lines = [
            f"{len(self._in_flight)} plan(s) in flight, {len(self._running)} running, "
            f"{len(self._waiting)} waiting, {self._kv.num_free_blocks} free blocks"
        ]
        lines += [entry.describe() for entry in self._in_flight]
        return "\n".join(lines)

    # -- requests come and go --------------------------------------------------------------------

    def add(self, message: AddRequest, now: float = 0.0) -> RequestOutput | None:
        """Queue a request; one that cannot run or has nothing left to do is answered at once.

        The time, here and below, only serves to say how long requests took.
        """
        if message.id in self._requests:
            name = message.request_id
            fields = {"request_id": name}
            logger.warning("request %s (%d) is here already", name, message.id, extra=fields)
            return None
        reason = refusal(message, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        if reason is not None:
            return RequestOutput(message.id, [], finish_reason="error", error=reason)
        request = request_from_message(
            message,
            arrival=self._num_arrivals,
            priority=message.priority if self._by_priority else 0,
            max_model_len=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
            now=now,
        )
        if request.num_tokens >= request.max_total_tokens:
            return RequestOutput(message.id, [], finish_reason="length")
        if message.sampling.grammar is not None and self._grammars is None:
            error = "this engine has no tokenizer for grammars"
            return RequestOutput(message.id, [], finish_reason="error", error=error)
        self._requests[request.id] = request
        self._shares.come(request.tenant)
        self._queued_tokens += request.queued_tokens
        if request.steps_alone:
            self._isolation.push(request)
            return None
        return self._compile(request)

    def _compile(self, request: Request) -> RequestOutput | None:
        """Queue the request as soon as its grammar, if it has one, is compiled."""
        self._compiling[request.id] = request
        spec = request.sampling.grammar
        if spec is not None and self._grammars is not None:
            request.grammar = self._grammars.ask(spec)
            self.counters.grammar_requests += 1
            self.counters.grammar_waits += not request.grammar.settled
        return self._queue_compiled(request)

    def queue_compiled(self) -> Outputs:
        """Queue the requests whose grammars have been compiled meanwhile.

        Returns:
            The answers to those whose grammars cannot be compiled.
        """
        outputs: Outputs = {}
        for request in list(self._compiling.values()):
            answer = self._queue_compiled(request)
            if answer is not None:
                outputs.setdefault(request.front_end, []).append(answer)
        return outputs

    def _queue_compiled(self, request: Request) -> RequestOutput | None:
        """Queue the request if nothing is left to be compiled for it; its turn counts from now."""
        grammar = request.grammar
        if grammar is not None and not grammar.settled:
            return None
        if grammar is not None and grammar.error is not None:
            self._retire(request)
            return refused_output(request, grammar.error)
        del self._compiling[request.id]
        if request.num_renewals:
            self._waiting.push(request)
            return None
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.push(request)
        return None

    def abort(self, ids: list[int]) -> None:
        """Drop requests without any output; unknown ids are ignored."""
        for request_id in ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._retire(request)

    def abort_front_end(self, front_end: int) -> None:
        """Drop all requests of a front end."""
        self.abort([r.id for r in self._requests.values() if r.front_end == front_end])

    def preempt_all(self) -> None:
        """Give up all slots and blocks; the requests wait to be computed again, in their order.

        No plan may be in flight.
        """
        assert not self._in_flight
        for request in self._precedence.in_order(self._running.values()):
            self._preempt(request)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and return how many blocks they had."""
        return self._kv.reset_prefix_cache()

    # -- one step --------------------------------------------------------------------------------

    def schedule(self, grant: Grant = UNLIMITED, now: float = 0.0) -> BatchPlan:
        """Plan the next step; every plan has to be given to `update`, in order."""
        draft = Draft(now)
        budget = StepBudget(self._max_batched_tokens, grant)
        self._parts = self._shares.parts()
        if self._isolation.is_due:
            self._begin_turn()  # an empty step: whoever runs alone is announced before it runs
        elif self._isolation.current is not None:
            self._schedule_alone(draft, budget, self._isolation.current)
        else:
            self._schedule_all(draft, budget)
        if self._speculator is not None:
            self._speculator.guess(draft, budget, self._kv, headroom=self._headroom)
        self._num_passed_over = len(self._waiting)
        self._num_plans += 1
        plan, requests = draft.seal(self._num_plans)
        self._in_flight.append(InFlight(plan, requests, draft.num_prefill_tokens))
        return plan

    def update(self, plan: BatchPlan, result: BatchResult, now: float = 0.0) -> Outputs:
        """Take the result of the oldest plan in flight and return what it adds to each request."""
        expected, requests, step_tokens = self._in_flight[0]
        assert plan is expected, "results have to come in the order of the plans"
        outputs, self._refused = self._refused, {}
        for row, logprobs in result.prompt_logprobs.items():
            if requests[row].lacks_prompt_logprobs:
                requests[row].add_prompt_logprobs(plan.starts[row], logprobs)
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        first = 0
        for row, (request, start, count, sampled) in enumerate(
            zip(requests, plan.starts, plan.counts, plan.samples, strict=True)
        ):
            drawn = range(first, first + sampled + result.accepted.get(row, 0))
            first = drawn.stop
            request.num_steps_in_flight -= 1
            if request.status is not finished:
                stall = result.grammar_stalls.get(request.slot) if sampled else None
                if row in result.accepted:
                    accepted = result.accepted[row] if stall is None else 0
                    self._settle_proposal(request, accepted)
                    count = 1 + accepted  # the others have to be computed again
                counts = sampled and stall is None
                output = self._accept(request, result, drawn, now) if counts else None
                computed = min(start + count, len(request.token_ids))
                if computed >= request.table.next_commit:
                    self._kv.commit(request.table, request.token_ids, computed)
                if stall is not None:
                    output = self._renew_grammar(request, stall)
                if output is not None:
                    step_tokens += len(output.token_ids)
                    outputs.setdefault(request.front_end, []).append(output)
                    if output.finish_reason is not None:
                        self._retire(request)
            if request.status is not running:
                self._slots.release_when_idle(request)
        self._in_flight.popleft()
        if requests:
            self.counters.count_step(step_tokens)
        if self._isolation.current is not None:
            self._isolation.landed(requests, plan.samples)
        return outputs

    def check_integrity(self) -> None:
        """Check that slots, blocks and gauges agree with the requests.

        Raises:
            AssertionError: something is leaked, shared wrongly or counted wrongly.
        """
        known = {id(r): r for r in self._requests.values()}
        known |= {id(r): r for entry in self._in_flight for r in entry.requests}
        self._slots.check_integrity(known.values())
        assert self._queued_tokens == sum(r.queued_tokens for r in known.values())
        queued = len(self._waiting) + len(self._compiling) + len(self._isolation)
        assert len(self._requests) == len(self._running) + queued
        self._shares.check_integrity(self._requests.values(), self._running.values())
        assert all(r.num_steps_in_flight > 0 for r in known.values() if r.num_proposed_tokens)
        if self._speculator is not None:
            assert self._speculator.num_tracked <= len(self._running)

    # -- stages of schedule ----------------------------------------------------------------------

    def _schedule_all(self, draft: Draft, budget: StepBudget) -> None:
        if budget.can_admit and self._waiting:
            self._make_room()
        self._shares.begin_step()
        self._parts = self._shares.parts()
        short = self._kv.num_free_blocks < len(self._running)
        self._precedence.look(self._running.values(), short=short)
        partials = self._schedule_decodes(draft, budget)
        self._schedule_partials(draft, budget, partials)
        self._schedule_waiting(draft, budget)

    def _begin_turn(self) -> None:
        """Begin a suspect's turn unless the steps of others are in flight.

        Its grammar is compiled within its turn: that may be what kills.
        """
        if any(entry.requests for entry in self._in_flight):
            return
        request = self._isolation.begin()
        answer = self._compile(request)
        if answer is not None:
            self._refused.setdefault(request.front_end, []).append(answer)

    def _schedule_alone(self, draft: Draft, budget: StepBudget, request: Request) -> None:
        """Plan the next step of a suspect; others keep what they hold unless it needs that."""
        for partial in self._schedule_decodes(draft, budget):
            count = budget.try_continue(self._chunk(partial))
            if count:
                self._plan_prefill(draft, partial, count)
        if request.status is not RequestStatus.WAITING or request.num_steps_in_flight:
            return
        if not budget.can_admit or request.id in self._compiling:
            return
        while not self._slots.num_free or (cached := self._try_admit(request)) is None:
            self._preempt(self._last_to_run())
        self._start(draft, request, cached)
        self._plan_prefill(draft, request, budget.try_admit(self._chunk(request)))

    def _last_to_run(self) -> Request:
        """Return the running request that is preempted first."""
        running = self._isolation.others(self._running.values())
        return max(running, key=self._precedence.standing)

    def _make_room(self) -> None:
        """Preempt requests for waiting ones that should have their slots or blocks."""
        room = Room(
            slots=self._num_slots - len(self._running),
            blocks=self._kv.num_free_blocks + self._slots.num_leaving_blocks,
            headroom=self._headroom,
            tokens=self._max_batched_tokens,
        )
        for victim in self._precedence.victims(
            self._waiting,
            self._running.values(),
            room,
            self._blocks_needed,
            short=self._num_passed_over > 0 or not self._slots.num_free,
        ):
            self._preempt(victim)

    def _blocks_needed(self, request: Request) -> int:
        use_cache = not request.lacks_prompt_logprobs
        return self._kv.needs(request.table, request.token_ids, use_cache=use_cache)[1]

    def _schedule_decodes(self, draft: Draft, budget: StepBudget) -> list[Request]:
        """Plan one token for each decode and return the requests that are still in prefill."""
        partials = []
        running = self._isolation.planned(self._running.values())
        for request in self._precedence.in_order(running):
            if request.queued_tokens:
                partials.append(request)
                continue
            start = request.num_computed_tokens
            if start + 1 >= request.max_total_tokens or request.num_proposed_tokens:
                continue  # its last token is pending, or it is not known which is its newest
            if not budget.try_decode():
                break
            if start == request.table.capacity and not self._grow(draft, request):
                continue
            draft.decode(request)
        return partials

    def _schedule_partials(self, draft: Draft, budget: StepBudget, partials: list[Request]) -> None:
        self._precedence.sort_prefills(partials)
        for request in partials:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by a decode of this step
            self._schedule_waiting(draft, budget, before=request)
            wanted = self._chunk(request)
            if wanted == 0:
                continue
            count = budget.try_continue(wanted)
            if count == 0:
                break
            self._plan_prefill(draft, request, count)

    def _schedule_waiting(
        self, draft: Draft, budget: StepBudget, before: Request | None = None
    ) -> None:
        """Start waiting requests, or only those that go before a running one."""
        passed: set[int] = set()
        while budget.can_admit and self._slots.num_free and not draft.short_of_blocks:
            request = self._waiting.first(passed)
            if request is None:
                return
            if before is not None and not self._precedence.before(request, before):
                return
            if not self._parts.left(request.tenant):
                passed.add(request.tenant)
                continue
            cached = self._try_admit(request)
            if cached is None:
                if not self._shares.holds(request.tenant):
                    return
                passed.add(request.tenant)  # it waits for what it holds itself
                continue
            self._start(draft, request, cached)
            count = budget.try_admit(self._chunk(request))
            self._plan_prefill(draft, request, count)

    def _try_admit(self, request: Request) -> int | None:
        """Get a waiting request its blocks; return how many cached tokens are in them."""
        if request.num_steps_in_flight:
            return None
        return self._kv.try_admit(
            request.table,
            request.token_ids,
            use_cache=not request.lacks_prompt_logprobs,
            headroom=self._headroom if self._running else 0,
        )

    def _chunk(self, request: Request) -> int:
        """Return how much of its prompt a request may have computed in this step."""
        most = min(request.queued_tokens, self._max_prefill_tokens)
        return min(most, self._parts.left(request.tenant))

    def _plan_prefill(self, draft: Draft, request: Request, count: int) -> None:
        self._queued_tokens -= count
        self._shares.charge(request.tenant, count)
        self._parts.take(request.tenant, count)
        draft.prefill(request, count)

    def _start(self, draft: Draft, request: Request, cached: int) -> None:
        """Give a slot to a request that has just got its blocks, `cached` tokens in them."""
        self._waiting.remove(request)
        self._running[request.id] = request
        self._shares.start(request.tenant)
        request.status = RequestStatus.RUNNING
        self._slots.take(request)
        request.num_computed_tokens = cached
        request.queued_tokens -= cached
        self._queued_tokens -= cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
            if self._kv.caching and not request.lacks_prompt_logprobs:
                self.counters.prefix_cache_queries += request.num_prompt_tokens
                self.counters.prefix_cache_hits += request.num_cached_tokens
        draft.start(request)

    def _grow(self, draft: Draft, request: Request) -> bool:
        """Get the decode of `request` one more block; False when it cannot run in this step."""
        table = request.table
        first = len(table.block_ids)
        while (new := self._kv.try_grow(table, table.capacity + 1)) is None:
            draft.short_of_blocks = True
            if self._slots.num_leaving_blocks:
                return False  # there will be blocks when the plans in flight are done
            # Those that come after `request` are not in the draft yet, nor is it itself.
            victim = self._last_to_run()
            self._preempt(victim)
            if victim is request:
                return False
        draft.blocks.append(SlotBlocks(request.slot, first, new))
        return True

    # -- parts of update -------------------------------------------------------------------------

    def _settle_proposal(self, request: Request, accepted: int) -> None:
        """Count the proposed tokens that were right as computed."""
        if self._speculator is not None:
            self._speculator.verified(request, request.num_proposed_tokens, accepted)
        request.num_proposed_tokens = 0
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens += accepted
        else:  # preempted: everything will be computed again
            request.queued_tokens += accepted
            self._queued_tokens += accepted

    def _accept(
        self, request: Request, result: BatchResult, drawn: range, now: float
    ) -> RequestOutput:
        """Append drawn tokens to their request and return the output for them."""
        request.num_pending_tokens -= 1
        if not request.has_emitted and not request.was_taken_over:
            self.counters.prompt_tokens += request.num_prompt_tokens
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

    def _renew_grammar(self, request: Request, reason: str) -> RequestOutput | None:
        """Let a request, its newest draw forgotten, wait until its grammar is compiled anew.

        Returns the error that it ends with if that has not helped before.
        """
        spec = request.sampling.grammar
        assert self._grammars is not None
        assert spec is not None
        request.num_pending_tokens -= 1
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)
        else:
            request.queued_tokens -= 1
            self._queued_tokens -= 1
            if request.renewed_at == request.num_output_tokens:
                return None  # drawn in a step that was in flight when the grammar failed
        in_vain = request.renewed_at == request.num_output_tokens
        if in_vain or request.num_renewals == MAX_RENEWALS:
            return refused_output(request, reason)
        request.num_renewals += 1
        request.renewed_at = request.num_output_tokens
        request.grammar = self._grammars.ask(spec)
        self._waiting.remove(request)
        self._compiling[request.id] = request
        self.counters.grammar_waits += 1
        error = request.grammar.error if request.grammar.settled else None
        if error is not None:
            return refused_output(request, error)
        return self._queue_compiled(request)

    # -- requests leave their slots --------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Put a running request back to the front of the queue, to be computed again."""
        self.counters.preemptions += 1
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self._queued_tokens += request.num_tokens - request.queued_tokens
        request.queued_tokens = request.num_tokens
        request.status = RequestStatus.WAITING
        del self._running[request.id]
        self._waiting.push(request)
        self._vacate(request)

    def _retire(self, request: Request) -> None:
        """Take a request that finished or was aborted out of the books."""
        del self._requests[request.id]
        self._queued_tokens -= request.queued_tokens
        request.queued_tokens = 0
        queued = request.steps_alone and self._isolation.forget(request)
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        self._shares.leave(request.tenant)
        if was_running:
            del self._running[request.id]
            self._vacate(request)
        elif not queued and self._compiling.pop(request.id, None) is None:
            self._waiting.remove(request)

    def _vacate(self, request: Request) -> None:
        """Take back what a request holds that runs no longer."""
        self._shares.stop(request.tenant)
        if self._speculator is not None:
            self._speculator.forget(request)
        self._slots.vacate(request)
