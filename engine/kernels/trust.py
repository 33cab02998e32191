"""Whether what computes with kernels agrees with torch's operators."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_Built = TypeVar("_Built")

_TOLERANCE = 0.05
"""Between two ways to round a few standard normal numbers to 8 bits of mantissa."""


def trusted(
    build: Callable[[], _Built], agrees: Callable[[_Built], bool], replaced: str
) -> _Built | None:
    """Build what computes with kernels, which compiles them, and compare it with torch's operators.

    None if that fails or they differ; the log then says that what would be `replaced` stays.
    """
    try:
        built = build()
        if agrees(built):
            return built
        reason = "fused kernels differ from them"
    except Exception as error:  # compilers raise what they like
        reason = str(error) or type(error).__name__
    logger.warning("%s are torch's own: %s", replaced, reason)
    return None


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether results of a few standard normal numbers differ by no more than how they round."""
    return torch.allclose(one.float(), other.float(), rtol=_TOLERANCE, atol=_TOLERANCE)
