"""The CUDA attention kernel matches stock operators for all compositions of steps."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.attention.cuda import CudaAttention, KernelAttention
from engine.models.attention.interface import Heads
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows
from engine.models.spec import UnsupportedModel
from tests.engine.triton_device import DEVICE, HAS_DEVICE, TYPES

pytestmark = pytest.mark.cuda

CPU = torch.device("cpu")
FEW, MANY = 1, 1 << 20
"""Multiprocessors: keys are not split for few, and as often as possible for many."""
COUNTS, STARTS = np.array([37, 40, 3, 1, 1, 1]), np.array([0, 18, 31, 3, 0, 300])


def rows_of(block_size: int, counts: Any = COUNTS, starts: Any = STARTS) -> AttentionRows:
    width = -(-int((starts + counts).max()) // block_size)
    blocks = np.random.default_rng(3).permutation(len(counts) * width).reshape(-1, width)
    return AttentionRows(
        starts=starts,
        counts=counts,
        first_token=np.cumsum(counts) - counts,
        block_tables=blocks.astype(np.int32),
        block_size=block_size,
    )


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def state(rows: AttentionRows, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = rows.block_tables.size
    cache = normal(blocks, rows.block_size, 2, heads.num_kv_heads, heads.head_dim, dtype=dtype)
    return normal(int(rows.counts.sum()), heads.num_heads, heads.head_dim, dtype=dtype), cache


def expected(
    queries: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    heads: Heads,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    stock = PagedAttention(heads, dtype=torch.float32, device=CPU)
    held = None if sinks is None else sinks.cpu()
    return stock.attend(queries.float().cpu(), cache.float().cpu(), stock.plan(rows, window), held)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "block_size", "window", "has_sinks", "multiprocessors"),
    [
        (Heads(4, 2, 16), 8, None, False, FEW),
        (Heads(14, 2, 64), 16, None, False, MANY),
        (Heads(14, 2, 64), 16, 20, False, FEW),
        (Heads(4, 4, 80), 256, 33, True, MANY),
        (Heads(8, 1, 128, scale=0.2), 1, None, True, FEW),
        (Heads(4, 2, 32, softcap=4.0), 16, None, False, MANY),
        (Heads(4, 2, 256, softcap=4.0, scale=0.1), 16, 50, False, MANY),
    ],
)
def test_kernel_equals_stock_operators(
    heads: Heads,
    block_size: int,
    window: int | None,
    has_sinks: bool,
    multiprocessors: int,
    dtype: torch.dtype,
) -> None:
    rows = rows_of(block_size)
    queries, cache = state(rows, heads, dtype)
    sinks = torch.linspace(-2, 3, heads.num_heads, device=DEVICE) if has_sinks else None
    kernel = KernelAttention(heads, DEVICE, multiprocessors=multiprocessors)
    plan = kernel.plan(rows, window)
    assert {launch.num_splits > 1 for launch in plan.launches} == {False, multiprocessors == MANY}
    out = kernel.attend(queries, cache, plan, sinks).float().cpu()
    difference = (out - expected(queries, cache, rows, heads, window, sinks)).abs().max()
    assert difference < (0.004 if dtype == torch.float16 else 0.02)


def test_queries_can_be_interleaved_with_keys_and_values() -> None:
    heads, rows = Heads(4, 2, 16), rows_of(8)
    queries, cache = state(rows, heads, torch.float16)
    fused = torch.cat((queries, normal(len(queries), 4, 16)), dim=1)
    kernel = KernelAttention(heads, DEVICE)
    plan = kernel.plan(rows, None)
    assert torch.equal(
        kernel.attend(fused[:, :4], cache, plan), kernel.attend(queries, cache, plan)
    )


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", TYPES)
def test_batch_invariant_tokens_have_same_bits_in_any_batch(
    window: int | None, dtype: torch.dtype
) -> None:
    heads, length = Heads(7, 1, 64), 260  # keys that would be split otherwise
    whole = rows_of(16, np.array([length]), np.array([0]))
    queries, cache = state(whole, heads, dtype)
    kernel = KernelAttention(heads, DEVICE, batch_invariant=True, multiprocessors=MANY)
    prompt = kernel.attend(queries, cache, kernel.plan(whole, window))
    # Keys are held and computed in blocks of 16 or more: some that begin, some that are half full,
    # and some that are full.
    positions = np.flatnonzero(np.isin(np.arange(length) % 48, (0, 7, 15)))
    decodes = AttentionRows(
        starts=positions,
        counts=np.ones_like(positions),
        first_token=np.arange(len(positions)),
        block_tables=np.repeat(whole.block_tables, len(positions), axis=0),
        block_size=16,
    )
    alone = kernel.attend(queries[positions], cache, kernel.plan(decodes, window))
    assert torch.equal(alone, prompt[positions])
    counts = np.array([5, 70, 1, 74, 110])
    chunks = AttentionRows(
        starts=np.cumsum(counts) - counts,
        counts=counts,
        first_token=np.cumsum(counts) - counts,
        block_tables=np.repeat(whole.block_tables, 5, axis=0),
        block_size=16,
    )
    assert torch.equal(kernel.attend(queries, cache, kernel.plan(chunks, window)), prompt)


@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
def test_decode_plan_can_be_reused_for_same_number_of_rows(multiprocessors: int) -> None:
    heads = Heads(4, 2, 16)
    kernel = KernelAttention(heads, DEVICE, multiprocessors=multiprocessors)
    plan = None
    for starts in (np.array([3, 0, 200]), np.array([255, 17, 1])):
        rows = rows_of(8, np.ones(3, np.int64), starts)
        tables = np.zeros((3, 32), np.int32)
        tables[:, : rows.block_tables.shape[1]] = rows.block_tables
        num_keys = (starts + 1).astype(np.int32)
        if plan is None:
            plan = kernel.plan_decodes(num_keys, tables, 256)
        else:
            kernel.replan(plan, num_keys, tables)
        queries, cache = state(rows, heads, torch.float16)
        out = kernel.attend(queries, cache, plan).float().cpu()
        assert (out - expected(queries, cache, rows, heads, None, None)).abs().max() < 0.004


@pytest.fixture
def stock() -> PagedAttention:
    return PagedAttention(Heads(4, 2, 16), dtype=torch.float16, device=DEVICE)


def test_kernel_is_chosen_after_comparison(stock: PagedAttention) -> None:
    chosen = CudaAttention(stock, Heads(4, 2, 16), dtype=torch.float16, device=DEVICE)
    assert isinstance(chosen.for_blocks(16), KernelAttention)
    assert chosen.for_blocks(16) is chosen.for_blocks(16)


@pytest.mark.parametrize(
    ("dtype", "heads", "reason"),
    [
        (torch.float32, Heads(4, 2, 16), "16-bit"),
        (torch.float16, Heads(4, 2, 16, scale=3.0), "differ"),
    ],
)
def test_stock_operators_are_used_if_kernel_fails(
    stock: PagedAttention,
    dtype: torch.dtype,
    heads: Heads,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = CudaAttention(stock, heads, dtype=dtype, device=DEVICE)
    assert chosen.for_blocks(16) is stock
    assert reason in caplog.text
    invariant = CudaAttention(stock, heads, dtype=dtype, device=DEVICE, batch_invariant=True)
    with pytest.raises(UnsupportedModel, match=f"batch-invariant.*{reason}"):
        invariant.for_blocks(16)


def test_stock_operators_are_used_without_triton(
    stock: PagedAttention, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "engine.kernels.cuda.attention", None)
    monkeypatch.delattr("engine.kernels.cuda.attention", raising=False)
    chosen = CudaAttention(stock, Heads(4, 2, 16), dtype=torch.float16, device=DEVICE)
    assert chosen.for_blocks(16) is stock
    assert "Triton" in caplog.text


@pytest.mark.skipif(HAS_DEVICE, reason="the device's own number of multiprocessors counts")
def test_no_splits_for_one_multiprocessor() -> None:
    plan = KernelAttention(Heads(4, 2, 16), DEVICE).plan(rows_of(8), None)
    assert all(launch.num_splits == 1 for launch in plan.launches)
