"""Kernels around a layer's experts: how they are chosen, and what lies between their products."""

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from engine.kernels.cpu.arithmetic import (
    as_float32,
    as_int64,
    bfloat16_row,
    exponential,
    narrow,
    silu,
    widen,
)
from engine.kernels.cpu.compiling import (
    FIRST,
    MAX_ARGUMENTS,
    Kernel,
    compiled,
    own_rows,
    threads_for,
)

_ZERO, _TAKEN = np.float32(0), np.float32(-1)
_NOTHING = np.uint16(0)
_SHARED_SCORES = 1 << 12
"""Scores from which on all threads choose."""
_SHARED_VALUES = 1 << 15
"""Values from which on all threads gate."""


@compiled
def _softmax(scores: Any, count: int, shares: Any) -> None:
    """Turn scores of 16 bits into shares of one."""
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
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    scores, stride, rows, count = own[0], own[1], own[2], own[3]
    wanted, normalizes, scratch = own[4], own[5], own[8]
    chosen = carray(as_int64(own[6]), (rows, wanted))
    weights = carray(as_float32(own[7]), (rows, wanted))
    first, end = own_rows(arguments, rows)
    shares = carray(as_float32(scratch + 4 * count * first), (count,))
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


choose = Kernel(_choose)
"""Of scores [rows, experts] in bfloat16: how many values rows are apart, rows, experts, how many of
them are chosen, whether the weights of these are to add up to one; target experts [rows, chosen] in
int64, the most likely first, and weights [rows, chosen] in float32; scratch [rows, experts] in
float32."""


def _gate_chosen(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    source, target, rows, count = own[0], own[3], own[4], own[5]
    inner, wanted = own[6], own[7]
    chosen = carray(as_int64(own[1]), (rows, wanted))
    weights = carray(as_float32(own[2]), (rows, wanted))
    first, end = own_rows(arguments, rows)
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


gate_chosen = Kernel(_gate_chosen)
"""Of bfloat16: source [rows, experts, 2 * inner]; experts [rows, chosen] in int64 and their weights
in float32; target [rows, experts, inner], silu(gate) * up * weight of those that are chosen, else
zero; rows, experts, inner, chosen."""


def choose_experts(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Do as `engine.kernels.reference.choose_experts`."""
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
    """Do as `engine.kernels.reference.gating` with silu."""
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
