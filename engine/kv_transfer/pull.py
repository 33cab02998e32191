"""How an engine gets the blocks of one prompt from another, as a state machine without I/O."""

from collections.abc import Sequence

from engine.kv_tiers.tiers import BlockName


class Pull:
    """Asks for blocks in their order, some ahead of those that have come.

    What has come is always a beginning of what is wanted: the pull is over with the first block
    that the peer does not have, that is damaged, that is missing between others, or that does not
    come in time.

    Args:
        wanted: names of the blocks, each once; a block is of use if those before it are there.
        window: most blocks that are asked for and have not come.
        patience: seconds without a block after which the peer is given up.
        deadline: when it is over in any case, as the times of all calls.
    """

    def __init__(
        self, wanted: Sequence[BlockName], *, window: int, patience: float, deadline: float
    ) -> None:
        self._wanted = wanted
        self._window = window
        self._patience = patience
        self._deadline = deadline
        self._num_asked = 0
        self._waits_since: float | None = None
        self.num_come = 0
        """Blocks that have come, from the first on."""
        self.is_given_up = False
        self.was_silent = False
        """Whether it was given up because the peer said nothing."""

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have come."""
        return self.num_come == len(self._wanted)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is to be asked for, or waited for, any more."""
        return self.is_given_up or self.is_complete

    @property
    def ends_at(self) -> float:
        """When `tick` ends it unless a block comes."""
        if self._waits_since is None:
            return self._deadline
        return min(self._deadline, self._waits_since + self._patience)

    def ask(self, now: float) -> Sequence[BlockName]:
        """Return the blocks to ask for now; none while half of a window is on its way."""
        if self.is_over or 2 * (self._num_asked - self.num_come) > self._window:
            return ()
        asked = self._num_asked
        self._num_asked = min(self.num_come + self._window, len(self._wanted))
        if self._waits_since is None:
            self._waits_since = now
        return self._wanted[asked : self._num_asked]

    def came(self, name: BlockName, *, is_good: bool, now: float) -> bool:
        """An answer came for a block.

        Args:
            is_good: whether the peer has it, and sent it undamaged.

        Returns:
            Whether its content is to be taken.
        """
        if self.is_over:
            return False
        if not is_good or name != self._wanted[self.num_come] or self.num_come >= self._num_asked:
            self.give_up()
            return False
        self.num_come += 1
        self._waits_since = now
        return True

    def give_up(self) -> None:
        """Nothing more comes: the peer is lost, or nobody wants the blocks any more."""
        self.is_given_up = not self.is_complete

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.is_over or now < self.ends_at:
            return
        since = self._waits_since
        self.was_silent = since is not None and now >= since + self._patience
        self.give_up()
