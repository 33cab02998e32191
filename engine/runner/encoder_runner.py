"""Runs batch plans of an encoder, which computes whole sequences and keeps no state."""

import numpy as np
import torch

from engine.batch.batch import BatchPlan, BatchResult
from engine.models.device_copies import to_device
from engine.models.encoders.encoder import Encoder, EncoderBatch, groups_of
from engine.runner.pooler import Pooler
from engine.runner.slots import IntArray
from engine.shared.messages import PoolingParams


class EncoderRunner:
    """Runs the plans of one engine, in order, on one encoder."""

    def __init__(self, encoder: Encoder, pooler: Pooler) -> None:
        self.encoder = encoder
        self._pooler = pooler

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchResult:
        """Compute the plan's sequences, each of which starts, complete, in this plan."""
        starts = {start.slot: start for start in plan.starting}
        # Sorted by length, as sequences of equal length are computed together.
        rows = sorted(range(len(plan.slots)), key=plan.counts.__getitem__)
        if not rows:
            return BatchResult([])
        sequences = [starts[plan.slots[row]] for row in rows]
        counts = np.array([len(each.token_ids) for each in sequences], np.int64)
        firsts = np.cumsum(counts) - counts
        params = [each.pooling or PoolingParams() for each in sequences]
        token_ids = np.fromiter((i for s in sequences for i in s.token_ids), np.int64, counts.sum())
        states = self.encoder(self._batch(token_ids, params, counts))
        vectors = self._pooler.vectors(states, token_ids, firsts, counts, params)
        return BatchResult([], pooled=dict(zip(rows, vectors, strict=True)))

    def _batch(
        self, token_ids: IntArray, params: list[PoolingParams], counts: IntArray
    ) -> EncoderBatch:
        device = self.encoder.device
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        second = np.array([each.types_from for each in params], np.int64)
        types = (positions >= np.repeat(second, counts)) & np.repeat(second > 0, counts)
        return EncoderBatch(
            token_ids=to_device(token_ids, device),
            positions=to_device(positions, device),
            types=to_device(types.astype(np.int64), device),
            groups=groups_of(counts.tolist()),
        )
