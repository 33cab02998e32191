"""Admission policies: when the ranks of a lockstep group prefill.

A step of such a group takes as long as its slowest rank. A rank that prefills alone stalls the
decodes of all others, so ranks should prefill equal amounts in the same step, and work that waits
for a match should not wait too long.
"""

from collections.abc import Callable, Sequence

from engine.scheduler.admission import (
    NO_LOAD,
    UNLIMITED,
    AdmissionPolicy,
    AdmitAll,
    Grant,
    PolicyFailed,
    RankState,
)
from engine.shared.config import SchedulerConfig
from engine.shared.plugins import load_plugin

_SCALE = 1 << 10
"""Durations are integers in 1/1024 us."""

_SMOOTHING = 8
"""A new sample moves an average by 1/8 of the difference."""

_MIN_SAMPLE_TOKENS = 16
"""Steps with less prefill are too noisy to estimate its cost."""

_PRIOR_TOKENS_PER_STEP = 128
"""Prefill tokens assumed to cost as much as one decode step until both are measured."""


def build_admission_policy(config: SchedulerConfig, lockstep_size: int) -> AdmissionPolicy:
    """Return the configured policy for one rank of a group of `lockstep_size` engines.

    An engine that steps alone is a group of 1. The default policy is `none` for it, and `level` for
    larger groups.

    Raises:
        BadPlugin: the policy's plugin cannot be used.
    """
    name = config.admission_policy or ("level" if lockstep_size > 1 else "none")
    match name:
        case "none":
            return AdmitAll()
        case "balance":
            return Balance(config.max_num_seqs)
        case "cadence":
            return Cadence(config.admission_cadence)
        case "level":
            return Level(
                step_budget=config.max_num_batched_tokens,
                wait_weight=config.level_wait_weight,
                hold_per_rank=config.level_hold_per_rank,
            )
        case _:

            def built(policy: Callable[[SchedulerConfig, int], AdmissionPolicy]) -> AdmissionPolicy:
                made = policy(config, lockstep_size)
                Grant(*made.decide(0, [NO_LOAD] * (lockstep_size if made.exchanges else 1)))
                return _PluginPolicy(name, policy(config, lockstep_size))

            return load_plugin("swell.admission_policies", name, "--admission-policy", built)


class _PluginPolicy:
    """A plugin's policy; its errors name it."""

    def __init__(self, name: str, policy: AdmissionPolicy) -> None:
        self._name, self._policy = name, policy
        self.exchanges = policy.exchanges

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        """Return the plugin's grant."""
        try:
            return Grant(*self._policy.decide(step, table))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise PolicyFailed(f"--admission-policy {self._name} failed: {reason}") from error


class Balance:
    """Admit no request while any rank runs as many requests as it has slots.

    Partial prefills continue. This only gates: it has no effect below capacity, and a request that
    misses the moment waits until every rank has a free slot again.
    """

    exchanges = True

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        """Return a grant that is unlimited or admits no new request."""
        if max(state.running for state in table) >= self._max_num_seqs:
            return Grant(admit_new=False)  # a rank is full
        return UNLIMITED


class Cadence:
    """Prefill only on every `interval`-th step, or always if that is not enough.

    Ranks count the same steps, so nothing is exchanged. A rank without decodes never waits, and one
    whose prefill step left requests waiting prefills in every step until none waits.
    """

    exchanges = False

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._prefilled = False
        self._saturated = False

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        """Return an unlimited grant or a hold; `table` has only this rank's state."""
        (state,) = table
        if self._prefilled:
            self._saturated = state.passed_over > 0
        off_beat = step % self._interval != 0
        hold = off_beat and not self._saturated and state.decodes > 0
        self._prefilled = not hold
        return Grant(token_cap=0) if hold else UNLIMITED


class Level:
    """A common cap on prefill tokens for all ranks: a water level.

    Under a cap L each rank prefills min(L, its ready tokens). Tokens of the fullest rank beyond the
    mean are time in which the other ranks' decodes stall. Ranks with equal amounts lose nothing and
    never wait. Otherwise waiting is counted, in requests times steps, and the prefill runs once
    that has cost as much as the stall would (the ski-rental rule: at most twice the cost of the
    better choice, for any arrivals). Ranks without requests are ignored, so traffic on a single
    rank is never held.

    Args:
        step_budget: maximum tokens of one step.
        wait_weight: decode steps lost that are worth one request waiting for one step.
        hold_per_rank: maximum consecutive held steps, per rank (exclusive).
    """

    exchanges = True

    def __init__(self, *, step_budget: int, wait_weight: int, hold_per_rank: int) -> None:
        self._least_useful = step_budget // 4
        self._wait_weight = wait_weight
        self._hold_per_rank = hold_per_rank
        self._costs = _MeasuredCosts()
        self._debt = 0
        self._steps_held = 0

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        """Return the cap for this step: 0 to hold, -1 for no cap."""
        self._costs.observe(table)
        busy = [state for state in table if state.running or state.waiting]
        decodes = sum(state.decodes for state in busy)
        ready = [state.ready_prefill_tokens for state in busy]
        if decodes == 0 or max(ready) == 0:
            return self._release(UNLIMITED)
        self._debt += self._wait_weight * sum(state.ready_prefills for state in busy)
        self._steps_held += 1
        if self._steps_held >= self._hold_per_rank * len(table):
            return self._release(UNLIMITED)
        cap = self._affordable_cap(ready, decodes)
        if cap == 0:
            return Grant(token_cap=0)  # waiting costs less than the stall
        return self._release(Grant(token_cap=cap))

    def _affordable_cap(self, ready: list[int], decodes: int) -> int:
        """Return the highest cap whose waste is covered by the waiting so far, or 0."""
        # In decode steps lost: (decodes * prefill cost / step cost) * tokens beyond the mean, plus
        # the same for a slice so thin that it only postpones. Multiplied out to stay in integers.
        per_token, per_step = self._costs.prefill_token, self._costs.decode_step
        affordable = self._debt * per_step * len(ready)
        useful = min(self._least_useful, max(ready))
        for cap in sorted({tokens for tokens in ready if tokens}, reverse=True):
            beyond_mean = cap * len(ready) - sum(min(tokens, cap) for tokens in ready)
            too_thin = max(0, useful - cap) * len(ready)
            if decodes * per_token * (beyond_mean + too_thin) <= affordable:
                return cap
        return 0

    def _release(self, grant: Grant) -> Grant:
        self._debt = self._steps_held = 0
        return grant


class _MeasuredCosts:
    """Measured costs of a decode step and of a prefill token, in 1/1024 us."""

    def __init__(self) -> None:
        self.decode_step = _PRIOR_TOKENS_PER_STEP * _SCALE
        self.prefill_token = _SCALE
        self._decode_step: int | None = None
        self._prefill_token: int | None = None
        self._decodes_before = 0

    def observe(self, table: Sequence[RankState]) -> None:
        """Update from the table's sample of the previous step."""
        duration = max(state.last_step_us for state in table) * _SCALE
        tokens = max(state.last_prefill_tokens for state in table)
        decodes, self._decodes_before = self._decodes_before, sum(s.decodes for s in table)
        if duration == 0:
            return
        if tokens == 0 and decodes > 0:
            self._decode_step = _moved(self._decode_step, duration)
        elif tokens >= _MIN_SAMPLE_TOKENS and self._decode_step is not None:
            sample = max(1, (duration - self._decode_step) // tokens)
            self._prefill_token = _moved(self._prefill_token, sample)
        # One alone would be compared with a prior in other units.
        if self._decode_step is not None and self._prefill_token is not None:
            self.decode_step, self.prefill_token = self._decode_step, self._prefill_token


def _moved(average: int | None, sample: int) -> int:
    return sample if average is None else average + (sample - average) // _SMOOTHING
