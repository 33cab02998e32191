"""Decodes that attend straight from the blocks, against stock operators in float32."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.attention.fused import FusedAttention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows

pytestmark = pytest.mark.usefixtures("inference")

SHAPES = [(14, 2, 64), (4, 4, 40), (8, 1, 128), (6, 2, 16)]
BLOCK_SIZE, BLOCKS = 8, 30
STARTS = [3, 40, 100, 17, 0, 230, 15, 16]


def attentions(heads: int, kv_heads: int, head_dim: int) -> tuple[FusedAttention, PagedAttention]:
    """Return the fused one in bfloat16, and the reference in float32."""
    stock, exact = (
        PagedAttention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        for dtype in (torch.bfloat16, torch.float32)
    )
    fused = FusedAttention(
        stock, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=None
    )
    return fused, exact


def rows_of(counts: list[int], starts: list[int] = STARTS) -> AttentionRows:
    """Return rows whose blocks lie in random order."""
    order = np.random.default_rng(0).permutation(len(STARTS) * BLOCKS).astype(np.int32)
    each = np.array(counts)
    return AttentionRows(
        starts=np.array(starts[: len(counts)]),
        counts=each,
        first_token=np.cumsum(each) - each,
        block_tables=order.reshape(-1, BLOCKS)[: len(counts)],
        block_size=BLOCK_SIZE,
    )


def tensors(heads: int, kv_heads: int, head_dim: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return queries as they lie beside keys and values, and a cache."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).bfloat16()
    cache = torch.randn(len(STARTS) * BLOCKS, BLOCK_SIZE, 2, kv_heads, head_dim).bfloat16()
    return qkv[:, :heads], cache


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("counts", [[1] * 8, [1], [1, 5, 1, 70, 1], [3, 4, 80]])
def test_it_equals_the_stock_operators(
    shape: tuple[int, int, int], window: int | None, counts: list[int]
) -> None:
    fused, exact = attentions(*shape)
    rows = rows_of(counts)
    queries, cache = tensors(*shape, sum(counts))
    result = fused.attend(queries, cache, fused.plan(rows, window))
    expected = exact.attend(queries.float(), cache.float(), exact.plan(rows, window))
    assert result.dtype == torch.bfloat16
    assert (result.float() - expected).abs().max() < 0.02


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(threads: int) -> None:
    before = torch.get_num_threads()
    fused, _ = attentions(14, 2, 64)
    rows = rows_of([1] * 8)
    queries, cache = tensors(14, 2, 64, 8)
    torch.set_num_threads(1)
    together = fused.attend(queries, cache, fused.plan(rows, None))
    torch.set_num_threads(threads)
    try:
        assert torch.equal(fused.attend(queries, cache, fused.plan(rows, None)), together)
        for row in range(8):
            alone = AttentionRows(
                starts=rows.starts[row : row + 1],
                counts=rows.counts[row : row + 1],
                first_token=np.zeros(1, np.int64),
                block_tables=rows.block_tables[row : row + 1],
                block_size=BLOCK_SIZE,
            )
            plan = fused.plan(alone, None)
            one = fused.attend(queries[row : row + 1], cache, plan)
            assert torch.equal(one[0], together[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 20])
def test_what_a_row_does_not_see_does_not_reach_it(window: int | None) -> None:
    """Blocks are given back and taken anew: what is behind a row's keys may be anything."""
    fused, _ = attentions(6, 2, 16)
    rows = rows_of([1] * 8)
    queries, cache = tensors(6, 2, 16, 8)
    clean = fused.attend(queries, cache, fused.plan(rows, window))
    seen = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for start, table in zip(rows.starts.tolist(), rows.block_tables, strict=True):
        for key in range(0 if window is None else max(0, start - window + 1), start + 1):
            seen[int(table[key // BLOCK_SIZE]), key % BLOCK_SIZE] = True
    cache[~seen] = float("nan")
    assert torch.equal(fused.attend(queries, cache, fused.plan(rows, window)), clean)


def test_scores_far_apart() -> None:
    fused, exact = attentions(6, 2, 16)
    rows = rows_of([1] * 8)
    queries, cache = tensors(6, 2, 16, 8)
    queries = queries * 100
    result = fused.attend(queries, cache, fused.plan(rows, None))
    expected = exact.attend(queries.float(), cache.float(), exact.plan(rows, None))
    assert (result.float() - expected).abs().max() < 0.05
