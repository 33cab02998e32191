"""How far what was computed is from what should have been."""

import torch


def relative(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the distance of values of any type from their reference, as a part of that."""
    return float((values.float() - reference).norm() / reference.norm())
