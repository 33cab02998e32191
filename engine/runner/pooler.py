"""From the states of sequences to one vector each: embeddings, or scores of labels."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.layers import Rows
from engine.shared.messages import PoolingParams
from engine.shared.pooling import PoolingSpec

IntArray = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Pooler:
    """Pools as a model's files say; all of it in float32."""

    def __init__(self, spec: PoolingSpec, head: Rows | None) -> None:
        """`head` maps pooled states [rows, hidden] to a classifier's outputs [rows, labels]."""
        self._spec = spec
        self._head = head

    @property
    def sees_last(self) -> bool:
        """Whether a sequence's last state is all that is needed."""
        return self._spec.pooling == "last"

    def vectors(
        self, states: Tensor, firsts: IntArray, counts: IntArray, params: list[PoolingParams]
    ) -> list[bytes]:
        """Return the vector of each sequence as float32 numbers.

        Args:
            states: [tokens, hidden]
            firsts, counts: where in `states` each sequence begins, and how many it has.
            params: one of each sequence.
        """
        pooled = self._pooled(states, firsts, counts)
        if self._spec.task == "embed":
            rows = self._embeddings(pooled, params)
        else:
            rows = self._scores(pooled, params)
        return [row.tobytes() for row in rows]

    def _pooled(self, states: Tensor, firsts: IntArray, counts: IntArray) -> Tensor:
        """Return [sequences, hidden] in float32."""
        match self._spec.pooling:
            case "cls":
                return states[torch.from_numpy(firsts).to(states.device)].float()
            case "last":
                return states[torch.from_numpy(firsts + counts - 1).to(states.device)].float()
            case "max":
                return _reduced(states, counts, "max")
            case "mean":
                return _reduced(states, counts, "mean")
            case "mean_sqrt_len":
                roots = torch.from_numpy(counts).to(states.device).sqrt()
                return _reduced(states, counts, "mean") * roots.unsqueeze(1)

    def _embeddings(self, pooled: Tensor, params: list[PoolingParams]) -> list[Floats]:
        whole = F.normalize(pooled, dim=1) if self._spec.normalize else pooled
        rows = list(whole.cpu().numpy())
        for index, each in enumerate(params):
            if each.activate and not each.dimensions:
                continue
            row = pooled[index, : each.dimensions or None]
            if each.activate and self._spec.normalize:
                row = F.normalize(row, dim=0)
            rows[index] = row.cpu().numpy()
        return rows

    def _scores(self, pooled: Tensor, params: list[PoolingParams]) -> list[Floats]:
        assert self._head is not None, "a classifier has a head"
        outputs = self._head(pooled)
        match self._spec.activation:
            case "sigmoid":
                scores = outputs.sigmoid()
            case "softmax":
                scores = outputs.softmax(dim=1)
            case "identity":
                scores = outputs
        plain, active = outputs.cpu().numpy(), scores.cpu().numpy()
        return [
            active[index] if each.activate else plain[index] for index, each in enumerate(params)
        ]


def _reduced(states: Tensor, counts: IntArray, how: str) -> Tensor:
    lengths = torch.from_numpy(counts).to(states.device)
    return torch.segment_reduce(states.float(), how, lengths=lengths, axis=0)
