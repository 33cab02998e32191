"""Which attention a model gets on a device."""

import torch

from engine.models.attention.paged import PagedAttention
from engine.models.attention.varlen import Attention, CudaAttention
from engine.models.spec import ModelSpec


def attention_of(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, token_by_token: bool = False
) -> Attention:
    """Return what attends over a model's KV cache: the kernel on CUDA devices where it can.

    Args:
        spec: says the shape of the heads, and what is done to scores.
        dtype: of the KV cache.
        device: where the model computes.
        token_by_token: see `PagedAttention`.
    """
    stock = PagedAttention(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=device,
        token_by_token=token_by_token,
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        parts=spec.kv_shape[0],
        has_chunks=spec.has_chunks,
    )
    by_kernel = spec.attention_softcap is None and spec.latent is None and not spec.has_chunks
    if device.type != "cuda" or not by_kernel:
        return stock
    return CudaAttention(
        stock,
        shape=(spec.num_heads, spec.num_kv_heads, spec.head_dim),
        dtype=dtype,
        device=device,
        scale=spec.attention_scale,
        has_sinks=spec.attention_sinks,
    )
