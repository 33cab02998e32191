"""Tensor parallelism: which part of each tensor a process holds, and how parts are joined.

Attention is split by heads, gated MLPs (also of experts) by their inner width, the vocabulary by
tokens. Each half of a layer ends in a sum over all processes. The first process, which samples,
receives the logits of the whole vocabulary.
"""

import msgspec
import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.models.formats.checkpoint import Checkpoint
from engine.models.module import Module, Rows
from engine.models.products.int4 import Int4Weights
from engine.models.products.mxfp4 import BLOCK, Mxfp4Weights
from engine.models.spec import ModelSpec, UnsupportedModel, check_heads


def part_of(width: int, rank: int, size: int) -> slice:
    """Return one rank's part of an axis: contiguous, with sizes that differ by at most one."""
    return slice(width * rank // size, width * (rank + 1) // size)


class TensorSharding:
    """One rank's part of a model; rank 0 of `size` samples tokens."""

    def __init__(
        self, spec: ModelSpec, rank: int, size: int, *, whole_experts: bool = False
    ) -> None:
        """Shard the model of this spec; with `whole_experts` all of it except the experts.

        Raises:
            UnsupportedModel: its heads cannot be divided evenly.
        """
        check_heads(spec, size)
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        packed = None if whole_experts or spec.moe is None or not spec.moe.is_mxfp4 else spec.moe
        if packed is not None and packed.intermediate_size < BLOCK * size:
            raise UnsupportedModel(
                f"--tensor-parallel-size {size} is more than the experts of this model can be cut "
                f"into: they have {packed.intermediate_size} inner outputs in blocks of {BLOCK}"
            )
        self.rank = rank
        self.size = size
        self._spec = spec
        self._whole_experts = whole_experts
        self._unit = BLOCK if packed is not None else 1
        """Inner widths are split at multiples of this."""
        # With fewer KV heads than ranks, each is held by several, with their query heads.
        local_kv = max(1, kv_heads // size)
        first_kv = rank * kv_heads // size
        self._kv = slice(first_kv * spec.head_dim, (first_kv + local_kv) * spec.head_dim)
        self.spec = self._local_spec(heads // size, local_kv)
        """The local model; vocabulary and hidden size are those of the whole."""

    @property
    def vocabulary(self) -> slice:
        """Tokens whose embeddings and output weights are local."""
        return part_of(self._spec.vocab_size, self.rank, self.size)

    def is_unsharded(self, name: str) -> bool:
        """Return whether a tensor belongs to an expert that one rank holds as a whole."""
        return self._whole_experts and ".experts." in name

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the checkpoint, as a view where possible."""
        if self.is_unsharded(name):
            return tensor
        parent, kind = name.split(".")[-2:]
        if parent in ("o_proj", "down_proj"):
            if kind == "bias":  # added by one rank only
                return tensor if self.rank == 0 else torch.zeros_like(tensor)
            width = tensor.shape[1]
            columns = self._of_heads(width) if parent == "o_proj" else self._inner(width)
            return tensor[:, columns]
        rows = self._rows_of_heads(parent, tensor) or self._rows(parent, tensor)
        return tensor if rows is None else tensor[rows]

    def mxfp4_part(self, name: str, weights: Mxfp4Weights) -> Mxfp4Weights:
        """Return this rank's part of a packed weight, as views."""
        if self.is_unsharded(name):
            return weights
        parent = name.split(".")[-2]
        if parent == "down_proj":
            inner = self._inner(weights.scales.shape[1] * BLOCK)
            blocks = slice(inner.start // BLOCK, inner.stop // BLOCK)
            return Mxfp4Weights(weights.blocks[:, blocks], weights.scales[:, blocks])
        rows = self._inner(len(weights.scales))
        return Mxfp4Weights(weights.blocks[rows], weights.scales[rows])

    def _rows(self, parent: str, tensor: Tensor) -> slice | None:
        """Return this rank's rows of a tensor split by outputs; None if it is not split."""
        match parent:
            case "embed_tokens" | "lm_head":
                return self.vocabulary
            case "gate_proj" | "up_proj":
                return self._inner(tensor.shape[0])
        return None

    def _rows_of_heads(self, parent: str, tensor: Tensor) -> slice | None:
        """Return this rank's rows of a tensor with rows per head; None for other tensors."""
        if parent in ("k_proj", "v_proj"):
            return self._kv
        if parent in ("q_proj", "q_b_proj", "kv_b_proj"):
            return self._of_heads(tensor.shape[0])
        if parent == "self_attn" or (parent in ("q_norm", "k_norm") and tensor.dim() == 2):
            width = self._spec.head_dim  # one row per head, as in sinks
            if parent != "k_norm":
                return self._of_heads(tensor.shape[0])
            return slice(self._kv.start // width, self._kv.stop // width)
        return None

    def _of_heads(self, width: int) -> slice:
        """Return this rank's part of an axis divided evenly among query heads."""
        return part_of(width, self.rank, self.size)

    def _inner(self, width: int) -> slice:
        part = part_of(width // self._unit, self.rank, self.size)
        return slice(part.start * self._unit, part.stop * self._unit)

    def _local_spec(self, heads: int, kv_heads: int) -> ModelSpec:
        def local(width: int) -> int:
            part = self._inner(width)
            return int(part.stop - part.start)

        moe = self._spec.moe
        if moe is not None:
            moe = msgspec.structs.replace(
                moe,
                intermediate_size=(
                    moe.intermediate_size if self._whole_experts else local(moe.intermediate_size)
                ),
                shared_size=local(moe.shared_size),
            )
        return msgspec.structs.replace(
            self._spec,
            num_heads=heads,
            num_kv_heads=kv_heads,
            intermediate_size=local(self._spec.intermediate_size),
            moe=moe,
        )


class ShardedCheckpoint(Checkpoint):
    """The part of a checkpoint that one rank loads; only that part is read."""

    def __init__(self, checkpoint: Checkpoint, sharding: TensorSharding) -> None:
        self._checkpoint = checkpoint
        self._sharding = sharding

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the tensors are stored in."""
        return self._checkpoint.dtype

    def tensor(self, name: str) -> Tensor:
        """Return this rank's part of a tensor."""
        return self._sharding.part(name, self._checkpoint.tensor(name))

    def int4(self, name: str) -> Int4Weights | None:
        """Return an unsplit 4-bit weight, else None: parts are quantized again."""
        return self._checkpoint.int4(name) if self._sharding.is_unsharded(name) else None

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return this rank's part of a weight stored in blocks of 4-bit floats."""
        weights = self._checkpoint.mxfp4(name)
        return None if weights is None else self._sharding.mxfp4_part(name, weights)

    def fingerprint(self) -> str:
        """Return the digest of the whole checkpoint."""
        return self._checkpoint.fingerprint()


class VocabParallelEmbedding(Module):
    """Embeddings whose tokens are divided among the ranks."""

    def __init__(self, group: Group, embed: Rows, vocabulary: slice) -> None:
        """Initialize from the lookup of this rank's tokens, numbered from its first."""
        super().__init__()
        self._group = group
        self.base = embed
        self._vocabulary = vocabulary

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden]: each rank contributes zeros for tokens of other ranks."""
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        local = (token_ids - self._vocabulary.start).where(here, 0)
        found = self.base(local)
        return self._group.all_reduce(found.masked_fill_(~here.unsqueeze(1), 0))


class VocabParallelHead(Module):
    """An LM head whose tokens are divided among the ranks."""

    def __init__(self, group: Group, head: Rows, vocab_size: int) -> None:
        super().__init__()
        self._group = group
        self.base = head
        parts = [part_of(vocab_size, rank, group.size) for rank in range(group.size)]
        self._widths = [part.stop - part.start for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        """Map states [rows, hidden] to logits [rows, vocab]; other ranks than 0 return no rows."""
        local = self.base(x)
        rows, first = len(x), self._group.rank == 0
        sent = [local.numel()] + [0] * (self._group.size - 1)
        received = [rows * width if first else 0 for width in self._widths]
        parts = torch.split(self._group.all_to_all(local.flatten(), sent, received), received)
        if not first:
            return local.new_empty(0, sum(self._widths))
        return torch.cat([part.view(rows, -1) for part in parts], dim=1)
