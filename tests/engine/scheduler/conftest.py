"""A scheduler with a checking simulated executor, driven by hand."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.batch.batch import BatchPlan
from engine.batch.executor import PendingResult
from engine.executor.simulated import adapted_seed, simulated_token
from engine.models.spec import VisionSpec
from engine.scheduler.admission import UNLIMITED, Grant
from engine.scheduler.request import Request, request_from_message
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.shared.messages import (
    AddRequest,
    EncoderInput,
    GrammarSpec,
    RequestOutput,
    SamplingParams,
)
from tests.support.checked_executor import CheckedExecutor


class Rig:
    """Checks all budgets and records the output of each request."""

    def __init__(
        self,
        *,
        num_kv_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        vocab_size: int = 1000,
        eos_token_ids: tuple[int, ...] = (),
        enable_prefix_caching: bool = True,
        max_loras: int = 0,
        adapters: Sequence[str] = (),
        cache_windows: tuple[int | None, ...] = (None,),
        vision: VisionSpec | None = None,
        encoder_cache_bytes: int = 1 << 20,
        **scheduling: Any,
    ) -> None:
        self.config = EngineConfig(
            model=ModelConfig(max_model_len=max_model_len),
            cache=CacheConfig(
                block_size=block_size,
                num_kv_blocks=num_kv_blocks,
                enable_prefix_caching=enable_prefix_caching,
                encoder_cache_bytes=encoder_cache_bytes,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                **scheduling,
            ),
        )
        self.executor = CheckedExecutor(
            self.config,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            adapters=dict.fromkeys(adapters, True),
            cache_windows=cache_windows,
            vision=vision,
        )
        self.scheduler = Scheduler(
            self.config.scheduler, self.config.cache, self.executor.info, max_loras=max_loras
        )
        self.scheduler.adapters.held.update(adapters)
        self.now = 0.0
        self.requests: dict[int, AddRequest] = {}
        self.tokens: dict[int, list[int]] = {}
        self.last: dict[int, RequestOutput] = {}
        """The finishing output of each finished request."""
        self.first: dict[int, RequestOutput] = {}
        self.in_flight: deque[tuple[BatchPlan, PendingResult]] = deque()
        self._slots_running: set[int] = set()

    def describe(
        self,
        id: int,
        prompt: Sequence[int],
        *,
        front_end: int = 0,
        output: Sequence[int] = (),
        priority: int = 0,
        tenant: int = 0,
        cache_root: bytes = b"",
        alone: int = 0,
        group: int = 0,
        adapter: str = "",
        images: Sequence[EncoderInput] = (),
        **sampling: object,
    ) -> AddRequest:
        """Record a request for `expected`, and return its message."""
        params = {"max_tokens": 4, "seed": id} | sampling
        self.requests[id] = AddRequest(
            id,
            f"request-{id}",
            front_end,
            0,
            list(prompt),
            SamplingParams(**params),  # type: ignore[arg-type]
            list(output),
            priority,
            tenant,
            cache_root,
            exclusive_steps=alone,
            group=group,
            adapter=adapter,
            encoder_inputs=list(images),
        )
        return self.requests[id]

    def add(self, id: int, prompt: Sequence[int], **arguments: Any) -> RequestOutput | None:
        """Give the scheduler the request that `describe` describes."""
        answer = self.scheduler.add(self.describe(id, prompt, **arguments), self.now)
        self.tokens[id] = []
        if answer is not None:
            self.last[id] = answer
        return answer

    def schedule(self, grant: Grant = UNLIMITED) -> BatchPlan:
        """Plan a step and start it."""
        plan = self.scheduler.schedule(grant, self.now)
        limits = self.config.scheduler
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.slots) <= limits.max_num_seqs
        longest = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        if not limits.enable_chunked_prefill:
            rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
            ends = {slot: start + count for slot, start, count in rows}
            assert all(ends.get(each.slot) == len(each.token_ids) for each in plan.starting)
        drafted = [len(plan.proposed.get(row, ())) for row in range(len(plan.slots))]
        assert all(
            (count <= longest) if n == 0 else (count == 1 + n)
            for count, n in zip(plan.counts, drafted, strict=True)
        )
        assert all(n <= limits.speculative_ngram for n in drafted)
        assert all(0 <= slot < limits.max_num_seqs for slot in plan.slots)
        ones = [count == 1 for count in plan.counts]
        assert ones == sorted(ones, reverse=True), "rows of one token come first"
        self.in_flight.append((plan, self.executor.submit(plan)))
        self.scheduler.check_integrity()
        return plan

    def update(self) -> dict[int, list[RequestOutput]]:
        """Process the result of the oldest step in flight."""
        plan, pending = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, pending.result(), self.now)
        self.scheduler.check_integrity()
        seen: set[int] = set()
        for front_end, of_front_end in outputs.items():
            for output in of_front_end:
                assert output.id not in seen, "one output per request and step"
                assert output.id not in self.last, "no output after the last"
                assert self.requests[output.id].front_end == front_end
                seen.add(output.id)
                wanted = self.requests[output.id].sampling.logprobs is not None
                assert (output.logprobs is not None) == (wanted and bool(output.token_ids))
                assert len(output.logprobs or output.token_ids) == len(output.token_ids)
                self.tokens[output.id] += output.token_ids
                begins = self.first.setdefault(output.id, output) is output
                ends = output.finish_reason is not None
                assert (output.timing is not None) == (begins or ends)
                if output.finish_reason is not None:
                    self.last[output.id] = output
        return outputs

    def step(self, grant: Grant = UNLIMITED) -> BatchPlan:
        plan = self.schedule(grant)
        self.update()
        return plan

    def run(self, *, depth: int = 1, max_steps: int = 10_000) -> None:
        """Step with `depth` plans in flight until there is nothing to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.schedule()
            if len(self.in_flight) >= depth:
                self.update()
            while self.in_flight and not self.scheduler.gauges().running:
                self.update()
        raise AssertionError(f"still work after {max_steps} steps")

    def expected(self, id: int) -> tuple[list[int], str]:
        """Return the expected output and finish reason of the request when it runs alone."""
        message, info = self.requests[id], self.executor.info
        sampling = message.sampling
        tokens = message.prompt_token_ids + message.output_token_ids
        known, num_prompt = len(tokens), len(message.prompt_token_ids)
        seed = adapted_seed(sampling.seed, message.adapter) if message.adapter else sampling.seed
        limit = min(num_prompt + sampling.max_tokens, self.scheduler.max_model_len)
        stops = set(sampling.stop_token_ids)
        stops |= set() if sampling.ignore_eos else set(info.eos_token_ids)
        while len(tokens) < limit:
            token = simulated_token(seed, len(tokens), tokens[-1], info.vocab_size)
            tokens.append(token)
            if token in stops and len(tokens) - num_prompt >= sampling.min_tokens:
                return tokens[known:], "stop"
        return tokens[known:], "length"

    def assert_complete(self, *ids: int) -> None:
        """Assert that all (or the given) requests ended with exactly the expected tokens."""
        for id in ids or self.requests:
            tokens, reason = self.expected(id)
            assert self.tokens[id] == tokens, f"request {id}"
            assert self.last[id].finish_reason == reason, f"request {id}"

    def assert_idle(self) -> None:
        """Assert that all blocks and slots are free."""
        gauges = self.scheduler.gauges()
        assert not self.scheduler.has_work
        assert gauges == (0, 0, 0.0, 0)
        self.scheduler.check_integrity()


def queued(
    id: int,
    *,
    tenant: int = 0,
    group: int = 0,
    priority: int = 0,
    length: int = 1,
    blocks: int = 0,
    grammar: GrammarSpec | None = None,
) -> Request:
    """Return a request that arrived as number `id`, with as many prompt tokens and KV blocks."""
    params = SamplingParams(max_tokens=9, seed=0, grammar=grammar)
    message = AddRequest(
        id, "", 0, 0, [1] * length, params, priority=priority, tenant=tenant, group=group
    )
    made = request_from_message(
        message, arrival=id, priority=priority, max_model_len=99, eos_token_ids=frozenset()
    )
    made.table.num_blocks = blocks
    return made


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    """Build a rig; keyword arguments are sizes and limits."""
    return Rig
