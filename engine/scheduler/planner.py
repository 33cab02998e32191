"""Who is computed in a step: decodes, then prefills that have begun, then waiting requests."""

import sys
from collections.abc import Sequence

from engine.scheduler.admission import RankState, StepBudget
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.preemption import Room
from engine.scheduler.request import Request, RequestStatus
from engine.scheduler.request_table import RequestTable
from engine.shared.config import SchedulerConfig

ADMISSION_HEADROOM = 0.01
"""Share of the KV blocks that an admission leaves free, see `Planner.headroom`."""


class Planner:
    """Fills the plan of a step within its budget, the slots and the KV blocks."""

    def __init__(self, books: RequestTable, scheduling: SchedulerConfig) -> None:
        executor = books.executor
        self.max_tokens = scheduling.max_num_batched_tokens
        """Maximum tokens of a step."""
        if executor.in_one_step:  # it holds the longest sequence
            self.max_tokens = max(self.max_tokens, executor.max_model_len)
        self.headroom = int(executor.num_kv_blocks * ADMISSION_HEADROOM) if executor.has_kv else 0
        """KV blocks that an admission leaves free for the running sequences to grow into, so that
        the newcomer is not preempted by the next step."""
        self._max_prefill = scheduling.long_prefill_token_threshold or sys.maxsize
        """Prompt tokens of one request in a step."""
        self._in_one_step = executor.in_one_step or not scheduling.enable_chunked_prefill
        """Whether a prompt is computed in one step, after a preemption with the tokens drawn since;
        whatever else is limited."""
        self._num_stages = executor.num_stages
        self._books = books
        self._isolation, self._fairness, self._kv = books.isolation, books.fairness, books.kv
        self._adapters, self._encoder = books.adapters, books.encoder

    def plan(self, plan: PlanBuilder, budget: StepBudget, passed_over: int) -> None:
        """Plan a step of all, or of the request whose turn it is to run alone.

        `passed_over`: how many waiting requests the plan before did not admit.
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

    # -- what the next step has room for ---------------------------------------------------------

    def rank_state(
        self, passed_over: int, last_step_us: int, last_prefill_tokens: int
    ) -> RankState:
        """Return what an admission policy is told about this rank before the next step.

        Its prefill is estimated: sequences that take turns count as if they did not, since it is
        known only during planning whose turn it is. The arguments are fields of `RankState`.
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
        """Plan the next step of a suspect; others keep what they hold unless it needs that."""
        self._fairness.begin_alone()
        for partial in self._schedule_decodes(plan, budget):
            if self._is_stuck(partial) and not self._grow(plan, partial):
                continue
            if partial.images and not self._chunk(partial, budget):
                # Others that are in the middle of images may take the room that its own need.
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
        """Return the running request that is preempted first."""
        running = self._isolation.others(self._books.running.values())
        return max(running, key=self._fairness.standing)

    def _make_room(self, passed_over: int) -> None:
        """Preempt requests for waiting ones that should have their slots or blocks."""
        books = self._books
        overdue = self._adapters.overdue()
        if overdue:  # these adapters have to leave their slots to others
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
        # Each takes the blocks that its tokens fill and one that they begin, in each group.
        most = num_waiting + -(-books.queued_tokens // self._kv.block_size)
        if room.slots >= num_waiting and room.blocks - most * self._kv.num_groups >= room.headroom:
            return  # all of them fit, in whatever order
        admits = {version: self._adapters.admits(version) for version in books.waiting.adapters}
        waiting = (each for each in books.waiting if admits.get(each.adapter, True))
        victims = self._fairness.victims(
            waiting, books.running.values(), room, self._blocks_needed, short=short
        )
        if short and not victims and (crowds := self._fairness.crowds()):
            # Sequences of large requests give way to the first one of another request.
            newcomer = books.waiting.first((), crowds)
            if newcomer is not None and self._adapters.admits(newcomer.adapter):
                victims = self._fairness.crowding(
                    newcomer, books.running.values(), room, self._blocks_needed
                )
        for victim in victims:
            books.preempt(victim)

    def _needs(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of a waiting request are cached, and how many blocks it needs."""
        use_cache = not request.lacks_prompt_logprobs
        return self._kv.needs(request.table, request.token_ids, use_cache=use_cache)

    def _blocks_needed(self, request: Request) -> int:
        return self._needs(request)[1]

    def _schedule_decodes(self, plan: PlanBuilder, budget: StepBudget) -> list[Request]:
        """Plan one token for each decode and return the requests that are still in prefill."""
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
        """Return those of the ready decodes that a step of a pipeline may have, in their order.

        With N stages N steps are computed at once, and the token that one of them draws is known
        to the executor when it begins the N-th after it. So a sequence is decoded in every N-th
        step at most, and no step takes more than its share of them: else all would be in one, and
        the stages would wait for each other.
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
        """Start waiting requests, or only those that go before a running one."""
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
            if self._in_one_step and not self._fits_whole(request, budget):
                return
            cached = self._try_admit(request)
            if cached is None:
                if not self._fairness.shares.holds(request.tenant):
                    return
                passed.add(request.tenant)  # it waits for what it holds itself
                continue
            self._start(plan, request, cached)
            count = self._admitted(budget, request)
            if not count:
                return  # its image is encoded in one of the next steps
            self._plan_prefill(plan, request, count)

    def _admitted(self, budget: StepBudget, request: Request) -> int:
        """Reserve tokens for a request that has just got its blocks; return how many."""
        whole = self._must_be_whole(request)
        return budget.try_admit(self._chunk(request, budget), whole=whole)

    def _must_be_whole(self, request: Request) -> bool:
        """Whether a request gets all tokens that `_chunk` returns in one step, or none."""
        return self._in_one_step or self._encoder.must_be_whole(request)

    def _fits_whole(self, request: Request, budget: StepBudget) -> bool:
        """Whether a waiting request can be computed in this step, with all images that it shows."""
        cached = self._needs(request)[0]
        count = request.queued_tokens - cached
        seen = self._encoder.reach(request.images, cached, count)
        return seen == count and budget.fits_whole(count)

    def _try_admit(self, request: Request) -> int | None:
        """Get a waiting request its blocks; return how many cached tokens are in them."""
        if request.num_steps_in_flight:
            return None
        table, headroom = request.table, self.headroom if self._books.running else 0
        if request.fetch is not None:
            self._books.counters.kv_tier_hits += self._kv.restore(
                request.fetch, table, request.token_ids, headroom=headroom
            )
            request.fetch = None
        return self._kv.try_admit(
            table,
            request.token_ids,
            use_cache=not request.lacks_prompt_logprobs,
            headroom=headroom,
        )

    def _chunk(self, request: Request, budget: StepBudget) -> int:
        """Return how much of its prompt a request may have computed in this step.

        Where the tokens of an image have to be together, what is left of the budget counts, too.
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
            # Shares of a step may never be as large as an image.
            if not count and together <= min(room, budget.num_tokens):
                count = together
        return self._encoder.reach(request.images, start, count)

    def _is_stuck(self, request: Request) -> bool:
        """Whether a prefill lacks blocks: those behind its window are still used by others."""
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
        """Give a slot to a request that has just got its blocks, `cached` tokens in them."""
        self._books.start(request, cached)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
            if self._kv.caching and not request.lacks_prompt_logprobs:
                counters = self._books.counters
                counters.prefix_cache_queries += request.num_prompt_tokens
                counters.prefix_cache_hits += request.num_cached_tokens
        plan.start(request)

    def _grow(self, plan: PlanBuilder, request: Request) -> bool:
        """Get the decode of `request` its next blocks; False when it cannot run in this step."""
        table = request.table
        while not self._kv.try_grow(table, table.capacity + 1):
            plan.short_of_blocks = True
            if self._books.num_leaving_blocks:
                return False  # there will be blocks when the plans in flight are done
            # Those that come after `request` are not in the plan yet, nor is it itself.
            victim = self._last_to_run()
            self._books.preempt(victim)
            if victim is request:
                return False
        plan.tell_blocks(request)
        return True
