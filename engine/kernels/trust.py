"""Checks that kernels agree with torch's operators."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_Built = TypeVar("_Built")

_TOLERANCE = 0.05
"""Maximum difference between two 8-bit-mantissa roundings of a few standard normal numbers."""


def trusted(
    build: Callable[[], _Built], agrees: Callable[[_Built], bool], replaced: str
) -> _Built | None:
    """Build, and thereby compile, something with kernels, and compare it with torch's operators.

    Return None if that fails or they differ, logging that torch's operators named by `replaced` are
    used.
    """
    try:
        built = build()
        if agrees(built):
            return built
        reason = "fused kernels differ from them"
    except Exception as error:  # compilers raise arbitrary exceptions
        reason = str(error) or type(error).__name__
    logger.warning("%s are torch's own: %s", replaced, reason)
    return None


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether results of a few standard normal numbers differ only by rounding."""
    return torch.allclose(one.float(), other.float(), rtol=_TOLERANCE, atol=_TOLERANCE)
