"""What steps take, learned from those that are over.

All costs are in *rows*: the time that one more decode adds to a step. A step takes as long as its
base and its rows together, t = a + b * rows; base = a / b. On an accelerator that is hundreds of
rows, on a processor with a small model some thirty. The first prompt tokens beside decodes cost
more than others: attention is computed in another way for them.
"""

from dataclasses import dataclass

PRIOR_BASE = 32.0
"""Base, until more is known: that of a small model on a processor, the lowest there is."""

PRIOR_PREFILL = 0.5
"""Cost of a prompt token, until more is known."""

_PRIOR_SPREAD = 64.0
"""How much the numbers of rows must differ (sum of squares) to count as much as the prior."""

_SMOOTHING = 8
"""A new sample moves an average by 1/8 of the difference."""

_OUTLIER = 4.0
"""Samples count as at most this many times the average: a step may have waited for a processor."""

_STALE_STEPS = 2048
"""Steps after which what was seen of some number of rows counts half."""

_FIT_INTERVAL = 16
_MIN_PREFILL = 16
"""Steps with less prefill say little about the cost of a token, but what it costs to have any."""


@dataclass(slots=True)
class _Seen:
    """Decode steps of about the same number of rows."""

    rows: float
    seconds: float
    count: int
    newest: int
    """Number of the newest of these steps."""


class StepCosts:
    """Learns from every step; a pure function of what it is told."""

    def __init__(self) -> None:
        self.base = PRIOR_BASE
        """What a step costs without any row."""
        self.prefill = PRIOR_PREFILL
        """What one prompt token costs."""
        self.mixed = 0.0
        """What a step of decodes costs more for a few prompt tokens than `prefill` for each."""
        self._row_seconds = 0.0
        self._seen: dict[int, _Seen] = {}
        self._num_steps = 0

    def observe(
        self, rows: int, prefill_tokens: int, seconds: float, mask_wait_us: int = 0
    ) -> None:
        """Take a step with this many decodes that is over.

        Args:
            rows: decodes, drafts included.
            prefill_tokens: tokens computed beside them.
            seconds: from its plan, or from the end of the step before, to its result.
            mask_wait_us: what of that it waited for masks of grammars.
        """
        seconds -= mask_wait_us * 1e-6
        if seconds <= 0:
            return
        self._num_steps += 1
        if prefill_tokens and (rows or prefill_tokens >= _MIN_PREFILL):
            if not self._row_seconds:
                return
            alone = self.base + rows
            beyond = seconds / self._row_seconds - alone
            if prefill_tokens >= _MIN_PREFILL:
                least, most = self.prefill / _OUTLIER, self.prefill * _OUTLIER
                if rows:  # what is known of it may be old: the tokens cost at least half
                    beyond = max(beyond - self.mixed, beyond / 2)
                sample = min(max(beyond / prefill_tokens, least), most)
                self.prefill += (sample - self.prefill) / _SMOOTHING
            else:
                sample = min(max(beyond - self.prefill * prefill_tokens, 0.0), alone)
                self.mixed += (sample - self.mixed) / _SMOOTHING
        elif rows:
            self._observe_decodes(rows, seconds)
            if self._num_steps % _FIT_INTERVAL == 0 or len(self._seen) == 1:
                self._fit()

    def of_masks(self, mask_us: int) -> float:
        """Return what masks cost that take this many microseconds."""
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
