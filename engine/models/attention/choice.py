"""Which attention a model gets on a device."""

import torch

from engine.models.attention.kv_format import Fp8Kv, KvFormat
from engine.models.attention.paged import PagedAttention
from engine.models.attention.varlen import Attention, CudaAttention
from engine.models.fused.choice import FusedKernels
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
    is_plain = spec.attention_softcap is None and spec.latent is None
    by_kernel = is_plain and not spec.has_chunks and not first_key
    if isinstance(kv_format, Fp8Kv):  # the kernel reads 16 bits from the blocks
        by_kernel = False
    if not by_kernel:
        return stock
    if device.type != "cuda":
        # Prompts would get other bits from stock operators.
        if kernels is None or token_by_token or spec.attention_sinks:
            return stock
        from engine.models.attention.fused import FusedAttention  # imports Numba

        return FusedAttention(
            stock,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
        )
    return CudaAttention(
        stock,
        shape=(spec.num_heads, spec.num_kv_heads, spec.head_dim),
        dtype=kv_format.dtype,
        device=device,
        scale=spec.attention_scale,
        has_sinks=spec.attention_sinks,
    )
