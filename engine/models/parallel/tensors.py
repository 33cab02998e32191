"""One model cut over several processes: which part each of them holds, and how parts are joined.

Attention is cut by heads, gated MLPs (and each expert's) by their inner width, the vocabulary by
tokens. A layer's two parts each end in a sum over all processes. The first process, which draws
the tokens, gets the logits of the whole vocabulary.
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
    """Return one rank's part of an axis: contiguous, no rank has two more than another."""
    return slice(width * rank // size, width * (rank + 1) // size)


class Cut:
    """One rank's part of a model; the first of `size` ranks is the one that draws tokens."""

    def __init__(
        self, spec: ModelSpec, rank: int, size: int, *, whole_experts: bool = False
    ) -> None:
        """Cut the model of this spec, or, if experts are spread, all of it but these.

        Raises:
            UnsupportedModel: its heads cannot be dealt out evenly.
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
        """Inner widths are cut at multiples of it."""
        # With fewer key-value heads than ranks each is held by several, next to its query heads.
        local_kv = max(1, kv_heads // size)
        first_kv = rank * kv_heads // size
        self._kv = slice(first_kv * spec.head_dim, (first_kv + local_kv) * spec.head_dim)
        self.spec = self._local_spec(heads // size, local_kv)
        """The model as this rank computes it; vocabulary and hidden size are those of the whole."""

    @property
    def vocabulary(self) -> slice:
        """Tokens whose embeddings and output weights are here."""
        return part_of(self._spec.vocab_size, self.rank, self.size)

    def has_whole(self, name: str) -> bool:
        """Whether a tensor is of an expert that is one rank's as a whole."""
        return self._whole_experts and ".experts." in name

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the checkpoint, as a view where possible."""
        if self.has_whole(name):
            return tensor
        parent, kind = name.split(".")[-2:]
        if parent in ("o_proj", "down_proj"):
            if kind == "bias":  # is added once
                return tensor if self.rank == 0 else torch.zeros_like(tensor)
            width = tensor.shape[1]
            columns = self._of_heads(width) if parent == "o_proj" else self._inner(width)
            return tensor[:, columns]
        rows = self._rows_of_heads(parent, tensor) or self._rows(parent, tensor)
        return tensor if rows is None else tensor[rows]

    def mxfp4_part(self, name: str, weights: Mxfp4Weights) -> Mxfp4Weights:
        """Return this rank's part of a packed weight, as views."""
        if self.has_whole(name):
            return weights
        parent = name.split(".")[-2]
        if parent == "down_proj":
            inner = self._inner(weights.scales.shape[1] * BLOCK)
            blocks = slice(inner.start // BLOCK, inner.stop // BLOCK)
            return Mxfp4Weights(weights.blocks[:, blocks], weights.scales[:, blocks])
        rows = self._inner(len(weights.scales))
        return Mxfp4Weights(weights.blocks[rows], weights.scales[rows])

    def _rows(self, parent: str, tensor: Tensor) -> slice | None:
        """Return this rank's rows of what is cut by its outputs; None if all have the whole."""
        match parent:
            case "embed_tokens" | "lm_head":
                return self.vocabulary
            case "gate_proj" | "up_proj":
                return self._inner(tensor.shape[0])
        return None

    def _rows_of_heads(self, parent: str, tensor: Tensor) -> slice | None:
        """Return the same of what each head has some rows of."""
        if parent in ("k_proj", "v_proj"):
            return self._kv
        if parent in ("q_proj", "q_b_proj", "kv_b_proj"):
            return self._of_heads(tensor.shape[0])
        if parent == "self_attn" or (parent in ("q_norm", "k_norm") and tensor.dim() == 2):
            width = self._spec.head_dim  # one row a head, as sinks have
            if parent != "k_norm":
                return self._of_heads(tensor.shape[0])
            return slice(self._kv.start // width, self._kv.stop // width)
        return None

    def _of_heads(self, width: int) -> slice:
        """Return this rank's part of what all query heads have equally many of."""
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


class CutCheckpoint(Checkpoint):
    """The part of a checkpoint that one rank loads; only that part is read."""

    def __init__(self, checkpoint: Checkpoint, cut: Cut) -> None:
        self._checkpoint = checkpoint
        self._cut = cut

    @property
    def dtype(self) -> torch.dtype:
        """The type that most of the tensors are stored in."""
        return self._checkpoint.dtype

    def tensor(self, name: str) -> Tensor:
        """Return this rank's part of a tensor."""
        return self._cut.part(name, self._checkpoint.tensor(name))

    def int4(self, name: str) -> Int4Weights | None:
        """Return a weight that is here as a whole; None: a part is rounded again."""
        return self._checkpoint.int4(name) if self._cut.has_whole(name) else None

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return this rank's part of a weight that is stored in blocks of 4-bit floats."""
        weights = self._checkpoint.mxfp4(name)
        return None if weights is None else self._cut.mxfp4_part(name, weights)

    def fingerprint(self) -> str:
        """Return the digest of the whole checkpoint."""
        return self._checkpoint.fingerprint()


class CutEmbedding(Module):
    """Embeddings of which each rank holds those of some tokens."""

    def __init__(self, group: Group, embed: Rows, vocabulary: slice) -> None:
        """Take what looks up the embeddings of this rank's tokens, counted from its first."""
        super().__init__()
        self._group = group
        self.base = embed
        self._vocabulary = vocabulary

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden]: each rank adds zeros for the tokens of the others."""
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        local = (token_ids - self._vocabulary.start).where(here, 0)
        found = self.base(local)
        return self._group.all_reduce(found.masked_fill_(~here.unsqueeze(1), 0))


class CutHead(Module):
    """The LM head of which each rank holds the rows of some tokens."""

    def __init__(self, group: Group, head: Rows, vocab_size: int) -> None:
        super().__init__()
        self._group = group
        self.base = head
        parts = [part_of(vocab_size, rank, group.size) for rank in range(group.size)]
        self._widths = [part.stop - part.start for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        """Map states [rows, hidden] to logits [rows, vocab], of no rows but at the first rank."""
        mine = self.base(x)
        rows, first = len(x), self._group.rank == 0
        sent = [mine.numel()] + [0] * (self._group.size - 1)
        received = [rows * width if first else 0 for width in self._widths]
        parts = torch.split(self._group.all_to_all(mine.flatten(), sent, received), received)
        if not first:
            return mine.new_empty(0, sum(self._widths))
        return torch.cat([part.view(rows, -1) for part in parts], dim=1)
