"""What an engine's own process needs of the processes that hold the model's other parts."""

from typing import Protocol

from engine.distributed.group import Group
from engine.models.decoder import Decoder, Followers
from engine.runner.model_runner import EarlierStages


class Leader(Followers, Protocol):
    """The processes that hold the other parts of a model, as their leader sees them."""

    @property
    def group(self) -> Group:
        """This process, which is the first, and the others of its stage."""
        ...

    def earlier(self, model: Decoder) -> EarlierStages | None:
        """Return the stages before that of this process, whose part is the model given."""
        ...

    def min_blocks(self, own: int) -> int:
        """Wait until all have answered; return the fewest KV blocks that any has memory for.

        They answer when they have loaded their part, and at the end of a trial.
        """
        ...

    def begin_trial(self, num_blocks: int) -> None:
        """Have them watch their memory, with a KV cache of so many blocks."""
        ...

    def end_trial(self) -> None:
        """Have them free that cache and answer how many blocks they have memory for."""
        ...

    def allocate(self, num_blocks: int, fingerprint: str) -> None:
        """Have them hold their parts of the weights, and an empty KV cache of so many blocks.

        Args:
            fingerprint: of the weights in this process.

        Raises:
            CannotDo: one of them has other weights.
        """
        ...
