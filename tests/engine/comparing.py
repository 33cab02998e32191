"""Distances of computed values from reference values."""

import torch


def relative(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative distance of values of any dtype from their reference."""
    return float((values.float() - reference).norm() / reference.norm())
