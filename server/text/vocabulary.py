"""Token ids that clients name."""

from collections.abc import Sequence

from server.errors import invalid


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that token ids are in the model's vocabulary.

    Raises:
        ApiError: one is not; `field` is what it names.
    """
    if token_ids and max(token_ids) >= vocab_size:
        raise invalid(
            f"{field}: token id {max(token_ids)} is out of vocabulary: {vocab_size} tokens",
            field,
        )
