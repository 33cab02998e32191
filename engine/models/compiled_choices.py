"""Choices of experts by a kernel, for models in bfloat16 on a CPU."""

from functools import cache

import torch
from torch import Tensor

from engine.models.kernels.choice import can_compile, is_close, trusted
from engine.models.moe import ChooseExperts, choose_experts

_SHARED_SCORES = 1 << 12
"""Scores from which on all threads choose."""


@cache
def choosing(dtype: torch.dtype, device: torch.device) -> ChooseExperts:
    """Return what chooses experts by scores of this type on this device."""
    replaced = "choices of experts"
    if device.type != "cpu" or not can_compile(dtype, device, replaced):
        return choose_experts
    return trusted(_by_kernel, _agrees, replaced) or choose_experts


def _by_kernel() -> ChooseExperts:
    from engine.models.kernels import choices

    def choose(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
        rows, count = scores.shape
        experts = torch.empty(rows, per_token, dtype=torch.int64)
        weights = torch.empty(rows, per_token, dtype=torch.float32)
        scratch = torch.empty(rows, count, dtype=torch.float32)
        choices.choose(
            torch.get_num_threads() if scores.numel() >= _SHARED_SCORES else 1,
            scores.data_ptr(),
            scores.stride(0),
            rows,
            count,
            per_token,
            int(normalize),
            experts.data_ptr(),
            weights.data_ptr(),
            scratch.data_ptr(),
        )
        return experts, weights

    return choose


def _agrees(choose: ChooseExperts) -> bool:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 12, generator=generator).bfloat16()[:, :10]
    for normalize in (False, True):
        (experts, weights), (others, expected) = (
            function(scores, 3, normalize=normalize) for function in (choose, choose_experts)
        )
        if not torch.equal(experts, others) or not is_close(weights, expected):
            return False
    return True
