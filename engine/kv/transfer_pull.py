"""An engine's pull of one prompt's blocks from another, as a state machine without I/O."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from engine.kv.tiers import BlockName


@dataclass(eq=False)
class Pull:
    """Requests blocks in order, some ahead of those that have arrived.

    The received blocks are always a prefix of the wanted ones: the pull ends with the first block
    that the peer lacks, or that is damaged, out of order or late.

    Args:
        wanted: names of the blocks, without duplicates; a block is usable only after those before
            it.
        window: maximum blocks requested and not received.
        patience: seconds without a block after which the peer is given up.
        deadline: time at which it ends in any case, on the clock of all calls.
    """

    wanted: Sequence[BlockName]
    _: KW_ONLY
    window: int
    patience: float
    deadline: float

    def __post_init__(self) -> None:
        self._num_requested = 0
        self._waits_since: float | None = None
        self.num_received = 0
        """Number of blocks received, from the first on."""
        self.is_given_up = False
        self.was_silent = False
        """Whether it was given up because the peer was silent."""

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have arrived."""
        return self.num_received == len(self.wanted)

    @property
    def is_over(self) -> bool:
        """Whether no more blocks are to be requested or awaited."""
        return self.is_given_up or self.is_complete

    @property
    def ends_at(self) -> float:
        """Time at which `tick` ends it unless a block arrives."""
        if self._waits_since is None:
            return self.deadline
        return min(self.deadline, self._waits_since + self.patience)

    def next_names(self, now: float) -> Sequence[BlockName]:
        """Return the blocks to request now; none while over half a window is in transit."""
        if self.is_over or 2 * (self._num_requested - self.num_received) > self.window:
            return ()
        first = self._num_requested
        self._num_requested = min(self.num_received + self.window, len(self.wanted))
        if self._waits_since is None:
            self._waits_since = now
        return self.wanted[first : self._num_requested]

    def received(self, name: BlockName, *, is_good: bool, now: float) -> bool:
        """Handle the answer for a block.

        Args:
            is_good: whether the peer has it and it arrived undamaged.

        Returns:
            Whether its content is to be used.
        """
        if self.is_over:
            return False
        if (
            not is_good
            or name != self.wanted[self.num_received]
            or self.num_received >= self._num_requested
        ):
            self.give_up()
            return False
        self.num_received += 1
        self._waits_since = now
        return True

    def give_up(self) -> None:
        """End the pull early: the peer is lost, or the blocks are no longer needed."""
        self.is_given_up = not self.is_complete

    def tick(self, now: float) -> None:
        """Handle timeouts."""
        if self.is_over or now < self.ends_at:
            return
        since = self._waits_since
        self.was_silent = since is not None and now >= since + self.patience
        self.give_up()
