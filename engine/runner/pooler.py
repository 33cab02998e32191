"""Converts states of sequences, or of their tokens, to embeddings or classification scores."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.module import Rows
from engine.runner.slots import IntArray
from engine.shared.messages import PoolingParams
from engine.shared.pooling import PoolingSpec

Floats = npt.NDArray[np.float32]


class Pooler:
    """Pools according to the model's files; computes in float32."""

    def __init__(self, spec: PoolingSpec, head: Rows | None) -> None:
        """`head` maps pooled states [rows, hidden] to a classifier's outputs [rows, labels]."""
        self.spec = spec
        self._head = head

    def vectors(
        self,
        states: Tensor,
        token_ids: IntArray,
        firsts: IntArray,
        counts: IntArray,
        params: list[PoolingParams],
    ) -> list[bytes]:
        """Return each sequence's vector, or the vectors of its tokens, as float32 bytes.

        Args:
            states: [tokens, hidden]
            token_ids: [tokens]
            firsts, counts: index of each sequence's first state, and number of its states.
            params: one per sequence.
        """
        pooled = self._pooled(states, firsts, counts)
        if self.spec.task == "embed":
            rows = self._embeddings(pooled, params)
        else:
            rows = self._scores(pooled, params)
        for index, each in enumerate(params):
            if each.per_token:
                part = slice(firsts[index], firsts[index] + counts[index])
                rows[index] = self._of_tokens(states[part], token_ids[part], each)
        return [row.tobytes() for row in rows]

    def _of_tokens(self, states: Tensor, token_ids: IntArray, params: PoolingParams) -> Floats:
        """Return the vectors of one sequence's tokens, [tokens, size]."""
        spec = self.spec
        if spec.tokens is not None and spec.tokens.step_tag_id is not None:
            (steps,) = np.nonzero(token_ids == spec.tokens.step_tag_id)
            states = states[torch.from_numpy(steps).to(states.device)]
        if spec.task == "classify":
            outputs = self._outputs(states.float())
            found = self._activated(outputs) if params.activate else outputs
        else:
            found = states[:, : params.dimensions or None].float()
            if params.activate and spec.normalize:
                found = F.normalize(found, dim=1)
        return found.cpu().numpy()

    def _pooled(self, states: Tensor, firsts: IntArray, counts: IntArray) -> Tensor:
        """Return [sequences, hidden] in float32."""
        match self.spec.pooling:
            case "cls":
                return states[torch.from_numpy(firsts).to(states.device)].float()
            case "last":
                return states[torch.from_numpy(firsts + counts - 1).to(states.device)].float()
            case "max" | "mean" as how:
                return _reduced(states, counts, how)
            case "mean_sqrt_len":
                roots = torch.from_numpy(counts).to(states.device).sqrt()
                return _reduced(states, counts, "mean") * roots.unsqueeze(1)

    def _embeddings(self, pooled: Tensor, params: list[PoolingParams]) -> list[Floats]:
        whole = F.normalize(pooled, dim=1) if self.spec.normalize else pooled
        rows = list(whole.cpu().numpy())
        for index, each in enumerate(params):
            if each.activate and not each.dimensions:
                continue
            row = pooled[index, : each.dimensions or None]
            if each.activate and self.spec.normalize:
                row = F.normalize(row, dim=0)
            rows[index] = row.cpu().numpy()
        return rows

    def _scores(self, pooled: Tensor, params: list[PoolingParams]) -> list[Floats]:
        outputs = self._outputs(pooled)
        plain, active = outputs.cpu().numpy(), self._activated(outputs).cpu().numpy()
        return [
            active[index] if each.activate else plain[index] for index, each in enumerate(params)
        ]

    def _outputs(self, states: Tensor) -> Tensor:
        """Return [rows, labels] of states [rows, hidden] in float32."""
        assert self._head is not None, "a classifier has a head"
        outputs, scale = self._head(states), self.spec.logits
        return outputs if scale is None else (outputs - scale.mean) / scale.sigma

    def _activated(self, outputs: Tensor) -> Tensor:
        match self.spec.activation:
            case "sigmoid":
                return outputs.sigmoid()
            case "softmax":
                return outputs.softmax(dim=1)
            case "identity":
                return outputs


def _reduced(states: Tensor, counts: IntArray, how: str) -> Tensor:
    lengths = torch.from_numpy(counts).to(states.device)
    return torch.segment_reduce(states.float(), how, lengths=lengths, axis=0)
