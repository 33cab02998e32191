"""The documented meaning of torch's paged `varlen_attn`, in plain torch for any device."""

from typing import Any

import torch
from torch import Tensor


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    return_aux: Any = None,
) -> Any:
    """Row by row; queries are the last tokens of their keys."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    shared = query.shape[1] // key.shape[2]
    assert enable_gqa == (shared > 1)
    scale = scale or query.shape[2] ** -0.5
    left, right = window_size
    assert right == 0
    out = torch.empty_like(query)
    sums = torch.empty(query.shape[1], len(query))
    for row in range(len(seqused_k)):
        first, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        length = int(seqused_k[row])
        assert end - first <= max_q
        assert length <= max_k
        assert int(cu_seq_k[row + 1] - cu_seq_k[row]) >= length
        keys, values = (each[block_table[row]].flatten(0, 1)[:length] for each in (key, value))
        keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[first:end], keys) * scale
        position = torch.arange(length - (end - first), length)[:, None]
        seen = torch.arange(length) <= position
        if left >= 0:
            seen &= torch.arange(length) >= position - left
        scores = scores.masked_fill(~seen, float("-inf"))
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, first:end] = scores.logsumexp(-1)
    return (out, sums) if return_aux is not None and return_aux.lse else out
