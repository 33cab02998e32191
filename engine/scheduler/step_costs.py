"""Costs of steps, learned from completed ones.

All costs are in *rows*: the time that one more decode adds to a step. A step takes as long as its
base plus its rows, t = a + b * rows; base = a / b: hundreds of rows on an accelerator, about thirty
on a CPU with a small model. The first prompt tokens in a step with decodes cost extra, since they
use a different attention path.
"""

from dataclasses import dataclass

PRIOR_BASE = 32.0
"""Initial base: that of a small model on a CPU, the lowest in practice."""

PRIOR_PREFILL = 0.5
"""Initial cost of a prompt token."""

_PRIOR_SPREAD = 4.0
"""Variance of the row counts at which samples weigh as much as the prior: that of steps with four
rows more and steps without them."""

_SMOOTHING = 8
"""A new sample moves an average by 1/8 of the difference."""

_OUTLIER = 4.0
"""Samples are clipped to this multiple of the average: a step may have waited for a CPU."""

_STALE_STEPS = 2048
"""Half-life of a sample, in steps."""

_FIT_INTERVAL = 16
_MIN_PREFILL = 16
"""Steps with less prefill are used to estimate the mixed cost instead of the cost per token."""


@dataclass(slots=True)
class _Seen:
    """Averages over decode steps of similar row counts."""

    rows: float
    seconds: float
    count: int
    newest: int
    """Number of the newest such step."""


class StepCosts:
    """Learns from every step, as a pure function of its inputs."""

    def __init__(self) -> None:
        self.base = PRIOR_BASE
        """Fixed cost of a step without rows."""
        self.prefill = PRIOR_PREFILL
        """Cost of one prompt token."""
        self.mixed = 0.0
        """Extra fixed cost of a step of decodes with any prompt tokens."""
        self.masked = 0.0
        """Extra cost of a row with a grammar, but for the wait for its mask."""
        self._row_seconds = 0.0
        self._seen: dict[int, _Seen] = {}
        self._num_steps = 0
        self._newest_plain = 0
        """Number of the newest step of decodes without grammars."""

    def observe(
        self,
        rows: int,
        prefill_tokens: int,
        seconds: float,
        *,
        num_masked: int = 0,
        mask_wait_us: int = 0,
    ) -> None:
        """Learn from a completed step.

        Args:
            rows: decodes, including drafts.
            prefill_tokens: prompt tokens in the same step.
            seconds: from its plan, or the end of the previous step, to its result.
            num_masked: sequences with a grammar.
            mask_wait_us: part of the time spent waiting for grammar masks.
        """
        seconds -= mask_wait_us * 1e-6
        if seconds <= 0:
            return
        self._num_steps += 1
        if prefill_tokens and (rows or prefill_tokens >= _MIN_PREFILL):
            if not self._row_seconds:
                return
            decode_cost = self.base + rows
            beyond = seconds / self._row_seconds - decode_cost
            if prefill_tokens >= _MIN_PREFILL:
                minimum, maximum = self.prefill / _OUTLIER, self.prefill * _OUTLIER
                if rows:  # `mixed` may be outdated: attribute at least half to the tokens
                    beyond = max(beyond - self.mixed, beyond / 2)
                sample = min(max(beyond / prefill_tokens, minimum), maximum)
                self.prefill += (sample - self.prefill) / _SMOOTHING
            else:
                sample = min(max(beyond - self.prefill * prefill_tokens, 0.0), decode_cost)
                self.mixed += (sample - self.mixed) / _SMOOTHING
        elif rows:
            if not num_masked:
                self._newest_plain = self._num_steps
            elif self._num_steps - self._newest_plain < _STALE_STEPS and self._row_seconds:
                decode_cost = self.base + rows
                beyond = seconds / self._row_seconds - decode_cost
                sample = min(max(beyond, 0.0), decode_cost) / num_masked
                self.masked += (sample - self.masked) / _SMOOTHING
                return
            # Without recent steps of plain rows, the masks count as part of the rows.
            self._observe_decodes(rows, seconds)
            if self._num_steps % _FIT_INTERVAL == 0 or len(self._seen) == 1:
                self._fit()

    def of_masks(self, mask_us: int) -> float:
        """Return the cost of masks that take this many microseconds."""
        if not mask_us or not self._row_seconds:
            return 0.0
        return mask_us * 1e-6 / self._row_seconds

    def _observe_decodes(self, rows: int, seconds: float) -> None:
        seen = self._seen.get(rows.bit_length())
        if seen is None:
            self._seen[rows.bit_length()] = _Seen(rows, seconds, 1, self._num_steps)
            return
        seen.count += 1
        weight = 1 / min(seen.count, _SMOOTHING)
        seen.rows += (rows - seen.rows) * weight
        seen.seconds += (min(seconds, _OUTLIER * seen.seconds) - seen.seconds) * weight
        seen.newest = self._num_steps

    def _fit(self) -> None:
        """Fit a line through the samples; if they lie close together, with the prior's slope."""
        points = [
            (
                min(each.count, _SMOOTHING)
                * 0.5 ** ((self._num_steps - each.newest) / _STALE_STEPS),
                each,
            )
            for each in self._seen.values()
        ]
        total = sum(weight for weight, _ in points)
        rows = sum(weight * each.rows for weight, each in points) / total
        seconds = sum(weight * each.seconds for weight, each in points) / total
        prior = seconds / (PRIOR_BASE + rows)
        spread = sum(weight * (each.rows - rows) ** 2 for weight, each in points) / total
        together = sum(
            weight * (each.rows - rows) * (each.seconds - seconds) for weight, each in points
        )
        slope = (together / total + _PRIOR_SPREAD * prior) / (spread + _PRIOR_SPREAD)
        self._row_seconds = max(slope, prior / _PRIOR_SPREAD)
        self.base = max(0.0, seconds / self._row_seconds - rows)
