"""Converts the bytes of an adapter to matrices for a model's slots."""

import math

import torch
from torch import Tensor

from engine.lora.adapter_config import BadAdapter
from engine.lora.files import AdapterFiles, StoredTensor
from engine.lora.modules import ModulePair
from engine.models.adapters import AdapterWeights, LowRank

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@torch.inference_mode()
def adapter_weights(
    files: AdapterFiles, pairs: list[ModulePair], dtype: torch.dtype
) -> AdapterWeights:
    """Return an adapter's matrices on the CPU, in the model's compute dtype.

    Raises:
        BadAdapter: a value is infinite or NaN, as stored or in that dtype.
    """
    weights: dict[str, LowRank] = {}
    for pair in pairs:
        a = _tensor(files, pair.a).to(dtype, copy=True)
        b = (_tensor(files, pair.b).float() * pair.scale).to(dtype)
        for name, matrix in ((pair.a, a), (pair.b, b)):
            if not math.isfinite(float(matrix.float().abs().sum())):
                raise BadAdapter(f"{name[:100]} has values that are not finite in {dtype}")
        if pair.kind == "experts":
            a = a.view(pair.num_experts, pair.rank, -1)
            b = b.view(-1, pair.rank, pair.num_experts).permute(2, 0, 1)
        for part, source in pair.module.parts.items():
            # Embeddings change as a whole; otherwise B has the rows of a weight.
            rows = b if pair.kind == "embedding" else source.read(b)
            own = a[source.index] if pair.kind == "experts" else a
            weights[part] = LowRank(own, rows.contiguous())
    return weights


def _tensor(files: AdapterFiles, name: str) -> Tensor:
    stored: StoredTensor = files.tensors[name]
    first, end = stored.data_offsets
    data = files.data[first:end]
    if not len(data):
        return torch.zeros(stored.shape, dtype=_DTYPES[stored.dtype])
    flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[stored.dtype])
    return flat.view(stored.shape)
