"""An executor without a model: the cost of a step is given by a formula.

The token at a position is a pure function of the request's seed, the position and the previous
token, so a request continues identically in any batch, after a preemption and on any engine. With
penalties it also depends on the set of tokens sampled before.
"""

import time
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec.structs import replace

from engine.batch.batch import BatchPlan, BatchResult, SlotStart
from engine.batch.executor import ExecutorInfo, GroupExecutor, PendingResult
from engine.models.spec import VisionSpec
from engine.shared.config import EngineConfig
from engine.shared.messages import SamplingParams, TokenLogprob
from engine.shared.pooling import PoolingSpec

if TYPE_CHECKING:  # torch is for groups and numpy for grammars only
    from socket import socket

    from engine.distributed.engines import EngineGroup
    from engine.distributed.group import Group
    from engine.distributed.spec import GroupSpec
    from engine.grammar.masks import GrammarTable
    from engine.lora.store import AdapterStore

DEFAULT_NUM_KV_BLOCKS = 4096
DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_VOCAB_SIZE = 32_000

_MASK = (1 << 64) - 1


def simulated_token(seed: int, position: int, previous: int, vocab_size: int) -> int:
    """Return the token of a request with this seed at `position`, after `previous`.

    The mixing step is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + previous + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab_size


def simulated_vector(token_ids: Sequence[int], size: int) -> bytes:
    """Return the vector of a sequence: `size` float32 numbers from -1 to 1."""
    first = zlib.crc32(array("q", token_ids).tobytes())
    return array("f", [(first * (i + 1) % 2001 - 1000) / 1000 for i in range(size)]).tobytes()


def is_penalized(sampling: SamplingParams) -> bool:
    """Return whether the tokens sampled so far affect how the next one is sampled."""
    return (
        sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
    )


def penalized_seed(seed: int, output_token_ids: Sequence[int]) -> int:
    """Return the seed that replaces a request's own after these output tokens."""
    return (seed + sum(set(output_token_ids)) * 0xD6E8FEB86659FD93) & _MASK


def adapted_seed(seed: int, version: str) -> int:
    """Return the seed that replaces a request's own with an adapter version."""
    return (seed ^ int(version[:16], 16)) & _MASK


class StageTimes:
    """Timing of pipeline stages: each computes one step at a time, for an equal part of its cost.

    A step enters the first stage when that is free and the step's input tokens have been sampled by
    the last stage. Times are in seconds: of the monotonic clock, or of a virtual one that advances
    only while a caller waits for a step.
    """

    def __init__(self, num_stages: int, *, virtual: bool) -> None:
        self._virtual = virtual
        self._now = 0.0
        self._free_at = [0.0] * num_stages
        self.busy = [0.0] * num_stages
        """Total busy time per stage."""
        self._drawn_at: dict[int, float] = {}
        """Time at which the newest token is sampled, by slot."""

    def now(self) -> float:
        """Return the current time."""
        return self._now if self._virtual else time.monotonic()

    def run(self, cost: float, slots: Sequence[int], drawing: Iterable[int]) -> float:
        """Compute a step with these slots, sampling for the `drawing` ones; return its end time."""
        at = max([self.now(), *(self._drawn_at.get(slot, 0.0) for slot in slots)])
        part = cost / len(self.busy)
        for stage, free_at in enumerate(self._free_at):
            at = max(at, free_at) + part
            self._free_at[stage] = at
            self.busy[stage] += part
        self._drawn_at.update(dict.fromkeys(drawing, at))
        return at

    def wait_until(self, over_at: float) -> None:
        """Wait until `over_at`."""
        if self._virtual:
            self._now = max(self._now, over_at)
        elif (remaining := over_at - time.monotonic()) > 0:
            time.sleep(remaining)


class _Pending(NamedTuple):
    """A simulated step that is done at `over_at`, by the clock of the stages."""

    outcome: BatchResult
    over_at: float
    times: StageTimes

    def result(self) -> BatchResult:
        self.times.wait_until(self.over_at)
        return self.outcome


class SimulatedExecutor(GroupExecutor):
    """Runs plans at the cost of `simulated_step_us` per step and `simulated_token_us` per token.

    Args:
        config: block size, number of blocks, length limit and cost model.
        vocab_size: exclusive bound of token ids.
        timing: "real" makes each step take its cost; "virtual" only adds it to `virtual_us` and to
            an otherwise stopped clock.
        adapters: adapters that affect tokens; without it there are none.
        grammars: tokens follow requests' grammars; without it they are refused.
        pooling: sequences get a vector each, as a function of their tokens.
        vision: accepts images, which have no effect; without it they are refused.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        timing: Literal["real", "virtual"] = "real",
        grammars: "GrammarTable | None" = None,
        adapters: "AdapterStore[bool] | None" = None,
        pooling: PoolingSpec | None = None,
        vision: VisionSpec | None = None,
    ) -> None:
        self.grammars: GrammarTable | None = grammars
        self._pooling = pooling
        self.adapters: AdapterStore[bool] | None = adapters
        self._placed: dict[int, str] = {}
        self._step_us = step_us = config.executor.simulated_step_us
        self._token_us = token_us = config.executor.simulated_token_us
        self.info = ExecutorInfo(
            num_kv_blocks=config.cache.num_kv_blocks or DEFAULT_NUM_KV_BLOCKS,
            max_model_len=config.model.max_model_len or DEFAULT_MAX_MODEL_LEN,
            vocab_size=vocab_size,
            eos_token_ids=(),
            model_fingerprint=f"simulated-{vocab_size}",
            task="generate" if pooling is None else pooling.task,
            in_one_step=pooling is not None and pooling.in_one_step,
            num_stages=config.parallel.pipeline_parallel_size,
            row_price=token_us / max(1, step_us + token_us),
            vision=vision,
            embedding_bytes=1024,
        )
        self.virtual_us = 0
        """Total cost of all steps."""
        self.times = StageTimes(self.info.num_stages, virtual=timing == "virtual")
        self._slots: dict[int, SlotStart] = {}
        """Contents of each slot, including the tokens sampled since."""
        self._group: Group | None = None

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step; its result is ready once the steps before it and its own cost have elapsed.

        Raises:
            GroupBroken: another engine of the group failed; nothing has changed.
        """
        num_tokens = plan.num_tokens
        if self._group is not None:  # a step takes as long as the group's largest
            num_tokens = max(self._group.all_gather_counts(num_tokens))
        self._apply_changes(plan)
        result = self._run(plan)
        cost_us = self._step_us + self._token_us * num_tokens
        self.virtual_us += cost_us
        drawing = (slot for slot, draws in zip(plan.slots, plan.samples, strict=True) if draws)
        over_at = self.times.run(cost_us * 1e-6, plan.slots, drawing)
        return _Pending(result, over_at, self.times)

    def sleep(self, level: int) -> None:
        """Drop all sequences."""
        self._slots.clear()
        self._placed.clear()

    def wake_up(self, *, kv_cache: bool = True) -> None:
        """Do nothing: there are no weights."""

    def load_weights(self, model: str, revision: str | None) -> None:
        """Drop all sequences; tokens do not depend on weights."""
        self.sleep(1)

    def settle_weights(self, *, revert: bool) -> None:
        """Drop all sequences when switching back."""
        if revert:
            self.sleep(1)

    def prepare_group(self, position: int, size: int) -> None:
        """Import torch, which only groups need."""
        import engine.distributed.engines  # noqa: F401

    def join_group(self, spec: "GroupSpec", listener: "socket | None") -> "EngineGroup":
        """Connect to the other engines, and exchange the size of every step with them.

        Raises:
            GroupBroken: not all engines connected.
        """
        from engine.distributed.engines import join_engines

        group = join_engines(spec, listener=listener)
        self._group = group.processes
        return group

    def shutdown(self) -> None:
        """Drop all sequences."""
        self._slots.clear()
        if self.grammars is not None:
            self.grammars.shutdown()
        if self.adapters is not None:
            self.adapters.shutdown()

    def _apply_changes(self, plan: BatchPlan) -> None:
        for slot, version in plan.adapters.items():
            assert self.adapters is not None
            assert version in self.adapters, f"adapter {version} is not there"
            self._placed[slot] = version
        for start in plan.starting:
            self._slots[start.slot] = replace(start, token_ids=start.token_ids.copy())
        for row, proposed in plan.proposed.items():
            self._slots[plan.slots[row]].token_ids.extend(proposed)
        if self.grammars is not None:
            for start in plan.starting:
                self.grammars.start(start)

    def _run(self, plan: BatchPlan) -> BatchResult:
        slots, vocab_size = self._slots, self.info.vocab_size
        if self._pooling is not None:
            size, pooled = self._pooling.size, {}
            each = {s.slot for s in plan.starting if s.pooling and s.pooling.per_token}
            for row in (row for row, sample in enumerate(plan.samples) if sample):
                ids = slots[plan.slots[row]].token_ids
                parts = [[i] for i in ids] if plan.slots[row] in each else [ids]
                pooled[row] = b"".join(simulated_vector(part, size) for part in parts)
            return BatchResult([], pooled=pooled)
        drawing = [slot for slot, sample in zip(plan.slots, plan.samples, strict=True) if sample]
        drafts = {plan.slots[row]: tokens for row, tokens in plan.proposed.items()}
        grammars = self.grammars
        choices = {} if grammars is None else grammars.choices(drawing, drafts)
        ends: dict[int, str | None] = {}
        stalls: dict[int, str | None] = {}
        drawn: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        accepted: dict[int, int] = {}
        has_logprobs = False
        rows = zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
        for row, (slot, start, count, sample) in enumerate(rows):
            state = slots[slot]
            sampling, token_ids = state.sampling, state.token_ids
            end = start + count
            if sampling.prompt_logprobs is not None and start + 1 < state.num_prompt_tokens:
                known = token_ids[start + 1 : min(end + 1, state.num_prompt_tokens)]
                prompt_logprobs[row] = [
                    _token_logprob(t, sampling.prompt_logprobs, vocab_size) for t in known
                ]
            if not sample:
                continue
            new = self._draw(state, drafts.get(slot, []), choices.get(slot, []))
            if grammars is not None:
                advanced = grammars.advance([slot] * len(new), new)
                ends |= advanced.reasons
                stalls |= advanced.stalls
                surplus = advanced.surplus.get(slot, 0)
                del new[len(new) - surplus :], token_ids[len(token_ids) - surplus :]
            if row in plan.proposed:
                accepted[row] = len(new) - 1
            drawn += new
            if sampling.logprobs is None:
                logprobs += [None] * len(new)
            else:
                has_logprobs = True
                logprobs += [
                    _token_logprob(t, sampling.logprobs, vocab_size, sampling.logprob_token_ids)
                    for t in new
                ]
        scores = logprobs if has_logprobs else None
        mask_us = {} if grammars is None else grammars.mask_us
        waited_us = 0 if grammars is None else grammars.waited_us
        return BatchResult(
            drawn, scores, prompt_logprobs, accepted, ends, stalls, mask_us, mask_wait_us=waited_us
        )

    def _draw(self, state: SlotStart, proposed: list[int], choices: list[list[int]]) -> list[int]:
        """Replace the proposed tokens at the end of a slot by the accepted ones and one more."""
        token_ids, sampling = state.token_ids, state.sampling
        end = len(token_ids) - len(proposed)
        del token_ids[end:]
        new: list[int] = []
        while len(new) <= len(proposed) and new == proposed[: len(new)]:
            allowed = choices[len(new)] if choices else []
            count = len(allowed) or self.info.vocab_size
            seed = sampling.seed
            if state.adapter >= 0:
                seed = adapted_seed(seed, self._placed[state.adapter])
            if is_penalized(sampling):
                seed = penalized_seed(seed, token_ids[state.num_prompt_tokens :])
            token_id = simulated_token(seed, len(token_ids), token_ids[-1], count)
            if allowed:
                token_id = allowed[token_id]
            token_ids.append(token_id)
            new.append(token_id)
        return new


def _token_logprob(
    token_id: int, num_alternatives: int, vocab_size: int, named: tuple[int, ...] = ()
) -> TokenLogprob:
    """Return made-up log probabilities in which the chosen token is the most likely."""
    count = min(num_alternatives, vocab_size)
    return TokenLogprob(
        logprob=-0.5,
        rank=1,
        top_ids=list(named) or [(token_id + i) % vocab_size for i in range(count)],
        top_logprobs=[-0.5 - (i - token_id) % vocab_size for i in named]
        or [-0.5 - i for i in range(count)],
    )
