"""Plans steps: decodes, then partial prefills, then admissions of waiting requests."""

import sys
from collections.abc import Sequence

from engine.scheduler.admission import RankState, StepBudget
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.preemption import Room
from engine.scheduler.request import Request, RequestStatus
from engine.scheduler.request_table import RequestTable
from engine.shared.config import SchedulerConfig

ADMISSION_HEADROOM = 0.01
"""Fraction of the KV blocks that an admission leaves free; see `Planner.headroom`."""


class Planner:
    """Fills the plan of a step within its token budget, free slots and KV blocks."""

    def __init__(self, books: RequestTable, scheduling: SchedulerConfig) -> None:
        executor = books.executor
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
        self._books = books
        self._isolation, self._fairness, self._kv = books.isolation, books.fairness, books.kv
        self._adapters, self._encoder = books.adapters, books.encoder

    def plan(self, plan: PlanBuilder, budget: StepBudget, passed_over: int) -> None:
        """Plan a step of all requests, or of the one that runs alone.

        `passed_over`: number of waiting requests that the previous plan did not admit.
        """
        alone = self._isolation.current
        self._adapters.begin_step(self._books.waiting.adapters)
        self._encoder.begin_step()
        if alone is not None:
            self._schedule_alone(plan, budget, alone)
        else:
            if budget.can_admit and self._books.waiting:
                self._make_room(passed_over)
            short = self._kv.num_free_blocks < len(self._books.running) * self._kv.num_groups
            self._fairness.look(self._books.running.values(), short=short)
            partials = self._schedule_decodes(plan, budget)
            self._fairness.begin_prefill(len(plan.decodes))
            self._schedule_partials(plan, budget, partials)
            self._schedule_waiting(plan, budget)
        plan.adapters = self._adapters.take_placed()
        plan.encoded, plan.forgotten = self._encoder.take_changes()

    # -- input of admission policies -------------------------------------------------------------

    def rank_state(
        self, passed_over: int, last_step_us: int, last_prefill_tokens: int
    ) -> RankState:
        """Return this rank's input to the admission policy for the next step.

        The prefill is an estimate: sequences that alternate count in full, since turns are decided
        only during planning. The arguments are fields of `RankState`.
        """
        books, limit = self._books, self._max_prefill
        quota = self._fairness.shares.quota()
        running = self._isolation.planned(books.running.values())
        partials = [
            quota.take(each.tenant, min(each.queued_tokens, limit))
            for each in running
            if each.queued_tokens
        ]
        decodes = len(running) - len(partials)
        room = max(0, self.max_tokens - decodes)
        tokens, requests = sum(partials), len(partials)
        slots = books.num_free_slots
        blocks = self._kv.num_free_blocks - (self.headroom if books.running else 0)
        for request in self._isolation.admissible(books.waiting, books.compiling):
            if not self._adapters.admits(request.adapter):
                continue
            if tokens >= room or slots == 0 or request.num_steps_in_flight:
                break
            cached, needed = self._needs(request)
            wanted = request.queued_tokens - cached
            if needed > blocks or (self._in_one_step and wanted > room - tokens):
                break
            slots -= 1
            blocks -= needed
            tokens += quota.take(request.tenant, min(wanted, limit))
            requests += 1
        return RankState(
            running=len(books.running),
            waiting=len(books.waiting),
            queued_prefill_tokens=books.queued_tokens,
            free_kv_blocks=self._kv.num_free_blocks,
            decodes=decodes,
            ready_prefill_tokens=min(tokens, room),
            ready_prefills=requests,
            passed_over=passed_over,
            last_step_us=last_step_us,
            last_prefill_tokens=last_prefill_tokens,
        )

    # -- planning --------------------------------------------------------------------------------

    def _schedule_alone(self, plan: PlanBuilder, budget: StepBudget, request: Request) -> None:
        """Plan the next step of a suspect; others keep slots and blocks that it does not need."""
        self._fairness.begin_alone()
        for partial in self._schedule_decodes(plan, budget):
            if self._is_stuck(partial) and not self._grow(plan, partial):
                continue
            if partial.images and not self._chunk(partial, budget):
                # Others in the middle of images may occupy the encoder cache that it needs.
                others = [each for each in self._books.running.values() if each.image is not None]
                for each in self._fairness.in_order(others):
                    if each is not partial:
                        self._books.preempt(each)
            whole = self._must_be_whole(partial)
            count = budget.try_continue(self._chunk(partial, budget), whole=whole)
            if count:
                self._plan_prefill(plan, partial, count)
        if request.status is not RequestStatus.WAITING or request.num_steps_in_flight:
            return
        if not budget.can_admit or request.id in self._books.compiling:
            return
        self._restore(request)
        while (
            not self._books.num_free_slots
            or not self._adapters.admits(request.adapter, first=True)
            or (cached := self._try_admit(request)) is None
        ):
            self._books.preempt(self._last_to_run())
        self._start(plan, request, cached)
        count = self._admitted(budget, request)
        if count:
            self._plan_prefill(plan, request, count)

    def _last_to_run(self) -> Request:
        """Return the running request to preempt first."""
        running = self._isolation.others(self._books.running.values())
        return max(running, key=self._fairness.standing)

    def _make_room(self, passed_over: int) -> None:
        """Preempt requests in favour of waiting ones with a better claim to slots or blocks."""
        books = self._books
        overdue = self._adapters.overdue()
        if overdue:  # these adapters have to vacate their slots
            running = self._fairness.in_order(books.running.values())
            for request in [each for each in running if each.adapter in overdue]:
                books.preempt(request)
        short = passed_over > 0 or not books.num_free_slots
        room = Room(
            slots=books.max_num_seqs - len(books.running),
            blocks=self._kv.num_free_blocks + books.num_leaving_blocks,
            headroom=self.headroom,
            tokens=self.max_tokens,
        )
        num_waiting = len(books.waiting)
        # Each takes the blocks that its tokens fill, plus one, in each group.
        most = num_waiting + -(-books.queued_tokens // self._kv.block_size)
        if room.slots >= num_waiting and room.blocks - most * self._kv.num_groups >= room.headroom:
            return  # all fit, in any order
        admits = {version: self._adapters.admits(version) for version in books.waiting.adapters}
        waiting = (each for each in books.waiting if admits.get(each.adapter, True))
        victims = self._fairness.victims(
            waiting, books.running.values(), room, self._blocks_needed, short=short
        )
        if short and not victims and (crowds := self._fairness.crowds()):
            # Sequences of large requests yield to the first sequence of another request.
            newcomer = books.waiting.first((), crowds)
            if newcomer is not None and self._adapters.admits(newcomer.adapter):
                victims = self._fairness.crowding(
                    newcomer, books.running.values(), room, self._blocks_needed
                )
        for victim in victims:
            books.preempt(victim)

    def _needs(self, request: Request) -> tuple[int, int]:
        """Return the cached tokens of a waiting request, and the number of blocks it needs."""
        use_cache = not request.lacks_prompt_logprobs
        return self._kv.needs(request.table, request.token_ids, use_cache=use_cache)

    def _blocks_needed(self, request: Request) -> int:
        return self._needs(request)[1]

    def _schedule_decodes(self, plan: PlanBuilder, budget: StepBudget) -> list[Request]:
        """Plan one token per decode, and return the requests still in prefill."""
        running = self._isolation.planned(self._books.running.values())
        ordered = self._fairness.in_order(running)
        ready = [request for request in ordered if request.can_decode]
        if self._num_stages > 1:
            ready = self._microbatch(plan.step, ready, ordered)
        held = self._fairness.hold(ready)
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
            if not each.num_pending_tokens or step - each.drawn_in >= self._num_stages
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
                self._books.preempt(request)
                continue
            wanted = self._chunk(request, budget)
            if wanted == 0:
                continue
            count = budget.try_continue(wanted, whole=self._must_be_whole(request))
            if count == 0:
                break
            self._plan_prefill(plan, request, count)

    def _schedule_waiting(
        self, plan: PlanBuilder, budget: StepBudget, before: Request | None = None
    ) -> None:
        """Start waiting requests, or only those that precede `before`."""
        passed: set[int] = set()
        adapters: set[str] = set()
        crowds = set(self._fairness.crowds())  # others first
        groups = set(crowds)
        while budget.can_admit and self._books.num_free_slots and not plan.short_of_blocks:
            request = self._books.waiting.first(passed, groups, adapters)
            if request is None and crowds:
                groups -= crowds
                crowds.clear()
                continue
            if request is None:
                return
            if before is not None and not self._fairness.goes_before(request, before):
                return
            if not self._adapters.admits(request.adapter):
                adapters.add(request.adapter)
                continue
            wanted = min(request.queued_tokens, self._max_prefill)
            if not self._fairness.tenant_tokens(request, wanted):
                passed.add(request.tenant)
                continue
            if not self._fairness.group_tokens(request):
                groups.add(request.group)
                continue
            self._restore(request)
            if self._in_one_step and not self._fits_whole(request, budget):
                return
            cached = self._try_admit(request)
            if cached is None:
                if not self._fairness.shares.holds(request.tenant):
                    return
                passed.add(request.tenant)  # its tenant has to release blocks first
                continue
            self._start(plan, request, cached)
            count = self._admitted(budget, request)
            if not count:
                return  # its image is encoded in a later step
            self._plan_prefill(plan, request, count)

    def _admitted(self, budget: StepBudget, request: Request) -> int:
        """Reserve tokens for a request that has just got its blocks; return the number."""
        whole = self._must_be_whole(request)
        return budget.try_admit(self._chunk(request, budget), whole=whole)

    def _must_be_whole(self, request: Request) -> bool:
        """Return whether a request gets all tokens that `_chunk` returns in one step, or none."""
        return self._in_one_step or self._encoder.must_be_whole(request)

    def _fits_whole(self, request: Request, budget: StepBudget) -> bool:
        """Return whether a waiting request, with all its images, can be computed in this step."""
        cached = self._needs(request)[0]
        count = request.queued_tokens - cached
        seen = self._encoder.reach(request.images, cached, count)
        return seen == count and budget.fits_whole(count)

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
        self._books.counters.kv_tier_hits += self._kv.restore(
            request.fetch, request.table, request.token_ids, headroom=self._headroom
        )
        request.fetch = None

    @property
    def _headroom(self) -> int:
        return self.headroom if self._books.running else 0

    def _chunk(self, request: Request, budget: StepBudget) -> int:
        """Return how many prompt tokens of a request can be computed in this step.

        If an image's tokens have to be in one step, the remaining budget is a limit, too.
        """
        if self._in_one_step:
            return request.queued_tokens
        room = request.table.capacity - request.num_computed_tokens
        most = min(request.queued_tokens, self._max_prefill, room)
        of_group = self._fairness.group_tokens(request)
        count = self._fairness.tenant_tokens(request, min(most, of_group))
        if not request.images:
            return count
        start = request.num_computed_tokens
        if count and self._encoder.must_be_whole(request):
            count = self._encoder.whole(request, min(count, budget.num_prefill_tokens))
            together = self._encoder.together(request, start)
            # A share of a step might never be as large as an image.
            if not count and together <= min(room, budget.num_tokens):
                count = together
        return self._encoder.reach(request.images, start, count)

    def _is_stuck(self, request: Request) -> bool:
        """Return whether a prefill lacks blocks, as those behind its window are still shared."""
        start = request.num_computed_tokens
        is_full = request.table.capacity - start < self._encoder.together(request, start)
        return is_full and not request.num_steps_in_flight

    def _plan_prefill(self, plan: PlanBuilder, request: Request, count: int) -> None:
        self._books.queued_tokens -= count
        self._fairness.prefill(request, count)
        if request.images:
            self._encoder.take(request, count)
        plan.prefill(request, count)

    def _start(self, plan: PlanBuilder, request: Request, cached: int) -> None:
        """Assign a slot to a request that has just got its blocks, `cached` tokens in them."""
        self._books.start(request, cached)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
            if self._kv.caching and not request.lacks_prompt_logprobs:
                counters = self._books.counters
                counters.prefix_cache_queries += request.num_prompt_tokens
                counters.prefix_cache_hits += request.num_cached_tokens
        plan.start(request)

    def _grow(self, plan: PlanBuilder, request: Request) -> bool:
        """Allocate a decode's next blocks; return False if it cannot run in this step."""
        table = request.table
        while not self._kv.try_grow(table, table.capacity + 1):
            plan.short_of_blocks = True
            if self._books.num_leaving_blocks:
                return False  # blocks are freed when the plans in flight are done
            # Neither `request` nor those ordered after it are in the plan yet.
            victim = self._last_to_run()
            self._books.preempt(victim)
            if victim is request:
                return False
        plan.tell_blocks(request)
        return True
