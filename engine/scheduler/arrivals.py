"""How requests come into the queue: refused, or once what they wait for is there.

That is their grammar, which is compiled, and the KV blocks of their prompts that other places have.
"""

import logging

from engine.batch.executor import ExecutorInfo
from engine.batch.grammars import Grammars
from engine.scheduler.adapter_slots import AdapterSlots
from engine.scheduler.isolation import Isolation
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.outputs import Outputs, refused_output, uncompiled_output
from engine.scheduler.refusal import bad_images, refusal
from engine.scheduler.request import Request, RequestStatus, request_from_message
from engine.scheduler.request_table import RequestTable
from engine.shared.messages import AddRequest, EngineCounters, RequestOutput

MAX_RENEWALS = 4
"""How often the grammar of one request is compiled anew, each time at the cost of a prefill."""
MAX_LATE = 5.0
"""Seconds for which a request draws a token again because its masks are late."""
_LATE = f"what the grammar allows next was not known within {MAX_LATE:.0f} s; make it simpler"

logger = logging.getLogger(__name__)


class Arrivals:
    """Lets requests in, and has what is to be compiled for them compiled."""

    def __init__(
        self,
        books: RequestTable,
        isolation: Isolation,
        kv: KVCacheManager,
        grammars: Grammars | None,
        adapters: AdapterSlots,
        counters: EngineCounters,
        executor: ExecutorInfo,
        *,
        max_model_len: int,
        by_priority: bool,
    ) -> None:
        self._books = books
        self._isolation = isolation
        self._kv = kv
        self._grammars = grammars
        self._adapters = adapters
        self._counters = counters
        self._vocab_size = executor.vocab_size
        self._pools, self._in_one_step = executor.pools, executor.in_one_step
        self._vision = executor.vision
        self._eos_token_ids = frozenset(executor.eos_token_ids)
        self._max_model_len = max_model_len
        self._by_priority = by_priority
        self._num_arrivals = 0

    def add(self, message: AddRequest, now: float = 0.0) -> RequestOutput | None:
        """Queue a request; one that cannot run or has nothing left to do is answered at once.

        The time, here and below, only serves to say how long requests took.
        """
        if message.id in self._books.all:
            name = message.request_id
            fields = {"request_id": name}
            logger.warning("request %s (%d) arrived twice", name, message.id, extra=fields)
            return None
        reason = refusal(
            message,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            pools=self._pools,
            in_one_step=self._in_one_step,
        )
        if reason is None and message.encoder_inputs:
            reason = bad_images(message, self._vision)
        if reason is None and message.adapter and message.adapter not in self._adapters.held:
            reason = "this engine does not have the adapter that the request names"
        if reason is not None:
            return RequestOutput(message.id, [], finish_reason="error", error=reason)
        request = request_from_message(
            message,
            arrival=self._num_arrivals,
            priority=message.priority if self._by_priority else 0,
            max_model_len=self._max_model_len,
            eos_token_ids=self._eos_token_ids,
            now=now,
        )
        if request.num_tokens >= request.max_total_tokens:
            return RequestOutput(message.id, [], finish_reason="length")
        if message.sampling.grammar is not None and self._grammars is None:
            error = "this engine has no tokenizer for grammars"
            return RequestOutput(message.id, [], finish_reason="error", error=error)
        self._books.come(request)
        if request.steps_alone:
            self._isolation.push(request)
            return None
        return self.compile(request)

    def compile(self, request: Request) -> RequestOutput | None:
        """Queue the request as soon as its grammar is compiled and its KV blocks are read."""
        self._books.compiling[request.id] = request
        spec = request.sampling.grammar
        if spec is not None and self._grammars is not None:
            request.grammar = self._grammars.ask(spec, request.tenant)
            self._counters.grammar_requests += 1
            self._counters.grammar_waits += not request.grammar.settled
        if not request.lacks_prompt_logprobs:
            request.fetch = self._kv.fetch(request.table, request.token_ids, request.kv_source)
        return self._queue_compiled(request)

    def queue_compiled(self) -> Outputs:
        """Queue the requests whose grammars were compiled, and blocks read, meanwhile.

        Returns:
            The answers to those whose grammars cannot be compiled.
        """
        outputs: Outputs = {}
        for request in list(self._books.compiling.values()):
            answer = self._queue_compiled(request)
            if answer is not None:
                outputs.setdefault(request.front_end, []).append(answer)
        return outputs

    def _queue_compiled(self, request: Request) -> RequestOutput | None:
        """Queue the request if it waits for nothing any more; its turn counts from now."""
        grammar, fetch = request.grammar, request.fetch
        if (grammar is not None and not grammar.settled) or (fetch and not fetch.settled):
            return None
        if grammar is not None and grammar.error is not None:
            self._books.retire(request)
            return uncompiled_output(request, grammar)
        if not request.num_renewals:
            request.arrival = self._num_arrivals
            self._num_arrivals += 1
        self._books.queue(request)
        return None

    def stall(self, request: Request, reason: str | None, now: float) -> RequestOutput | None:
        """Let a request draw its newest token again: its grammar failed for the reason given.

        None: what the grammar allows was not known in time. Returns the error that it ends with if
        that does not help.
        """
        if reason is None:
            return self._draw_again(request, now)
        return self._renew(request, reason)

    def _renew(self, request: Request, reason: str) -> RequestOutput | None:
        """Let a request, its newest draw forgotten, wait until its grammar is compiled anew.

        Returns the error that it ends with if that has not helped before.
        """
        spec = request.sampling.grammar
        assert self._grammars is not None
        assert spec is not None
        if not self._forget_draw(request) and request.renewed_at == request.num_output_tokens:
            return None  # drawn in a step that was in flight when the grammar failed
        in_vain = request.renewed_at == request.num_output_tokens
        if in_vain or request.num_renewals == MAX_RENEWALS:
            return refused_output(request, reason)
        request.num_renewals += 1
        request.renewed_at = request.num_output_tokens
        request.grammar = self._grammars.ask(spec, request.tenant)
        self._books.recompile(request)
        self._counters.grammar_waits += 1
        if request.grammar.settled and request.grammar.error is not None:
            return uncompiled_output(request, request.grammar)
        return self._queue_compiled(request)

    def _draw_again(self, request: Request, now: float) -> RequestOutput | None:
        if not self._forget_draw(request):
            return None  # drawn in a step that was in flight
        if request.late_at != request.num_output_tokens:
            request.late_at, request.late_since = request.num_output_tokens, now
        return refused_output(request, _LATE) if now - request.late_since > MAX_LATE else None

    def _forget_draw(self, request: Request) -> bool:
        """Take the newest draw for none; whether the request still ran, and is queued by this."""
        request.num_pending_tokens -= 1
        if request.status is RequestStatus.RUNNING:
            self._books.preempt(request)
            return True
        self._books.requeue_tokens(request, -1)
        return False
