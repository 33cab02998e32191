"""What the CUDA attention tells its kernel, with the kernel's documented meaning in plain torch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows
from engine.models.attention.varlen import CudaAttention, VarlenAttention, kernel_window
from tests.engine.plain_kernel import plain_kernel

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 8


@pytest.fixture
def rows() -> AttentionRows:
    counts, starts = np.array([1, 1, 1, 7, 20]), np.array([0, 30, 8, 25, 0])
    blocks = np.random.default_rng(3).permutation(40)[:25].reshape(5, 5).astype(np.int32)
    return AttentionRows(
        starts=starts,
        counts=counts,
        first_token=np.cumsum(counts) - counts,
        block_tables=blocks,
        block_size=BLOCK_SIZE,
    )


@pytest.fixture
def stock() -> PagedAttention:
    return PagedAttention(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32, device=CPU
    )


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_the_kernel_is_asked_for_what_the_stock_operators_compute(
    rows: AttentionRows, stock: PagedAttention, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(40, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    queries = torch.randn(int(rows.counts.sum()), HEADS, HEAD_DIM, generator=generator)
    varlen = VarlenAttention(device=CPU, kernel=plain_kernel)
    out = varlen.attend(queries, cache, varlen.plan(rows, window))
    expected = stock.attend(queries, cache, stock.plan(rows, window))
    assert (out - expected).abs().max() < 1e-5


def test_scores_are_scaled_alike(rows: AttentionRows) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(40, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    queries = torch.randn(int(rows.counts.sum()), HEADS, HEAD_DIM, generator=generator)
    stock = PagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=CPU,
        scale=0.7,
    )
    varlen = VarlenAttention(device=CPU, kernel=plain_kernel, scale=0.7)
    out = varlen.attend(queries, cache, varlen.plan(rows, None))
    assert (out - stock.attend(queries, cache, stock.plan(rows, None))).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 1e6])  # which changes nothing but the way
def test_sinks_take_their_share_in_every_way(
    rows: AttentionRows,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.models.attention.paged._MAX_PLAIN_SCORES", 100)
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(40, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    queries = torch.randn(int(rows.counts.sum()), HEADS, HEAD_DIM, generator=generator)
    sinks = torch.tensor([-2.0, 0.5, 1.0, 3.0])
    stock = PagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=CPU,
        softcap=softcap,
    )
    varlen = VarlenAttention(device=CPU, kernel=plain_kernel)
    out = varlen.attend(queries, cache, varlen.plan(rows, window), sinks)
    expected = stock.attend(queries, cache, stock.plan(rows, window), sinks)
    assert (out - expected).abs().max() < 1e-5
    first = cache[rows.block_tables[0, 0], 0, 1].repeat_interleave(HEADS // KV_HEADS, 0)
    keys = cache[rows.block_tables[0, 0], 0, 0].repeat_interleave(HEADS // KV_HEADS, 0)
    score = (queries[0] * keys).sum(-1) * HEAD_DIM**-0.5  # of the only key of the first row
    share = torch.stack((score, sinks)).softmax(0)[0]
    assert (out[0].view(HEADS, HEAD_DIM) - share[:, None] * first).abs().max() < 1e-5


def test_windows_count_the_token_itself_in_the_models_words_only() -> None:
    assert kernel_window(None) == (-1, 0)
    assert kernel_window(4) == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_operators_serve_where_the_kernel_does_not_work(
    rows: AttentionRows, stock: PagedAttention, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU it never does: the trial fails and says why."""
    chosen = CudaAttention(stock, shape=(HEADS, KV_HEADS, HEAD_DIM), dtype=dtype, device=CPU)
    assert chosen.for_blocks(BLOCK_SIZE) is stock
    assert chosen.for_blocks(BLOCK_SIZE) is stock
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (dtype == torch.bfloat16)


def test_a_kernel_without_tables_of_blocks_is_not_blamed_on_the_size_of_blocks(
    stock: PagedAttention, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of torch 2.11."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: object = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        raise AssertionError("it cannot have been called")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    shape = (HEADS, KV_HEADS, HEAD_DIM)
    chosen = CudaAttention(stock, shape=shape, dtype=torch.bfloat16, device=CPU)
    assert chosen.for_blocks(BLOCK_SIZE) is stock
    assert "torch 2.12 is the first" in caplog.text
    assert "--block-size" not in caplog.text
