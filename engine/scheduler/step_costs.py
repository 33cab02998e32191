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

_MIN_SLOPE = 1 / 64
"""Minimum time per row, as a fraction of the prior's."""

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
    newest_plain: int | None = None
    """Number of the newest such step without grammars."""


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
            decode_cost = self.base + rows + num_masked * self.masked
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
            if num_masked and self._knows_plain(rows):
                self._observe_masked(rows, num_masked, seconds)
                return
            if num_masked:  # their masks count as part of the rows, and not twice
                self.masked -= self.masked / _SMOOTHING
            self._observe_decodes(rows, seconds, is_plain=not num_masked)
            if self._num_steps % _FIT_INTERVAL == 0 or len(self._seen) == 1:
                self._fit()

    def of_masks(self, mask_us: int) -> float:
        """Return the cost of masks that take this many microseconds."""
        if not mask_us or not self._row_seconds:
            return 0.0
        return mask_us * 1e-6 / self._row_seconds

    def _knows_plain(self, rows: int) -> bool:
        """Return whether the time of so many rows without grammars is known from recent steps.

        That of more rows than these had is not: the line is fitted too badly there.
        """
        earliest = self._num_steps - _STALE_STEPS
        return any(
            seen.newest_plain is not None and seen.newest_plain > earliest
            for bits, seen in self._seen.items()
            if bits >= rows.bit_length()
        )

    def _observe_masked(self, rows: int, num_masked: int, seconds: float) -> None:
        decode_cost = self.base + rows
        beyond = seconds / self._row_seconds - decode_cost
        # Negative samples count too: otherwise noise alone would be a cost.
        sample = min(max(beyond, -decode_cost), decode_cost) / num_masked
        weight = min(num_masked, _SMOOTHING) / _SMOOTHING**2  # few rows hardly rise above the noise
        self.masked = max(0.0, self.masked + (sample - self.masked) * weight)

    def _observe_decodes(self, rows: int, seconds: float, *, is_plain: bool) -> None:
        newest_plain = self._num_steps if is_plain else None
        seen = self._seen.get(rows.bit_length())
        if seen is None:
            self._seen[rows.bit_length()] = _Seen(rows, seconds, 1, self._num_steps, newest_plain)
            return
        seen.count += 1
        weight = 1 / min(seen.count, _SMOOTHING)
        seen.rows += (rows - seen.rows) * weight
        seen.seconds += (min(seconds, _OUTLIER * seen.seconds) - seen.seconds) * weight
        seen.newest = self._num_steps
        if is_plain:
            seen.newest_plain = newest_plain

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
        self._row_seconds = max(slope, prior * _MIN_SLOPE)
        self.base = max(0.0, seconds / self._row_seconds - rows)
