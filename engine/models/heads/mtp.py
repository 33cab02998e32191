"""The multi-token prediction (MTP) layer that some checkpoints have after the last layer.

DeepSeek V3 (arXiv 2412.19437) and derived models: the embedding of a token and the model's previous
final state are each normalized and joined by a product. A whole decoder layer follows, with its own
norm and LM head; the embedding, and usually the LM head, are the model's.
"""

from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.families.registry import family_of
from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.heads.head import DraftHead
from engine.models.hf_config import read_spec
from engine.models.layers import prepare_norm
from engine.models.loading.decoder import DecoderLoader
from engine.models.loading.products import ProductLoader, Quantization
from engine.models.module import Module, Rows
from engine.models.parallel.stages import Stage
from engine.models.products.dense import prepare_linear
from engine.models.settings import ComputeTypes
from engine.models.spec import UnsupportedModel
from engine.models.weights import Layout


def load_mtp(
    directory: Path,
    num_layers: object,
    target: Decoder,
    *,
    types: ComputeTypes,
    max_model_len: int,
    quantization: Quantization | None,
) -> DraftHead:
    """Load the first MTP layer of a model's checkpoint, in the model's compute types.

    Args:
        directory: the checkpoint.
        num_layers: number of MTP layers in its config.
        target: the model, or this process's shard of each of its layers.
        types: compute types of the model.
        max_model_len: maximum sequence length.
        quantization: quantization of the layer and its LM head.

    Raises:
        UnsupportedModel: the checkpoint has no MTP layer.
        CheckpointError: the weights do not match the config.
    """
    served = replace(read_spec(directory), cache_groups=target.spec.cache_groups)
    family = family_of(served.architecture)
    if not family.has_draft_layers or not isinstance(num_layers, int) or num_layers < 1:
        raise UnsupportedModel(
            f"--speculative-method mtp: the checkpoint of {served.architecture} in {directory} has "
            "no layer for it (num_nextn_predict_layers)"
        )
    number, moe, hidden = served.num_layers, served.moe, served.hidden_size
    prefix, head = f"model.layers.{number}.", f"model.layers.{number}.shared_head.head.weight"
    spec = replace(  # one more layer, like the last
        served,
        num_layers=number + 1,
        ropes=(*served.ropes, served.ropes[-1]),
        windows=(*served.windows, None),
        moe=None if moe is None else replace(moe, layers=(*moe.layers, moe.layers[-1])),
    )
    around: Layout = {
        prefix + "enorm.weight": (hidden,),
        prefix + "hnorm.weight": (hidden,),
        prefix + "eh_proj.weight": (hidden, 2 * hidden),
        prefix + "shared_head.norm.weight": (hidden,),
    }
    # Most checkpoints store copies of these.
    copies: Layout = dict.fromkeys(
        (prefix + "embed_tokens.weight", head), (spec.vocab_size, hidden)
    )
    checkpoint = SafetensorsCheckpoint(directory, spec, extra=around, optional=copies)
    loader = DecoderLoader(
        spec,
        checkpoint,
        types=types,
        device=target.device,
        max_model_len=max_model_len,
        stage=Stage(range(number, number + 1), number + 2),  # neither first nor last stage
        quantization=quantization,
        first_key=1,
    )
    products = ProductLoader(
        checkpoint, types.activations, target.device,
        quantization=quantization, is_row_independent=False, bank=None,
    )  # fmt: skip

    def norm(name: str) -> Rows:
        return prepare_norm(spec.norm, products.copy(f"{prefix}{name}.weight"))

    return DraftHead(
        loader.load(),
        embed=target.embed,
        project=_unchanged,
        enter=MtpEntry(norm("enorm"), norm("hnorm"), products.copy(prefix + "eh_proj.weight")),
        norm=norm("shared_head.norm"),
        lm_head=_lm_head(checkpoint, head, products, target),
        carries_normed=family.carries_normed,
    )


class MtpEntry(Module):
    """Joins the embedding of a token and the previous state."""

    def __init__(self, embedding_norm: Rows, state_norm: Rows, joining: Tensor) -> None:
        """Initialize from the norms, and the weight [hidden, 2 * hidden] of the product."""
        super().__init__()
        self.enorm = embedding_norm
        self.hnorm = state_norm
        self.eh_proj = prepare_linear(joining)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Map both, [tokens, hidden], to the layer's input."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=1))


def _unchanged(states: Tensor) -> Tensor:
    return states


def _lm_head(
    checkpoint: SafetensorsCheckpoint, name: str, products: ProductLoader, target: Decoder
) -> Rows:
    """Return the layer's own LM head, or the model's if they are equal."""
    if not checkpoint.has(name):
        return target.logits
    if not target.spec.tie_word_embeddings:
        weight, target_weight = checkpoint.tensor(name), checkpoint.tensor("lm_head.weight")
        if torch.equal(weight, target_weight):
            return target.logits
    return products.linear(name)
