"""Which attention a model gets on a device."""

import numpy as np
import torch

from engine.models.attention.cuda import CudaAttention, Heads
from engine.models.attention.interface import Attention
from engine.models.attention.kv_format import Fp8Kv, KvFormat
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows
from engine.models.kernels.choice import FusedKernels, is_close, trusted
from engine.models.spec import ModelSpec


def attention_of(
    spec: ModelSpec,
    kv_format: KvFormat,
    device: torch.device,
    *,
    token_by_token: bool = False,
    first_key: int = 0,
    kernels: FusedKernels | None = None,
) -> Attention:
    """Return what attends over a model's KV cache: a kernel where there is one for it.

    Args:
        spec: says the shape of the heads, and what is done to scores.
        kv_format: of the KV cache.
        device: where the model computes.
        token_by_token, first_key: see `PagedAttention`.
        kernels: fused ones, which have decodes attend.
    """
    stock = PagedAttention(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_format.dtype,
        device=device,
        token_by_token=token_by_token,
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        parts=spec.kv_shape[0],
        has_chunks=spec.has_chunks,
        kv_format=kv_format,
        first_key=first_key,
    )
    by_kernel = spec.latent is None and not spec.has_chunks and not first_key
    if isinstance(kv_format, Fp8Kv):  # the kernels read 16 bits from the blocks
        by_kernel = False
    if not by_kernel:
        return stock
    if device.type != "cuda":
        # Prompts would get other bits from stock operators.
        bends_scores = spec.attention_sinks or spec.attention_softcap is not None
        if kernels is None or token_by_token or bends_scores:
            return stock
        return _fused(stock, spec, kv_format.dtype) or stock
    return CudaAttention(
        stock,
        Heads(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
        ),
        dtype=kv_format.dtype,
        device=device,
        windows=tuple(dict.fromkeys(spec.windows)),
        has_sinks=spec.attention_sinks,
        batch_invariant=token_by_token,
    )


def _fused(stock: PagedAttention, spec: ModelSpec, dtype: torch.dtype) -> Attention | None:
    """Return what has decodes attend by a kernel, if that can be compiled and computes the same."""
    from engine.models.attention.fused import FusedAttention  # imports Numba

    return trusted(
        lambda: FusedAttention(
            stock,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
        ),
        lambda fused: _decodes_agree(fused, stock, spec, dtype),
        "operators of attention",
    )


def _decodes_agree(one: Attention, other: Attention, spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Compare a step with a row of 4 and one of 21 keys, in blocks of 8 in some order."""
    rows = AttentionRows(
        starts=np.array([3, 20]),
        counts=np.array([1, 1]),
        first_token=np.array([0, 1]),
        block_tables=np.array([[3, 0, 0], [2, 0, 1]], np.int32),
        block_size=8,
    )
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    cache = torch.randn(4, 8, 2, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
    results = (each.attend(queries, cache, each.plan(rows, None)) for each in (one, other))
    return is_close(*results)
