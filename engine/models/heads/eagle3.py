"""EAGLE-3 draft heads (arXiv 2503.01840), published separately for their models.

A head takes the input states of three of the model's layers, joined by a product (`fc`). Its layer
is a Llama layer, except that attention also sees the token's embedding. It can be limited to part
of the vocabulary: logit i is then that of token i + `d2t[i]`.
"""

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.models.attention.choice import attention_of
from engine.models.attention.projections import HeadProjections, LayerSettings
from engine.models.attention.rotary import Rotary, rotary_table
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.families.config import with_defaults
from engine.models.families.config_fields import integer, llama_spec, read_rope
from engine.models.formats.checkpoint import Checkpoint
from engine.models.formats.files import CheckpointError, TensorFiles, compare
from engine.models.heads.head import DraftHead, DraftVocabulary
from engine.models.layers import Chain, Embedding, prepare_norm
from engine.models.loading.mlps import MlpLoader
from engine.models.loading.products import ProductLoader, Quantization
from engine.models.module import Module, Rows
from engine.models.products.dense import prepare_linear
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.models.weights import Layout

_LAYER = "layers.0."
_NUM_TAPPED = 3
_ADDED = ("t2d", "rotary_emb.inv_freq")
"""Name suffixes of tensors that are derived from others."""


def is_eagle3(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head."""
    names = [str(name).lower() for name in config.get("architectures") or []]
    kind = config.get("speculators_model_type")
    return kind == "eagle3" or any("eagle3" in name for name in names)


def is_unsupported_head(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of an unsupported kind of draft head."""
    names = [str(name).lower() for name in config.get("architectures") or []]
    known = ("eagle", "medusa", "speculator", "dflash", "mtp")
    found = any(part in name for name in names for part in known)
    return not is_eagle3(config) and (found or "speculators_model_type" in config)


class Eagle3Spec:
    """A head's config.json, checked against its model."""

    def __init__(self, config: dict[str, Any], target: ModelSpec) -> None:
        """Read the config.

        Raises:
            UnsupportedModel: a setting is unsupported or does not match the model; names it.
        """
        config = {**config, **(config.get("transformer_layer_config") or {})}
        _refuse(config, target)
        config = with_defaults(
            "LlamaForCausalLM", {**config, "architectures": ["LlamaForCausalLM"]}
        )
        rope = read_rope(config)
        # Positions are not limited to the head's training length.
        spec = llama_spec(config, rope=rope)
        self.layer = replace(spec, max_position_embeddings=target.max_position_embeddings)
        self.target_hidden = config.get("target_hidden_size") or target.hidden_size
        self.num_logits = config.get("draft_vocab_size") or spec.vocab_size
        self.norms_residual = bool(config.get("norm_before_residual"))
        self.tapped = _tapped(config, target)


def _refuse(config: dict[str, Any], target: ModelSpec) -> None:
    """Raise UnsupportedModel for unsupported settings, naming them."""
    known: dict[str, tuple[Any, ...]] = {
        "num_hidden_layers": (1,),
        "parallel_drafting": (None, False),
        "quantization_config": (None,),
    }
    if config.get("use_sliding_window", True):
        known["sliding_window"] = (None,)
    for key, values in known.items():
        if config.get(key) not in values:
            raise UnsupportedModel(f"config.json of the draft head: {key} is not supported")
    used = (config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    if not used:
        raise UnsupportedModel(
            "config.json of the draft head: use_aux_hidden_state false is not supported"
        )
    vocabulary = integer(config, "vocab_size")
    if vocabulary != target.vocab_size:
        raise UnsupportedModel(
            f"the draft head has a vocabulary of {vocabulary} tokens, the served model has one of "
            f"{target.vocab_size}"
        )
    hidden = config.get("target_hidden_size") or config.get("hidden_size")
    if hidden != target.hidden_size:
        raise UnsupportedModel(
            f"the draft head is for states of {hidden} values, but those of the served model have "
            f"{target.hidden_size}"
        )


def _tapped(config: dict[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of layers after which states are tapped.

    Configs either count the layers before a state or name the layer that outputs it. Nobody taps
    states after one layer, so a first number of one implies named layers.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    configured = config.get(key) or (config.get("eagle_config") or {}).get(key)
    layers = target.num_layers
    if configured is None:
        configured = [2, layers // 2, layers - 3]
    numbers = configured if isinstance(configured, list) else []
    taken = tuple(number + (configured[0] == 1) for number in numbers if isinstance(number, int))
    if len(taken) != _NUM_TAPPED or not 0 <= taken[0] < taken[1] < taken[2] < layers:
        raise UnsupportedModel(
            f"{key} of the draft head does not match a model of {layers} layers: {configured}"
        )
    return taken


class HeadCheckpoint(Checkpoint):
    """The tensors of a head, by names without the prefixes that some tools add."""

    def __init__(self, directory: Path) -> None:
        """Open the files.

        Raises:
            CheckpointError: they are missing or cannot be read.
        """
        self._files = TensorFiles(directory)
        self._stored = {
            stored.removeprefix("model.").replace("midlayer.", _LAYER): stored
            for stored in self._files.shapes
        }
        self.shapes = {name: self._files.shapes[each] for name, each in self._stored.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the tensors are stored in."""
        return self.tensor("fc.weight").dtype

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, a view of a mapped file."""
        return self._files.tensor(self._stored[name])


def load_eagle3(
    directory: Path,
    config: dict[str, Any],
    target: Decoder,
    *,
    types: ComputeTypes,
    max_model_len: int,
    quantization: Quantization | None,
) -> DraftHead:
    """Load a head for a model, with the model's compute types.

    Raises:
        UnsupportedModel: the config is not supported or does not match the model.
        CheckpointError: the weights do not match the config.
    """
    head = Eagle3Spec(config, target.spec)
    checkpoint = HeadCheckpoint(directory)
    expected = _tensors(head, checkpoint.shapes)
    compare(directory, expected, checkpoint.shapes, redundant=_ADDED)
    dtype, device = types.activations, target.device
    products = ProductLoader(
        checkpoint, dtype, device, quantization=quantization, is_row_independent=False, bank=None
    )
    bias = products.copy("fc.bias") if "fc.bias" in checkpoint.shapes else None
    norms = {
        name: prepare_norm(head.layer.norm, products.copy(f"{_LAYER}{name}.weight"))
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    enter = Eagle3Entry(
        norms["input_layernorm"], norms["hidden_norm"], norms_residual=head.norms_residual
    )
    embed: Rows = target.embed
    if "embed_tokens.weight" in checkpoint.shapes:
        embed = Embedding(products.copy("embed_tokens.weight"))
    rope = head.layer.distinct_ropes[0]
    rotary = rotary_table(rope, head.layer.rotary_size, max_model_len, dtype, device)
    attention = attention_of(head.layer, types.kv_format, device, first_key=1)
    layer = _layer(head.layer, products, types, enter, norms["post_attention_layernorm"])
    return DraftHead(
        Decoder(head.layer, [layer], attention, types, device, rotary=[Rotary(rotary)]),
        embed=embed,
        project=prepare_linear(products.copy("fc.weight"), bias),
        enter=enter,
        norm=prepare_norm(head.layer.norm, products.copy("norm.weight")),
        lm_head=_lm_head(head, checkpoint, products, target),
        tapped=head.tapped,
        num_logits=head.num_logits,
    )


def _tensors(head: Eagle3Spec, found: Layout) -> Layout:
    """Return the shapes of a head's tensors; optional ones only if present or needed."""
    spec, hidden = head.layer, head.layer.hidden_size
    inner, attention, mlp = spec.intermediate_size, _LAYER + "self_attn.", _LAYER + "mlp."
    expected: Layout = {
        "fc.weight": (hidden, _NUM_TAPPED * head.target_hidden),
        "norm.weight": (hidden,),
        _LAYER + "hidden_norm.weight": (hidden,),
        _LAYER + "input_layernorm.weight": (hidden,),
        _LAYER + "post_attention_layernorm.weight": (hidden,),
        attention + "q_proj.weight": (spec.query_size, 2 * hidden),
        attention + "k_proj.weight": (spec.kv_size, 2 * hidden),
        attention + "v_proj.weight": (spec.kv_size, 2 * hidden),
        attention + "o_proj.weight": (hidden, spec.query_size),
        mlp + "gate_proj.weight": (inner, hidden),
        mlp + "up_proj.weight": (inner, hidden),
        mlp + "down_proj.weight": (hidden, inner),
    }
    for name in [name for name in expected if name.endswith("_proj.weight")]:
        has_bias = spec.mlp_bias if ".mlp." in name else spec.qkv_bias
        if "o_proj" in name:
            has_bias = spec.output_bias
        if has_bias:
            expected[name.removesuffix("weight") + "bias"] = expected[name][:1]
    whole = head.num_logits == spec.vocab_size
    optional: Layout = {
        "fc.bias": (hidden,),
        "lm_head.weight": (head.num_logits, hidden),
        "d2t": (head.num_logits,),
        "embed_tokens.weight": (spec.vocab_size, hidden),
    }
    needed = [] if whole else ["lm_head.weight", "d2t"]
    if hidden != head.target_hidden:  # the model's own have another width
        needed += ["embed_tokens.weight", "lm_head.weight"]
    return expected | {
        name: shape for name, shape in optional.items() if name in found or name in needed
    }


class Eagle3Entry(Module):
    """Computes the layer's residual and attention inputs from embeddings and states."""

    def __init__(self, embedding_norm: Rows, state_norm: Rows, *, norms_residual: bool) -> None:
        """Initialize from the norms; with `norms_residual` the residual is normalized too."""
        super().__init__()
        self.input_layernorm = embedding_norm
        self.hidden_norm = state_norm
        self._norms_residual = norms_residual
        self._embedded: Tensor | None = None
        """Normalized embeddings of the current step's tokens."""

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Store embeddings for `attention_input`; return the residual."""
        self._embedded = self.input_layernorm(embedded)
        return self.hidden_norm(states) if self._norms_residual else states

    def attention_input(self, states: Tensor) -> Tensor:
        """Return the attention input [tokens, 2 * hidden]: embeddings and states concatenated."""
        assert self._embedded is not None, "tokens enter first"
        normed = states if self._norms_residual else self.hidden_norm(states)
        return torch.cat((self._embedded, normed), dim=1)


def _layer(
    spec: ModelSpec, products: ProductLoader, types: ComputeTypes, enter: Eagle3Entry, norm: Rows
) -> DecoderLayer:
    """Return the layer; `norm` is applied before its MLP."""
    prefix = _LAYER + "self_attn."
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    qkv_bias = [f"{name}.bias" for name in names] if spec.qkv_bias else []
    output_bias = [prefix + "o_proj.bias"] if spec.output_bias else []
    return DecoderLayer(
        attention_norm=enter.attention_input,
        self_attn=HeadProjections(
            spec,
            LayerSettings(window=None, rope=0),
            qkv=products.linear(*(f"{name}.weight" for name in names), bias=qkv_bias),
            output=products.linear(prefix + "o_proj.weight", bias=output_bias),
            kv_format=types.kv_format,
        ),
        mlp_norm=norm,
        mlp=MlpLoader(spec, products, None).dense(_LAYER + "mlp.", spec.intermediate_size),
    )


def _lm_head(
    head: Eagle3Spec, checkpoint: HeadCheckpoint, products: ProductLoader, target: Decoder
) -> Rows:
    if "lm_head.weight" not in checkpoint.shapes:
        return target.logits
    product = products.linear("lm_head.weight")
    if "d2t" not in checkpoint.shapes:
        return product
    offsets = checkpoint.tensor("d2t").long()
    token_ids = torch.arange(head.num_logits) + offsets
    vocabulary = head.layer.vocab_size
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
        raise CheckpointError(f"d2t of the draft head has tokens outside of {vocabulary}")
    if len(set(token_ids.tolist())) < len(token_ids):
        raise CheckpointError("d2t of the draft head has a token twice")
    return Chain(product, DraftVocabulary(token_ids.to(products.device), vocabulary))
