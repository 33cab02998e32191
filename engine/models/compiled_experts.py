"""Experts chosen, and gated, by kernels, for models in bfloat16 on a CPU."""

from functools import cache

import torch
from torch import Tensor

from engine.models.kernels.choice import compiled_for_cpu, is_close
from engine.models.layers import swiglu
from engine.models.moe import ChooseExperts, GateChosen, choose_experts, gating

_SHARED_SCORES = 1 << 12
"""Scores from which on all threads choose."""
_SHARED_VALUES = 1 << 15
"""Values from which on all threads gate."""


@cache
def choosing(dtype: torch.dtype, device: torch.device) -> ChooseExperts:
    """Return what chooses experts by scores of this type on this device."""
    return compiled_for_cpu(
        choose_experts,
        _choosing_kernel,
        _chooses_alike,
        "choices of experts",
        dtype=dtype,
        device=device,
    )


@cache
def swiglu_of_chosen(dtype: torch.dtype, device: torch.device) -> GateChosen:
    """Return what gates the chosen experts of a layer, by silu, in this type on this device."""
    return compiled_for_cpu(
        gating(swiglu),
        _gating_kernel,
        _gates_alike,
        "gates of chosen experts",
        dtype=dtype,
        device=device,
    )


def _choosing_kernel() -> ChooseExperts:
    from engine.models.kernels import experts as kernels
    from engine.models.kernels.compiling import threads_for

    def choose(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
        rows, count = scores.shape
        experts = torch.empty(rows, per_token, dtype=torch.int64)
        weights = torch.empty(rows, per_token, dtype=torch.float32)
        scratch = torch.empty(rows, count, dtype=torch.float32)
        kernels.choose(
            threads_for(rows, scores.numel(), _SHARED_SCORES),
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


def _chooses_alike(choose: ChooseExperts) -> bool:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 12, generator=generator).bfloat16()[:, :10]
    for normalize in (False, True):
        (experts, weights), (others, expected) = (
            function(scores, 3, normalize=normalize) for function in (choose, choose_experts)
        )
        if not torch.equal(experts, others) or not is_close(weights, expected):
            return False
    return True


def _gating_kernel() -> GateChosen:
    from engine.models.kernels import experts as kernels
    from engine.models.kernels.compiling import threads_for

    def gate(gate_up: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, count, width = gate_up.shape
        out = torch.empty(rows, count * width // 2, dtype=gate_up.dtype)
        tensors = gate_up.contiguous(), chosen.contiguous(), weights.contiguous(), out
        kernels.gate_chosen(
            threads_for(rows, out.numel(), _SHARED_VALUES),
            *(each.data_ptr() for each in tensors),
            rows,
            count,
            width // 2,
            chosen.shape[1],
        )
        return out

    return gate


def _gates_alike(gate: GateChosen) -> bool:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(3, 4, 20, generator=generator).bfloat16()
    chosen, weights = torch.tensor([[0, 3], [2, 1], [3, 0]]), torch.rand(3, 2, generator=generator)
    return is_close(gate(gate_up, chosen, weights), gating(swiglu)(gate_up, chosen, weights))
