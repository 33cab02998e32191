"""Conversion of vLLM's engine core outputs to messages for front ends."""

import time
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine import EngineCoreEventType, FinishReason

from engine.shared.messages import (
    AddRequest,
    EngineCounters,
    RequestOutput,
    RequestTiming,
    TokenLogprob,
)


@dataclass(slots=True)
class Sequence:
    """A request in the engine; times are monotonic, in seconds."""

    message: AddRequest
    arrived: float
    planned: float | None = None
    first: float | None = None
    preemptions: int = 0

    def convert(self, output: Any, counters: EngineCounters) -> RequestOutput | None:
        """Convert a vLLM `EngineCoreOutput`; None if it has no tokens, vector or finish reason."""
        for event in output.events or ():
            if event.type == EngineCoreEventType.SCHEDULED and self.planned is None:
                self.planned = event.timestamp
            elif event.type == EngineCoreEventType.PREEMPTED:
                self.preemptions += 1
                counters.preemptions += 1
        if output.pooling_output is not None:
            return self._pooled(output, counters)
        tokens, reason = list(output.new_token_ids), output.finish_reason
        if not tokens and reason is None:
            return None
        now = time.monotonic()
        is_first = self.first is None and bool(tokens)
        if is_first:
            self.first = now
            if not self.message.output_token_ids:
                counters.prompt_tokens += len(self.message.prompt_token_ids)
        counters.generation_tokens += len(tokens)
        stats = output.prefill_stats
        cached = stats.num_cached_tokens if is_first and stats is not None else 0
        logprobs = output.new_logprobs
        prompt_tensors = output.new_prompt_logprobs_tensors
        result = RequestOutput(
            self.message.id,
            tokens,
            logprobs=None if logprobs is None else token_logprobs(logprobs),
            prompt_logprobs=None
            if prompt_tensors is None
            else token_logprobs(prompt_tensors.tolists()),
            num_cached_tokens=min(cached, len(self.message.prompt_token_ids)),
            timing=self._timing(now, ends=reason is not None)
            if tokens and (is_first or reason is not None)
            else None,
        )
        return result if reason is None else _ended(result, reason)

    def _pooled(self, output: Any, counters: EngineCounters) -> RequestOutput:
        now = self.first = time.monotonic()
        counters.prompt_tokens += len(self.message.prompt_token_ids)
        counters.pooled_sequences += 1
        stats = output.prefill_stats
        return RequestOutput(
            self.message.id,
            [],
            "stop",
            num_cached_tokens=0 if stats is None else stats.num_cached_tokens,
            timing=self._timing(now, ends=True),
            pooled=output.pooling_output.float().contiguous().numpy().tobytes(),
        )

    def _timing(self, now: float, *, ends: bool) -> RequestTiming:
        first = now if self.first is None else self.first
        planned = first if self.planned is None else self.planned
        return RequestTiming(
            max(0.0, planned - self.arrived),
            max(0.0, first - planned),
            now - first if ends else 0.0,
            self.preemptions,
        )


def _ended(output: RequestOutput, reason: Any) -> RequestOutput:
    match reason:
        case FinishReason.STOP:
            last = output.token_ids[-1] if output.token_ids else None
            return replace(output, finish_reason="stop", stop_token_id=last)
        case FinishReason.LENGTH:
            return replace(output, finish_reason="length")
        case FinishReason.ABORT:
            return replace(output, finish_reason="abort")
        case _:
            return replace(output, finish_reason="error", error=f"vLLM ended it: {reason}")


def token_logprobs(lists: Any) -> list[TokenLogprob]:
    """Return one entry per row of vLLM's arrays, whose first column is the sampled token."""
    rows = zip(
        lists.logprob_token_ids.tolist(),
        lists.logprobs.tolist(),
        lists.sampled_token_ranks.tolist(),
        strict=True,
    )
    return [TokenLogprob(values[0], rank, ids[1:], values[1:]) for ids, values, rank in rows]
