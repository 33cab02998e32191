"""A kernel for a layer's experts, on processors with bfloat16 dot products.

Each expert computes the tokens that chose it. Weights of unused experts are not read.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.arithmetic import bfloat16_row, float32s, int64s, narrow, silu
from engine.kernels.cpu.avx512 import LANES, LINE, floats_at, stack_memory, store_rounded
from engine.kernels.cpu.compiling import (
    Kernel,
    arguments_of,
    compiled,
    thread_shares,
    wait_for_others,
)
from engine.kernels.cpu.pair_product import BLOCK, ROWS, add_rows
from engine.kernels.cpu.pair_sums import GROUP, SUMS_BYTES
from engine.kernels.cpu.results import part_of

_scratch = stack_memory(2 * ROWS * SUMS_BYTES)
_ZERO = np.float32(0)
_SUMS_TOGETHER = 1 << 18
"""Bytes of sums that fit the L2 cache together with weights."""


class _Arguments(NamedTuple):
    """The kernel's arguments: counts and addresses, of bfloat16 values unless specified."""

    x: int
    """[tokens, hidden]"""
    gates: int
    """[experts] int64: addresses of [inner / BLOCK, 2, hidden / 2, BLOCK, 2], with each block of
    gates followed by its ups."""
    downs: int
    """[experts] int64: addresses of [hidden / BLOCK, inner / 2, BLOCK, 2]."""
    chosen: int
    """[tokens, wanted] int64"""
    weights: int
    """[tokens, wanted] float32"""
    target: int
    """[tokens, hidden]"""
    between: int
    """Scratch memory for [tokens * wanted, inner]."""
    memory: int
    """Scratch memory of all threads."""
    tokens: int
    wanted: int
    hidden: int
    inner: int
    experts: int
    thread_bytes: int
    """Scratch bytes per thread."""
    blocks: int
    """Output blocks computed together (see `own_memory`)."""


_arguments = arguments_of(len(_Arguments._fields))


@compiled
def _sort(chosen: Any, firsts: Any, order: Any, pairs: int, experts: int) -> None:
    """Counting sort of the pairs by expert; `firsts` are the starts of each expert's pairs."""
    for expert in range(experts + 1):
        firsts[expert] = 0
    for pair in range(pairs):
        firsts[chosen[pair] + 1] += 1
    for expert in range(experts):
        firsts[expert + 1] += firsts[expert]
    for pair in range(pairs):
        expert = chosen[pair]
        order[firsts[expert]] = pair
        firsts[expert] += 1
    for expert in range(experts, 0, -1):
        firsts[expert] = firsts[expert - 1]
    firsts[0] = 0


@compiled
def _gather(own: Any, order: Any, first: int, rows: int, target: int) -> None:
    """Copy the inputs of some pairs to contiguous rows."""
    for row in range(rows):
        source = bfloat16_row(own.x, order[first + row] // own.wanted, own.hidden)
        copy = bfloat16_row(target, row, own.hidden)
        for i in range(own.hidden):
            copy[i] = source[i]


@compiled
def _gate(own: Any, order: Any, first: int, rows: int, block: int, sums: int) -> None:
    """Store silu(gate) * up * weight of some pairs, from the sums of one block."""
    weights = float32s(own.weights, own.tokens * own.wanted)
    for row in range(rows):
        share = weights[order[first + row]]
        gate = float32s(sums + row * SUMS_BYTES, BLOCK)
        up = float32s(sums + (ROWS + row) * SUMS_BYTES, BLOCK)
        out = bfloat16_row(own.between + 2 * BLOCK * block, first + row, own.inner)
        for i in range(BLOCK):
            out[i] = narrow(silu(gate[i]) * up[i] * share)


@compiled
def _inner(own: Any, firsts: Any, order: Any, thread: int, threads: int, rows_at: int) -> None:
    """Compute this thread's blocks of all experts' inner values."""
    hidden, experts = own.hidden, own.experts
    addresses = int64s(own.gates, experts)
    sums, blocks, size = _scratch(), own.inner // BLOCK, 2 * BLOCK * hidden
    others = sums + ROWS * SUMS_BYTES
    total = 0
    for expert in range(experts):
        total += (firsts[expert + 1] - firsts[expert] + GROUP - 1) // GROUP
    begin, end = part_of(total * blocks, thread, threads)
    before = 0  # tasks of previous experts
    for expert in range(experts):
        first, last = firsts[expert], firsts[expert + 1]
        groups = (last - first + GROUP - 1) // GROUP
        if groups:
            block = max(0, (begin - before + groups - 1) // groups)
            end_block = min(blocks, (end - before + groups - 1) // groups)
            if block < end_block:
                for top in range(first, last, ROWS):
                    rows = min(ROWS, last - top)
                    _gather(own, order, top, rows, rows_at)
                    for each in range(block, end_block):
                        gates = addresses[expert] + 2 * each * size
                        add_rows(rows_at, 2 * hidden, gates, hidden // 2, sums, rows)
                        add_rows(rows_at, 2 * hidden, gates + size, hidden // 2, others, rows)
                        _gate(own, order, top, rows, each, sums)
            before += groups * blocks


@compiled
def _outputs(own: Any, firsts: Any, order: Any, block: int, end_block: int, totals: int) -> None:
    """Compute some output blocks of all tokens; each token's experts are added in a fixed order."""
    tokens, inner, experts = own.tokens, own.inner, own.experts
    addresses = int64s(own.downs, experts)
    sums, size = _scratch(), SUMS_BYTES * tokens
    cleared = float32s(totals, (end_block - block) * tokens * BLOCK)
    for i in range(len(cleared)):
        cleared[i] = _ZERO
    for expert in range(experts):
        last = firsts[expert + 1]
        for top in range(firsts[expert], last, ROWS):
            rows = min(ROWS, last - top)
            for each in range(block, end_block):
                weights = addresses[expert] + 2 * BLOCK * each * inner
                add_rows(own.between + 2 * top * inner, 2 * inner, weights, inner // 2, sums, rows)
                for row in range(rows):
                    token = order[top + row] // own.wanted
                    at = totals + (each - block) * size + SUMS_BYTES * token
                    total = float32s(at, BLOCK)
                    added = float32s(sums + row * SUMS_BYTES, BLOCK)
                    for i in range(BLOCK):
                        total[i] += added[i]
    for each in range(block, end_block):
        for token in range(tokens):
            for i in range(0, BLOCK, LANES):
                at = totals + (each - block) * size + SUMS_BYTES * token + 4 * i
                target = own.target + 2 * (token * own.hidden + each * BLOCK + i)
                store_rounded(target, floats_at(at))


def _compute(pointer: Any) -> None:
    own = _Arguments(*_arguments(pointer))
    hidden, experts, pairs = own.hidden, own.experts, own.tokens * own.wanted
    _, thread, threads = thread_shares(pointer)
    scratch = own.memory + thread * own.thread_bytes
    rows_at = scratch + own.blocks * SUMS_BYTES * own.tokens
    sorted_at = rows_at + 2 * ROWS * hidden
    firsts = int64s(sorted_at, experts + 1)
    order = int64s(sorted_at + 8 * (experts + 1), pairs)
    _sort(int64s(own.chosen, pairs), firsts, order, pairs, experts)
    _inner(own, firsts, order, thread, threads, rows_at)
    wait_for_others(pointer)
    begin, end = part_of(hidden // BLOCK, thread, threads)
    for block in range(begin, end, own.blocks):
        _outputs(own, firsts, order, block, min(end, block + own.blocks), scratch)


compute = Kernel(_compute, len(_Arguments._fields))


def own_memory(tokens: int, wanted: int, hidden: int, experts: int) -> tuple[int, int]:
    """Return the scratch bytes per thread, in whole cache lines, and the blocks computed together.

    The memory holds sums of these blocks, gathered rows and sorted pairs. For few tokens all blocks
    are computed together, so that an expert's weights are read sequentially.
    """
    blocks = min(hidden // BLOCK, max(1, _SUMS_TOGETHER // (SUMS_BYTES * tokens)))
    needed = blocks * SUMS_BYTES * tokens + 2 * ROWS * hidden + 8 * (experts + 1 + tokens * wanted)
    return -(-needed // LINE) * LINE, blocks


class ChosenExperts:
    """A layer's experts with SiLU gates in one call; each row is computed independently."""

    def __init__(self, hidden: int, inner: int, experts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Repack each expert's weights [2 * inner, hidden] and [hidden, inner]."""
        self._hidden, self._inner = hidden, inner
        self.weights = [(_packed(gate_up, parts=2), _packed(down)) for gate_up, down in experts]
        addresses = [[each.data_ptr() for each in expert] for expert in self.weights]
        self._addresses = torch.tensor(addresses).T.contiguous()

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts."""
        tokens, wanted = chosen.shape
        out = torch.empty_like(x)
        if not tokens:
            return out
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        experts, threads = self._addresses.shape[1], torch.get_num_threads()
        num_bytes, blocks = own_memory(tokens, wanted, self._hidden, experts)
        own = torch.empty(threads * num_bytes, dtype=torch.uint8)
        between = torch.empty(tokens * wanted, self._inner, dtype=x.dtype)
        compute(
            threads,
            x.data_ptr(),
            *(each.data_ptr() for each in self._addresses),
            chosen.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            between.data_ptr(),
            own.data_ptr(),
            tokens,
            wanted,
            self._hidden,
            self._inner,
            experts,
            num_bytes,
            blocks,
        )
        return out


def _packed(weight: Tensor, parts: int = 1) -> Tensor:
    """Repack concatenated parts [outputs, inputs] into the kernel's layout.

    Returns:
        [outputs / BLOCK, parts, inputs / 2, BLOCK, 2]
    """
    inputs = weight.shape[1]
    return weight.view(parts, -1, BLOCK, inputs // 2, 2).permute(1, 0, 3, 2, 4).contiguous()
