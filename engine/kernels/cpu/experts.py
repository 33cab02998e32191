"""Kernels for choosing experts and for the gates between their products."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.arithmetic import (
    bfloat16_row,
    exponential,
    float32s,
    int64s,
    narrow,
    silu,
    widen,
)
from engine.kernels.cpu.compiling import (
    Kernel,
    arguments_of,
    compiled,
    thread_rows,
    threads_for,
)

_ZERO, _TAKEN = np.float32(0), np.float32(-1)
_NOTHING = np.uint16(0)
_SHARED_SCORES = 1 << 12
"""Minimum scores for which all threads are used."""
_SHARED_VALUES = 1 << 15
"""Minimum values for which all threads are used."""

_eight, _nine = arguments_of(8), arguments_of(9)


@compiled
def _softmax(scores: Any, count: int, shares: Any) -> None:
    """Convert bfloat16 scores to probabilities."""
    largest = widen(scores[0])
    for i in range(count):
        largest = max(largest, widen(scores[i]))
    total = _ZERO
    for i in range(count):
        shares[i] = exponential(widen(scores[i]) - largest)
        total += shares[i]
    for i in range(count):
        shares[i] = shares[i] / total


def _choose(pointer: Any) -> None:
    scores, stride, rows, count, wanted, normalizes, experts, shares_of, scratch = _nine(pointer)
    chosen, weights = int64s(experts, (rows, wanted)), float32s(shares_of, (rows, wanted))
    first, end = thread_rows(pointer, rows)
    shares = float32s(scratch + 4 * count * first, count)
    for row in range(first, end):
        _softmax(bfloat16_row(scores, row, stride), count, shares)
        total = _ZERO
        for place in range(wanted):
            best = 0
            for i in range(1, count):
                if shares[i] > shares[best]:
                    best = i
            chosen[row, place], weights[row, place] = best, shares[best]
            total += shares[best]
            shares[best] = _TAKEN
        if normalizes:
            for place in range(wanted):
                weights[row, place] = weights[row, place] / total


choose = Kernel(_choose, 9)
"""Arguments: scores [rows, experts] in bfloat16; their row stride in values; rows; experts;
number of experts to choose; whether to normalize weights to a sum of one; target experts [rows,
chosen] in int64, most likely first, and weights [rows, chosen] in float32; scratch [rows,
experts] in float32."""


def _gate_chosen(pointer: Any) -> None:
    source, experts, shares_of, target, rows, count, inner, wanted = _eight(pointer)
    chosen, weights = int64s(experts, (rows, wanted)), float32s(shares_of, (rows, wanted))
    first, end = thread_rows(pointer, rows)
    for row in range(first, end):
        for expert in range(count):
            place = row * count + expert
            share = _ZERO
            for choice in range(wanted):
                if chosen[row, choice] == expert:
                    share += weights[row, choice]
            out = bfloat16_row(target, place, inner)
            if share == _ZERO:
                for i in range(inner):
                    out[i] = _NOTHING
                continue
            gate = bfloat16_row(source, 2 * place, inner)
            up = bfloat16_row(source, 2 * place + 1, inner)
            for i in range(inner):
                out[i] = narrow(silu(widen(gate[i])) * widen(up[i]) * share)


gate_chosen = Kernel(_gate_chosen, 8)
"""Arguments, bfloat16 unless specified: source [rows, experts, 2 * inner]; experts [rows, chosen]
in int64 and their weights in float32; target [rows, experts, inner], silu(gate) * up * weight for
chosen experts, else zero; rows, experts, inner, chosen."""


def choose_experts(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Compute `engine.kernels.reference.choose_experts`."""
    rows, count = scores.shape
    experts = torch.empty(rows, per_token, dtype=torch.int64)
    weights = torch.empty(rows, per_token, dtype=torch.float32)
    scratch = torch.empty(rows, count, dtype=torch.float32)
    choose(
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


def swiglu_of_chosen(gate_up: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute `engine.kernels.reference.gating` with SiLU."""
    rows, count, width = gate_up.shape
    out = torch.empty(rows, count * width // 2, dtype=gate_up.dtype)
    tensors = gate_up.contiguous(), chosen.contiguous(), weights.contiguous(), out
    gate_chosen(
        threads_for(rows, out.numel(), _SHARED_VALUES),
        *(each.data_ptr() for each in tensors),
        rows,
        count,
        width // 2,
        chosen.shape[1],
    )
    return out
