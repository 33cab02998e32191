"""Selects the attention implementation for a model and device."""

from functools import partial

import numpy as np
import torch

from engine.kernels import registry
from engine.kernels.processor import prompt_kernel_is_faster
from engine.kernels.registry import FusedKernels
from engine.kernels.trust import is_close, trusted
from engine.models.attention.cuda import CudaAttention
from engine.models.attention.fused import FusedAttention
from engine.models.attention.interface import Attention, Heads
from engine.models.attention.kv_format import Fp8Kv, KvFormat
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rows import AttentionRows
from engine.models.spec import ModelSpec, UnsupportedModel


def attention_of(
    spec: ModelSpec,
    kv_format: KvFormat,
    device: torch.device,
    *,
    token_by_token: bool = False,
    first_key: int = 0,
    kernels: FusedKernels | None = None,
) -> Attention:
    """Return the attention for a model's KV cache, using a kernel if one is available.

    Args:
        spec: head shapes and score modifications.
        kv_format: format of the KV cache.
        device: device the model runs on.
        token_by_token, first_key: see `PagedAttention`.
        kernels: fused kernels; on a CPU, attention kernels are used only if given.

    Raises:
        UnsupportedModel: no implementation can attend token by token.
    """
    stock = partial(stock_attention, spec, kv_format, device, first_key=first_key)
    by_kernel = spec.latent is None and not spec.has_chunks and not first_key
    if not by_kernel or isinstance(kv_format, Fp8Kv):  # kernels read 16-bit values from the blocks
        return stock(token_by_token=token_by_token)
    if device.type != "cuda":
        found = None
        if kernels is not None:
            found = _of_cpus(stock(), spec, kv_format.dtype, token_by_token=token_by_token)
        if found is None and token_by_token and spec.attention_softcap is not None:
            raise scores_are_capped(spec)
        return found or stock(token_by_token=token_by_token)
    return CudaAttention(
        stock(token_by_token=token_by_token),
        heads_of(spec),
        dtype=kv_format.dtype,
        device=device,
        windows=tuple(dict.fromkeys(spec.windows)),
        has_sinks=spec.attention_sinks,
        batch_invariant=token_by_token,
    )


def heads_of(spec: ModelSpec) -> Heads:
    """Return the shape and score parameters of a model's heads."""
    sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return Heads(*sizes, spec.attention_scale, spec.attention_softcap)


def stock_attention(
    spec: ModelSpec,
    kv_format: KvFormat,
    device: torch.device,
    *,
    token_by_token: bool = False,
    first_key: int = 0,
) -> PagedAttention:
    """Return attention by torch's operators; arguments as for `attention_of`."""
    return PagedAttention(
        heads_of(spec),
        dtype=kv_format.dtype,
        device=device,
        parts=spec.kv_shape[0],
        has_chunks=spec.has_chunks,
        kv_format=kv_format,
        token_by_token=token_by_token,
        first_key=first_key,
    )


def scores_are_capped(spec: ModelSpec) -> UnsupportedModel:
    """Return the error for a CPU without a kernel that can compute capped scores token by token."""
    return UnsupportedModel(
        f"--batch-invariant: {spec.architecture} caps attention scores, which no operator supports "
        "token by token"
    )


def has_patch_attention(spec: ModelSpec) -> bool:
    """Return whether one CPU kernel can compute all tokens of this model, each separately.

    Raises:
        ImportError: no kernel compiler is installed.
    """
    return (
        spec.latent is None and not spec.has_chunks and registry.has_patch_attention(spec.head_dim)
    )


def _of_cpus(
    stock: PagedAttention, spec: ModelSpec, dtype: torch.dtype, *, token_by_token: bool
) -> Attention | None:
    """Return kernel attention if it compiles and agrees with `stock`, else None."""
    if not has_patch_attention(spec):
        return None

    def build() -> Attention:
        from engine.models.attention.patches import PatchAttention  # imports Numba

        patches = PatchAttention(heads_of(spec))
        whole = token_by_token or prompt_kernel_is_faster()
        return patches if whole else FusedAttention(stock, patches)

    return trusted(build, lambda built: _agree(built, stock, spec, dtype), "operators of attention")


def _agree(one: Attention, other: Attention, spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Compare two decodes (4 and 21 keys) and a prompt chunk, with blocks of 8."""
    rows = AttentionRows(
        starts=np.array([3, 20, 2]),
        counts=np.array([1, 1, 37]),
        first_token=np.array([0, 1, 2]),
        block_tables=np.array([[3, 0, 0, 0, 0], [2, 0, 1, 0, 0], [7, 4, 8, 6, 5]], np.int32),
        block_size=8,
    )
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(39, spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    cache = torch.randn(9, 8, 2, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
    sinks = torch.linspace(-1, 1, spec.num_heads) if spec.attention_sinks else None
    return all(
        is_close(
            *(each.attend(queries, cache, each.plan(rows, window), sinks) for each in (one, other))
        )
        for window in dict.fromkeys(spec.windows)
    )
