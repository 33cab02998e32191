"""How much prefill a step can do: the policy's grant and the step's token budget."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Grant(NamedTuple):
    """What an admission policy allows in one step. Decodes are never limited."""

    token_cap: int = -1
    """Maximum prefill tokens, for partial prefills and new admissions together; -1 is unlimited, 0
    blocks all prefill."""
    admit_new: bool = True
    """Whether waiting requests can be admitted."""
    run_partials: bool = True
    """Whether prefills that have begun can continue."""


UNLIMITED = Grant()


class RankState(NamedTuple):
    """State of a rank that is the policy's input before a step is scheduled."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    free_kv_blocks: int
    decodes: int = 0
    """Running requests that are past their prefill."""
    ready_prefill_tokens: int = 0
    """Prefill tokens that this rank could compute in this step: partial prefills, and waiting
    requests that fit the free slots and blocks; limited to the budget left after decodes."""
    ready_prefills: int = 0
    """Number of requests with these tokens."""
    passed_over: int = 0
    """Waiting requests that the newest plan did not admit."""
    last_step_us: int = 0
    """Duration of the newest completed step; 0 if unknown."""
    last_prefill_tokens: int = 0
    """Prefill tokens that this rank computed in that step."""


NO_LOAD = RankState(0, 0, 0, 0)


class AdmissionPolicy(Protocol):
    """Decides when prefills run.

    `decide` must be a pure function of its arguments and earlier calls, using only integers: all
    ranks of a lockstep group call it with the same table and must compute the same grant.
    """

    @property
    def exchanges(self) -> bool:
        """Whether `decide` needs the states of all ranks; if not, it gets only this rank's state,
        and ranks can compute different grants."""

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        """Return the grant for `step`, given the states of the ranks in rank order.

        Called once before each step. States are taken after the input queue is drained; requests
        that arrive later are not admitted in this step. Steps count from 0 in every wave.
        """


class PolicyFailed(RuntimeError):
    """A plugin's policy failed; the message names it and the reason."""


class AdmitAll:
    """The policy `none`: admit whatever fits."""

    exchanges = False

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        """Return an unlimited grant."""
        return UNLIMITED


class StepBudget:
    """Remaining tokens of one step; the `try_*` methods reserve them."""

    __slots__ = ("_admit_new", "_has_prefill", "_prefill_tokens", "_run_partials", "num_tokens")

    def __init__(self, max_tokens: int, grant: Grant = UNLIMITED) -> None:
        self.num_tokens = max_tokens
        """Unreserved tokens."""
        self._has_prefill = False
        self._prefill_tokens = max_tokens if grant.token_cap < 0 else grant.token_cap
        self._admit_new = grant.admit_new
        self._run_partials = grant.run_partials

    @property
    def can_admit(self) -> bool:
        """Whether `try_admit` would reserve at least one token."""
        return self._admit_new and self.num_tokens > 0 and self._prefill_tokens > 0

    def try_decode(self) -> bool:
        """Reserve one token for a decode."""
        if self.num_tokens == 0:
            return False
        self.num_tokens -= 1
        return True

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens available for prefill."""
        return min(self.num_tokens, self._prefill_tokens)

    def try_continue(self, num_tokens: int, *, all_or_none: bool = False) -> int:
        """Reserve up to `num_tokens` tokens for a partial prefill; 0 means not in this step.

        If `all_or_none`, reserve all of them or none; this can exceed the grant, since grants
        might always be smaller.
        """
        return self._try_prefill(num_tokens, all_or_none=all_or_none) if self._run_partials else 0

    def try_admit(self, num_tokens: int, *, all_or_none: bool = False) -> int:
        """Reserve tokens like `try_continue`, for a new admission."""
        return self._try_prefill(num_tokens, all_or_none=all_or_none) if self._admit_new else 0

    def fits_whole(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` tokens are available for a new sequence computed in one step.

        The first one in a step can exceed the grant, since grants might always be smaller.
        """
        if not self.can_admit or num_tokens > self.num_tokens:
            return False
        return num_tokens <= self._prefill_tokens or not self._has_prefill

    def _try_prefill(self, num_tokens: int, *, all_or_none: bool) -> int:
        count = min(num_tokens, self.num_prefill_tokens)
        if all_or_none and count:
            count = num_tokens if num_tokens <= self.num_tokens else 0
        self._has_prefill |= count > 0
        self.num_tokens -= count
        self._prefill_tokens = max(0, self._prefill_tokens - count)
        return count
