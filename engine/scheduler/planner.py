"""Plans steps: decodes, then partial prefills, then admissions of waiting requests."""

import sys
from collections.abc import Sequence

from engine.scheduler.admission import RankState, StepBudget
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.preemption import FreeCapacity
from engine.scheduler.request import Request, RequestStatus
from engine.scheduler.request_table import RequestTable
from engine.shared.config import SchedulerConfig

ADMISSION_HEADROOM = 0.01
"""Fraction of the KV blocks that an admission leaves free; see `Planner.headroom`."""


class Planner:
    """Fills the plan of a step within its token budget, free slots and KV blocks."""

    def __init__(self, requests: RequestTable, scheduling: SchedulerConfig) -> None:
        executor = requests.executor
        self.max_tokens = scheduling.max_num_batched_tokens
        """Maximum tokens per step."""
        if executor.in_one_step:  # a step must fit the longest sequence
            self.max_tokens = max(self.max_tokens, executor.max_model_len)
        self.headroom = int(executor.num_kv_blocks * ADMISSION_HEADROOM) if executor.has_kv else 0
        """KV blocks that an admission leaves free for running sequences to grow into, so that the
        next step does not preempt the new one."""
        self._max_prefill = scheduling.long_prefill_token_threshold or sys.maxsize
        """Maximum prompt tokens per request and step."""
        self._in_one_step = executor.in_one_step or not scheduling.enable_chunked_prefill
        """Whether a prompt (after a preemption, with its output so far) is computed in a single
        step, regardless of other limits."""
        self._num_stages = executor.num_stages
        self._requests = requests
        self._isolation, self._fairness, self._kv = (
            requests.isolation,
            requests.fairness,
            requests.kv,
        )
        self._adapters, self._encoder = requests.adapters, requests.encoder

    def plan(self, plan: PlanBuilder, budget: StepBudget, passed_over: int) -> None:
        """Plan a step of all requests, or of the one that runs alone.

        `passed_over`: number of waiting requests that the previous plan did not admit.
        """
        exclusive = self._isolation.current
        self._adapters.begin_step(self._requests.waiting.adapters)
        self._encoder.begin_step()
        if exclusive is not None:
            self._schedule_exclusive(plan, budget, exclusive)
        else:
            if budget.can_admit and self._requests.waiting:
                self._make_room(passed_over)
            is_short = self._kv.pool.num_free < len(self._requests.running) * self._kv.num_groups
            self._fairness.begin_step(self._requests.running.values(), is_short=is_short)
            partials = self._schedule_decodes(plan, budget)
            self._fairness.begin_prefill(len(plan.decodes))
            self._schedule_partials(plan, budget, partials)
            self._schedule_waiting(plan, budget)
        plan.adapters = self._adapters.take_placed()
        plan.encoded, plan.evicted_images = self._encoder.take_changes()

    # -- input of admission policies -------------------------------------------------------------

    def rank_state(
        self, passed_over: int, last_step_us: int, last_prefill_tokens: int
    ) -> RankState:
        """Return this rank's input to the admission policy for the next step.

        The prefill is an estimate: sequences that alternate count in full, since turns are decided
        only during planning. The arguments are fields of `RankState`.
        """
        requests, limit = self._requests, self._max_prefill
        quota = self._fairness.shares.quota()
        running = self._isolation.planned(requests.running.values())
        partials = [
            quota.take(partial.tenant, min(partial.queued_tokens, limit))
            for partial in running
            if partial.queued_tokens
        ]
        decodes = len(running) - len(partials)
        room = max(0, self.max_tokens - decodes)
        tokens, num_requests = sum(partials), len(partials)
        slots = len(requests.free_slots)
        blocks = self._kv.pool.num_free - (self.headroom if requests.running else 0)
        for request in self._isolation.admissible(requests.waiting, requests.compiling):
            if not self._adapters.admits(request.adapter):
                continue
            if tokens >= room or slots == 0 or request.num_steps_in_flight:
                break
            cached, needed = self._needs(request)
            num_tokens = request.queued_tokens - cached
            if needed > blocks or (self._in_one_step and num_tokens > room - tokens):
                break
            slots -= 1
            blocks -= needed
            tokens += quota.take(request.tenant, min(num_tokens, limit))
            num_requests += 1
        return RankState(
            running=len(requests.running),
            waiting=len(requests.waiting),
            queued_prefill_tokens=requests.queued_tokens,
            free_kv_blocks=self._kv.pool.num_free,
            decodes=decodes,
            ready_prefill_tokens=min(tokens, room),
            ready_prefills=num_requests,
            passed_over=passed_over,
            last_step_us=last_step_us,
            last_prefill_tokens=last_prefill_tokens,
        )

    # -- planning --------------------------------------------------------------------------------

    def _schedule_exclusive(self, plan: PlanBuilder, budget: StepBudget, request: Request) -> None:
        """Plan the next step of a suspect; others keep slots and blocks that it does not need."""
        self._fairness.begin_exclusive()
        for partial in self._schedule_decodes(plan, budget):
            if self._is_stuck(partial) and not self._grow(plan, partial):
                continue
            if partial.images and not self._chunk(partial, budget):
                # Others in the middle of images may occupy the encoder cache that it needs.
                others = [
                    each for each in self._requests.running.values() if each.image is not None
                ]
                for each in self._fairness.in_order(others):
                    if each is not partial:
                        self._requests.preempt(each)
            all_or_none = self._needs_one_step(partial)
            count = budget.try_continue(self._chunk(partial, budget), all_or_none=all_or_none)
            if count:
                self._plan_prefill(plan, partial, count)
        if request.status is not RequestStatus.WAITING or request.num_steps_in_flight:
            return
        if not budget.can_admit or request.id in self._requests.compiling:
            return
        self._restore(request)
        while (
            not self._requests.free_slots
            or not self._adapters.admits(request.adapter, first=True)
            or (cached := self._try_admit(request)) is None
        ):
            self._requests.preempt(self._last_to_run())
        self._start(plan, request, cached)
        count = self._admitted(budget, request)
        if count:
            self._plan_prefill(plan, request, count)

    def _last_to_run(self) -> Request:
        """Return the running request to preempt first."""
        running = self._isolation.others(self._requests.running.values())
        return max(running, key=self._fairness.preemption_key)

    def _make_room(self, passed_over: int) -> None:
        """Preempt requests in favour of waiting ones with a better claim to slots or blocks."""
        requests = self._requests
        overdue = self._adapters.overdue()
        if overdue:  # these adapters have to vacate their slots
            running = self._fairness.in_order(requests.running.values())
            for request in [each for each in running if each.adapter in overdue]:
                requests.preempt(request)
        is_short = passed_over > 0 or not requests.free_slots
        room = FreeCapacity(
            slots=requests.max_num_seqs - len(requests.running),
            blocks=self._kv.pool.num_free + requests.num_leaving_blocks,
            headroom=self.headroom,
            tokens=self.max_tokens,
        )
        num_waiting = len(requests.waiting)
        # Each takes the blocks that its tokens fill, plus one, in each group.
        max_needed = num_waiting + -(-requests.queued_tokens // self._kv.block_size)
        if (
            room.slots >= num_waiting
            and room.blocks - max_needed * self._kv.num_groups >= room.headroom
        ):
            return  # all fit, in any order
        admits = {version: self._adapters.admits(version) for version in requests.waiting.adapters}
        waiting = (each for each in requests.waiting if admits.get(each.adapter, True))
        victims = self._fairness.victims(
            waiting, requests.running.values(), room, self._blocks_needed, is_short=is_short
        )
        if is_short and not victims and (saturated := self._fairness.saturated_groups()):
            # Sequences of large requests yield to the first sequence of another request.
            newcomer = requests.waiting.first((), saturated)
            if newcomer is not None and self._adapters.admits(newcomer.adapter):
                victims = self._fairness.victims_for_newcomer(
                    newcomer, requests.running.values(), room, self._blocks_needed
                )
        for victim in victims:
            requests.preempt(victim)

    def _needs(self, request: Request) -> tuple[int, int]:
        """Return the cached tokens of a waiting request, and the number of blocks it needs."""
        use_cache = not request.lacks_prompt_logprobs
        return self._kv.needs(request.table, request.token_ids, use_cache=use_cache)

    def _blocks_needed(self, request: Request) -> int:
        return self._needs(request)[1]

    def _schedule_decodes(self, plan: PlanBuilder, budget: StepBudget) -> list[Request]:
        """Plan one token per decode, and return the requests still in prefill."""
        running = self._isolation.planned(self._requests.running.values())
        ordered = self._fairness.in_order(running)
        ready = [request for request in ordered if request.can_decode]
        if self._num_stages > 1:
            ready = self._microbatch(plan.step, ready, ordered)
        held = self._fairness.begin_decodes(ready)
        for request in ready:
            if request.id in held or request.status is not RequestStatus.RUNNING:
                continue
            if not budget.try_decode():
                break
            start = request.num_computed_tokens
            if start == request.table.capacity and not self._grow(plan, request):
                continue
            plan.decode(request)
        return [request for request in ordered if request.queued_tokens]

    def _microbatch(
        self, step: int, ready: list[Request], running: Sequence[Request]
    ) -> list[Request]:
        """Return the ready decodes that a step of a pipeline can include, in order.

        With N stages, N steps are in flight, and a token sampled by one is available when the N-th
        step after it begins. So each sequence is decoded in every N-th step at most, and no step
        takes more than 1/N of the sequences: otherwise all could end up in one step, leaving stages
        idle.
        """
        known = [
            each
            for each in ready
            if not each.num_pending_tokens or step - each.last_sampled_step >= self._num_stages
        ]
        decoding = sum(not each.queued_tokens for each in running)
        return known[: -(-decoding // self._num_stages)]

    def _schedule_partials(
        self, plan: PlanBuilder, budget: StepBudget, partials: list[Request]
    ) -> None:
        self._fairness.sort_prefills(partials)
        for request in partials:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by a decode of this step
            self._schedule_waiting(plan, budget, before=request)
            if self._is_stuck(request) and not self._kv.refill(request.table):
                plan.short_of_blocks = True
                self._requests.preempt(request)
                continue
            num_tokens = self._chunk(request, budget)
            if num_tokens == 0:
                continue
            count = budget.try_continue(num_tokens, all_or_none=self._needs_one_step(request))
            if count == 0:
                break
            self._plan_prefill(plan, request, count)

    def _schedule_waiting(
        self, plan: PlanBuilder, budget: StepBudget, before: Request | None = None
    ) -> None:
        """Start waiting requests, or only those that precede `before`."""
        skipped_tenants: set[int] = set()
        skipped_adapters: set[str] = set()
        saturated = set(self._fairness.saturated_groups())  # others first
        skipped_groups = set(saturated)
        while budget.can_admit and self._requests.free_slots and not plan.short_of_blocks:
            request = self._requests.waiting.first(
                skipped_tenants, skipped_groups, skipped_adapters
            )
            if request is None and saturated:
                skipped_groups -= saturated
                saturated.clear()
                continue
            if request is None:
                return
            if before is not None and not self._fairness.precedes(request, before):
                return
            if not self._adapters.admits(request.adapter):
                skipped_adapters.add(request.adapter)
                continue
            num_tokens = min(request.queued_tokens, self._max_prefill)
            if not self._fairness.tenant_tokens(request, num_tokens):
                skipped_tenants.add(request.tenant)
                continue
            if not self._fairness.group_tokens(request):
                skipped_groups.add(request.group)
                continue
            self._restore(request)
            if self._in_one_step and not self._fits_whole(request, budget):
                return
            cached = self._try_admit(request)
            if cached is None:
                if not self._fairness.shares.holds(request.tenant):
                    return
                skipped_tenants.add(request.tenant)  # its tenant has to release blocks first
                continue
            self._start(plan, request, cached)
            count = self._admitted(budget, request)
            if not count:
                return  # its image is encoded in a later step
            self._plan_prefill(plan, request, count)

    def _admitted(self, budget: StepBudget, request: Request) -> int:
        """Reserve tokens for a request that has just got its blocks; return the number."""
        all_or_none = self._needs_one_step(request)
        return budget.try_admit(self._chunk(request, budget), all_or_none=all_or_none)

    def _needs_one_step(self, request: Request) -> bool:
        """Return whether a request gets all tokens that `_chunk` returns in one step, or none."""
        return self._in_one_step or self._encoder.needs_whole_images(request)

    def _fits_whole(self, request: Request, budget: StepBudget) -> bool:
        """Return whether a waiting request, with all its images, can be computed in this step."""
        cached = self._needs(request)[0]
        count = request.queued_tokens - cached
        computable = self._encoder.computable_tokens(request.images, cached, count)
        return computable == count and budget.fits_whole(count)

    def _try_admit(self, request: Request) -> int | None:
        """Allocate a waiting request's blocks; return the number of cached tokens in them."""
        if request.num_steps_in_flight:
            return None
        return self._kv.try_admit(
            request.table,
            request.token_ids,
            use_cache=not request.lacks_prompt_logprobs,
            headroom=self._headroom,
        )

    def _restore(self, request: Request) -> None:
        """Put blocks that were fetched for a waiting request into the cache."""
        if request.fetch is None or request.num_steps_in_flight:
            return
        self._requests.counters.kv_tier_hits += self._kv.restore(
            request.fetch, request.table, request.token_ids, headroom=self._headroom
        )
        request.fetch = None

    @property
    def _headroom(self) -> int:
        return self.headroom if self._requests.running else 0

    def _chunk(self, request: Request, budget: StepBudget) -> int:
        """Return how many prompt tokens of a request can be computed in this step.

        If an image's tokens have to be in one step, the remaining budget is a limit, too.
        """
        if self._in_one_step:
            return request.queued_tokens
        room = request.table.capacity - request.num_computed_tokens
        limit = min(request.queued_tokens, self._max_prefill, room)
        of_group = self._fairness.group_tokens(request)
        count = self._fairness.tenant_tokens(request, min(limit, of_group))
        if not request.images:
            return count
        start = request.num_computed_tokens
        if count and self._encoder.needs_whole_images(request):
            count = self._encoder.whole(request, min(count, budget.num_prefill_tokens))
            min_tokens = self._encoder.min_step_tokens(request, start)
            # A share of a step might never be as large as an image.
            if not count and min_tokens <= min(room, budget.num_tokens):
                count = min_tokens
        return self._encoder.computable_tokens(request.images, start, count)

    def _is_stuck(self, request: Request) -> bool:
        """Return whether a prefill lacks blocks, as those behind its window are still shared."""
        start = request.num_computed_tokens
        is_full = request.table.capacity - start < self._encoder.min_step_tokens(request, start)
        return is_full and not request.num_steps_in_flight

    def _plan_prefill(self, plan: PlanBuilder, request: Request, count: int) -> None:
        self._requests.queued_tokens -= count
        self._fairness.prefill(request, count)
        if request.images:
            self._encoder.take(request, count)
        plan.prefill(request, count)

    def _start(self, plan: PlanBuilder, request: Request, cached: int) -> None:
        """Assign a slot to a request that has just got its blocks, `cached` tokens in them."""
        self._requests.start(request, cached)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
            if self._kv.caching and not request.lacks_prompt_logprobs:
                counters = self._requests.counters
                counters.prefix_cache_queries += request.num_prompt_tokens
                counters.prefix_cache_hits += request.num_cached_tokens
        plan.start(request)

    def _grow(self, plan: PlanBuilder, request: Request) -> bool:
        """Allocate a decode's next blocks; return False if it cannot run in this step."""
        table = request.table
        while not self._kv.try_grow(table, table.capacity + 1):
            plan.short_of_blocks = True
            if self._requests.num_leaving_blocks:
                return False  # blocks are freed when the plans in flight are done
            # Neither `request` nor those ordered after it are in the plan yet.
            victim = self._last_to_run()
            self._requests.preempt(victim)
            if victim is request:
                return False
        plan.add_blocks(request)
        return True
