"""One attention kernel for prompts and decodes, compared with stock operators in float32.

On processors that the kernel does not support, stock operators must give the same guarantees.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.avx512 import has_pairs
from engine.models.attention.fused import FusedAttention
from engine.models.attention.interface import Attention, Heads
from engine.models.attention.paged import PagedAttention
from engine.models.attention.patches import PatchAttention
from engine.models.attention.rows import AttentionRows

pytestmark = pytest.mark.usefixtures("inference")

SHAPES = [(6, 2, 32), (4, 2, 16), (6, 2, 80), (100, 1, 32), (2, 2, 256)]
"""Heads, key-value heads and their size, of the bundled model first.

To compile a kernel for one takes seconds; the first two are also those of tiny models.
"""
BLOCK_SIZE, BLOCKS = 8, 60
STARTS = [3, 0, 100, 130, 0, 330, 15, 127]


def attentions(
    shape: tuple[int, int, int], softcap: float | None = None, scale: float | None = None
) -> tuple[Attention, PagedAttention]:
    """Return the per-token attention in bfloat16, and the reference in float32."""
    heads = Heads(*shape, scale, softcap)
    stock = partial(PagedAttention, heads, device=torch.device("cpu"))
    exact = stock(dtype=torch.float32)
    if not has_pairs():
        return stock(dtype=torch.bfloat16, token_by_token=softcap is None), exact
    return PatchAttention(heads), exact


def rows_of(counts: list[int], starts: list[int]) -> AttentionRows:
    """Return rows with blocks in random order, the same for each row at an index."""
    order = np.random.default_rng(0).permutation(len(STARTS) * BLOCKS).astype(np.int32)
    each = np.array(counts)
    return AttentionRows(
        starts=np.array(starts),
        counts=each,
        first_token=np.cumsum(each) - each,
        block_tables=order.reshape(-1, BLOCKS)[: len(counts)],
        block_size=BLOCK_SIZE,
    )


def part_of(rows: AttentionRows, row: int, first: int, count: int) -> AttentionRows:
    """Return some tokens of one row as a separate step."""
    return AttentionRows(
        starts=rows.starts[row : row + 1] + first,
        counts=np.array([count]),
        first_token=np.zeros(1, np.int64),
        block_tables=rows.block_tables[row : row + 1],
        block_size=BLOCK_SIZE,
    )


def tensors(shape: tuple[int, int, int], tokens: int) -> tuple[Tensor, Tensor]:
    """Return queries as a slice of a fused QKV tensor, and a cache."""
    heads, kv_heads, head_dim = shape
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).bfloat16()
    cache = torch.randn(len(STARTS) * BLOCKS, BLOCK_SIZE, 2, kv_heads, head_dim).bfloat16()
    return qkv[:, :heads], cache


def difference(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).abs().max())


COUNTS = [[1] * 8, [1], [1, 5, 1, 70, 1, 140], [300, 4, 64]]


@pytest.mark.parametrize(
    ("shape", "windows"),
    [(shape, [None, 1, 20, 129] if shape == SHAPES[0] else [None, 20]) for shape in SHAPES],
)
def test_patch_attention_equals_stock_operators(
    shape: tuple[int, int, int], windows: list[int | None]
) -> None:
    attention, exact = attentions(shape)
    queries, cache = tensors(shape, max(map(sum, COUNTS)))
    for counts in COUNTS:
        rows, asked = rows_of(counts, STARTS[: len(counts)]), queries[: sum(counts)]
        for window in windows:
            result = attention.attend(asked, cache, attention.plan(rows, window))
            expected = exact.attend(asked.float(), cache.float(), exact.plan(rows, window))
            assert difference(result, expected) < 0.02, (counts, window)


@pytest.mark.parametrize(("shape", "window"), [((6, 2, 32), None), ((4, 2, 16), 20)])
def test_attention_sinks_take_their_share(shape: tuple[int, int, int], window: int | None) -> None:
    attention, exact = attentions(shape, scale=0.2)
    rows = rows_of([1, 40, 150], [0, 7, 100])
    queries, cache = tensors(shape, 191)
    sinks = torch.linspace(-3, 6, shape[0])
    result = attention.attend(queries, cache, attention.plan(rows, window), sinks)
    expected = exact.attend(queries.float(), cache.float(), exact.plan(rows, window), sinks)
    assert difference(result, expected) < 0.02
    without = exact.attend(queries.float(), cache.float(), exact.plan(rows, window))
    assert difference(result, without) > 0.2


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_scores_are_capped(softcap: float) -> None:
    attention, exact = attentions((6, 2, 32), softcap=softcap, scale=0.5)
    rows = rows_of([1, 40, 150], [0, 7, 100])
    queries, cache = tensors((6, 2, 32), 191)
    result = attention.attend(queries, cache, attention.plan(rows, None))
    expected = exact.attend(queries.float(), cache.float(), exact.plan(rows, None))
    assert difference(result, expected) < (0.02 if has_pairs() else 0.1)


@pytest.mark.parametrize("shape", [(6, 2, 32), (4, 2, 16), (6, 2, 80)])
@pytest.mark.parametrize(("window", "threads"), [(None, 2), (1, 5), (50, 5)])
def test_token_has_same_bits_in_any_step(
    shape: tuple[int, int, int], window: int | None, threads: int
) -> None:
    """In a prompt, in any of its chunks, among other rows and as a decode."""
    attention, _ = attentions(shape)
    counts = [300, 1, 70, 33]
    rows = rows_of(counts, [0, 140, 120, 5])
    queries, cache = tensors(shape, sum(counts))
    torch.set_num_threads(1)
    together = attention.attend(queries, cache, attention.plan(rows, window))
    torch.set_num_threads(threads)
    assert torch.equal(attention.attend(queries, cache, attention.plan(rows, window)), together)
    for row, count in enumerate(counts):
        for first, some in {(0, count), (0, 1), (count // 3, 1), (count // 2, count // 2)}:
            if not some:
                continue
            plan = attention.plan(part_of(rows, row, first, some), window)
            tokens = slice(at := int(rows.first_token[row]) + first, at + some)
            alone = attention.attend(queries[tokens], cache, plan)
            assert torch.equal(alone, together[tokens]), (row, first, some)


@pytest.mark.parametrize("window", [None, 20])
def test_keys_outside_a_row_have_no_effect(window: int | None) -> None:
    """Blocks are reused, so the memory after a row's keys is arbitrary."""
    shape, counts = (6, 2, 80), [1, 7, 40, 1, 1]
    attention, _ = attentions(shape)
    rows = rows_of(counts, [2, 0, 100, 128, 255])
    queries, cache = tensors(shape, sum(counts))
    clean = attention.attend(queries, cache, attention.plan(rows, window))
    seen = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for start, count, table in zip(rows.starts, rows.counts, rows.block_tables, strict=True):
        for key in range(int(start + count)):
            seen[int(table[key // BLOCK_SIZE]), key % BLOCK_SIZE] = True
    cache[~seen] = float("nan") if has_pairs() else 1e4
    assert torch.equal(attention.attend(queries, cache, attention.plan(rows, window)), clean)


def test_widely_spread_scores_are_accurate() -> None:
    attention, exact = attentions((6, 2, 80))
    rows = rows_of([1] * 4 + [200], STARTS[:5])
    queries, cache = tensors((6, 2, 80), 204)
    queries = queries * 100
    result = attention.attend(queries, cache, attention.plan(rows, None))
    expected = exact.attend(queries.float(), cache.float(), exact.plan(rows, None))
    # Rounding of scores changes the weights of nearly tied keys.
    assert (result.float() - expected).abs().mean() < 0.002
    assert not result.isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(value: float) -> None:
    attention, _ = attentions((4, 2, 16))
    rows = rows_of([1, 3, 150], [9, 2, 0])
    queries, cache = tensors((4, 2, 16), 154)
    clean = attention.attend(queries, cache, attention.plan(rows, None))
    broken = queries.clone()
    broken[2, 1, 5] = value
    result = attention.attend(broken, cache, attention.plan(rows, None))
    others = [token for token in range(154) if token != 2]
    assert torch.equal(result[others], clean[others])


@pytest.mark.skipif(not has_pairs(), reason="needs AVX-512 for bfloat16")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("counts", [[1] * 3, [1, 40, 1], [4, 40, 150]])
def test_kernel_computes_only_decodes_beside_stock_operators(
    softcap: float | None, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, sinks = (6, 2, 32), torch.linspace(-3, 6, 6)
    patches, exact = attentions(shape, softcap=softcap)
    stock = PagedAttention(
        Heads(*shape, softcap=softcap), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    planned: list[list[int]] = []
    plan = patches.plan

    def noted(rows: AttentionRows, window: int | None) -> Any:
        planned.append(rows.counts.tolist())
        return plan(rows, window)

    monkeypatch.setattr(patches, "plan", noted)
    attention = FusedAttention(stock, patches)
    rows = rows_of(counts, [0, 7, 100])
    queries, cache = tensors(shape, sum(counts))
    result = attention.attend(queries, cache, attention.plan(rows, 30), sinks)
    expected = exact.attend(queries.float(), cache.float(), exact.plan(rows, 30), sinks)
    assert difference(result, expected) < 0.1
    decodes = [count for count in counts if count == 1]
    assert planned == ([decodes] if decodes else [])
