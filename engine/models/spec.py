"""The decoder's description of a model, as one frozen spec; families create it from a config."""

from math import isqrt, prod
from typing import Literal

import msgspec

from engine.models.cache_groups import CacheGroups
from engine.shared.messages import MAX_ASPECT_RATIO

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
DtypeName = Literal["bfloat16", "float16", "float32"]


class UnsupportedModel(ValueError):
    """The checkpoint requires something that this engine does not implement."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: the base and, if stretched, the scheme and factors."""

    theta: float
    kind: RopeKind = "default"
    share: float = 1.0
    """Fraction of each head's dimensions that is rotated, starting with the first."""
    interleaved: bool = False
    """Whether dimension 2i is rotated with 2i + 1, rather than i with i + half of those rotated."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """LongRoPE's divisors per frequency for sequences up to the original length."""
    long_factor: tuple[float, ...] = ()
    """The same for longer sequences."""
    sections: tuple[int, ...] = ()
    """For vision-language models: numbers of frequencies rotated by a position's time, by its row
    in an image and by its column, in that order. For text all three positions are equal."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How states are normalized."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """By root mean square, or by mean and variance."""
    adds_one: bool = False
    """Whether the checkpoint stores weights minus one; such weights are kept in float32."""


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sparse layers of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner width of one expert."""
    normalize_weights: bool
    """Whether the weights of the chosen experts are scaled to sum to one."""
    layers: tuple[bool, ...]
    """Per layer: sparse (True) or a plain MLP."""
    bias: bool = False
    """Whether routers and experts have biases."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Conversion of a router's scores to weights."""
    has_correction: bool = False
    """Whether a per-expert correction is added to scores, for the choice only."""
    scales_inputs: bool = False
    """Whether the weight of a token's single expert scales its input rather than its output."""
    in_float32: bool = False
    """Whether routers compute in float32, regardless of the model's dtype."""
    num_groups: int = 1
    """Number of equal-sized groups of experts."""
    groups_per_token: int = 1
    """Number of groups from which a token can choose experts."""
    best_of_group: int = 2
    """Number of best experts whose scores are summed to rank a group."""
    weights_scale: float = 1.0
    """Scale of the chosen experts' weights."""
    shared_size: int = 0
    """Inner width of the MLP additionally applied to all tokens."""
    is_mxfp4: bool = False
    """Whether the checkpoint stores experts in 4-bit floats, with a scale per block of inputs."""

    @property
    def has_plain_experts(self) -> bool:
        """Whether experts have no biases and weights that need no expansion."""
        return not self.bias and not self.is_mxfp4

    @property
    def chooses_by_softmax(self) -> bool:
        """Whether routers choose by the softmax of all scores, in the model's dtype."""
        return self.scoring == "softmax" and not self.in_float32


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: one latent and one rotated key per token for all heads."""

    rank: int
    """Width of latents."""
    query_rank: int | None
    """Width of compressed queries; None if queries are projected from states directly."""
    plain_size: int
    """Non-rotated dimensions per head, of queries and of keys projected from latents."""
    rotated_size: int
    """Rotated dimensions per head."""
    value_size: int
    """Dimensions of each head's values."""
    eps: float
    """Epsilon of the norms of latents and of compressed queries."""


class TemperatureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + scale * log(1 + floor((p + offset) / step))."""

    scale: float
    step: float
    """In tokens."""
    offset: int = 0
    of_all_layers: bool = True
    """If false, only layers without positional encoding."""


class ClampSpec(msgspec.Struct, frozen=True, kw_only=True):
    """MLPs that compute gate * sigmoid(slope * gate) * (up + 1) with bounded gate and up."""

    limit: float
    """Gates are at most the limit; ups are within +-limit."""
    slope: float


Block = Literal["before", "after", "around", "parallel"]
"""Where a layer normalizes: before attention and before the MLP; after each, before the residual
addition; both; or once, before parallel attention and MLP."""
QkNorm = Literal["none", "head", "each_head", "width", "unit"]
"""How queries and keys are normalized: not; each head with shared weights; each head with its own
weights; all queries together, and all keys; each head without weights, in layers with positional
encoding."""


class _ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How images become tokens: each square of patches becomes one."""

    token_id: int
    """Placeholder token in prompts for an image embedding."""
    patch_size: int
    scale_factor: int
    """Patches per side of the square that becomes one token."""

    @property
    def token_side(self) -> int:
        """Pixels per side of the square that becomes one token."""
        return self.patch_size * self.scale_factor

    @property
    def is_bidirectional(self) -> bool:
        """Whether each image token attends to its whole image in the text model."""
        return False

    @property
    def breaks_rows(self) -> bool:
        """Whether a token of text stands between the rows of an image's tokens."""
        return False

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of an image's tokens."""
        return height // self.token_side, width // self.token_side


class _PatchSpec(_ImageSpec, frozen=True, kw_only=True):
    """A vision encoder: layers over patches of an image."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    eps: float


class SiglipSpec(_PatchSpec, frozen=True, kw_only=True):
    """An encoder with embedded patch positions, for square images."""

    image_size: int
    """Maximum side of an image in pixels."""
    is_gemma: bool = False
    """Whether the patches of a square are averaged and normalized, rather than concatenated, and
    image tokens attend to their whole image."""

    @property
    def is_bidirectional(self) -> bool:
        """See `_ImageSpec`."""
        return self.is_gemma

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image; 0 for an unsupported size."""
        if height != width or not 0 < height <= self.image_size or height % self.token_side:
            return 0
        return prod(self.grid(height, width))

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.num_tokens(self.image_size, self.image_size)


class QwenVisionSpec(_PatchSpec, frozen=True, kw_only=True):
    """An encoder with rotary patch positions; layers can attend within windows only."""

    is_first: bool
    """Whether MLPs have no gate and norms subtract the mean, as in Qwen2-VL."""

    frames: int
    """Video frames per patch; an image is repeated this many times."""
    window_size: int
    """Pixels per side of a window."""
    full_attention_layers: tuple[int, ...]
    """Layers that attend to the whole image."""
    theta: float
    """Base of the rotations."""
    max_pixels: int = 1280 * 28 * 28
    """Maximum pixels of an image with both sides longer than a token's; default as in
    processors."""

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image; 0 for an unsupported size."""
        if height % self.token_side or width % self.token_side or min(height, width) < 1:
            return 0
        tokens = prod(self.grid(height, width))
        return tokens if tokens <= self.max_tokens else 0

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image, or of the longest image that is one token wide."""
        longest = isqrt(self.max_pixels * MAX_ASPECT_RATIO) // self.token_side
        return max(self.max_pixels // self.token_side**2, longest)


class TowerSpec(_ImageSpec, frozen=True, kw_only=True):
    """An encoder that transformers computes."""

    image_size: int
    """Maximum side of an image in pixels; of square images the only one."""
    is_square: bool = True
    """Otherwise images have any size in whole tokens, and text between the rows of tokens."""

    @property
    def breaks_rows(self) -> bool:
        """See `_ImageSpec`."""
        return not self.is_square

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image, including those between its rows; 0 for an
        unsupported size."""
        rows, columns = self.grid(height, width)
        if self.is_square:
            return rows * columns if height == width == self.image_size else 0
        is_whole = not (height % self.token_side or width % self.token_side)
        if not is_whole or min(rows, columns) < 1 or max(height, width) > self._longest:
            return 0
        return rows * (columns + 1) - 1

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image."""
        side = self.image_size if self.is_square else self._longest
        return self.num_tokens(side, side)

    @property
    def _longest(self) -> int:
        return -(-self.image_size // self.token_side) * self.token_side


VisionSpec = SiglipSpec | QwenVisionSpec | TowerSpec
"""A vision-language model's encoder."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the decoder needs to know about a model; sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """KV heads stored in the cache."""
    head_dim: int
    """Width of the vectors whose dot products are scores."""
    norm: NormSpec
    ropes: tuple[RopeSpec | None, ...]
    """Per layer; None for a layer without positional encoding."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    block: Block = "before"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of MLP gates."""
    clamp: ClampSpec | None = None
    """Replaces the plain gated activation of MLPs."""
    latent: LatentSpec | None = None
    """If set, the KV cache holds latents instead of keys and values: `num_kv_heads` is 1 and
    `head_dim` is the width of latent and rotated key together."""
    windows: tuple[int | None, ...]
    """Per layer: number of last positions a token attends to, including itself; None for all."""
    has_chunks: bool = False
    """Whether windows are fixed chunks starting at multiples of their length, rather than
    sliding."""
    cache_groups: CacheGroups = CacheGroups()
    """Which layers share KV blocks."""
    moe: MoeSpec | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Scale of the outputs of attention and MLP before they are added."""
    attention_scale: float | None = None
    """Scale of scores; None for 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    attention_temperature: TemperatureSpec | None = None
    attention_sinks: bool = False
    """Whether each head has an extra softmax score without a value."""
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    vision: VisionSpec | None = None
    """None for a text-only model."""
    num_outputs: int | None = None
    """Number of a classifier's labels, which replace the LM head; 0: neither."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: DtypeName | None = None
    """The checkpoint's dtype; None if the config does not specify it."""

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of a token's cache entry per layer: [parts, kv_heads, head_dim].

        Parts are keys and values, or a single one that serves as both.
        """
        return (2 if self.latent is None else 1, self.num_kv_heads, self.head_dim)

    @property
    def rotary_size(self) -> int:
        """Head dimensions covered by rotary embeddings, including those not rotated by `share`."""
        return self.head_dim if self.latent is None else self.latent.rotated_size

    @property
    def distinct_ropes(self) -> tuple[RopeSpec, ...]:
        """The model's rotary embeddings without duplicates."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer's MLP is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


def check_heads(spec: ModelSpec, size: int) -> None:
    """Check that a model's attention heads can be split among `size` processes.

    Raises:
        UnsupportedModel: they cannot.
    """
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if spec.qk_norm == "width":
        raise UnsupportedModel(
            f"--tensor-parallel-size: {spec.architecture} normalizes the queries of all heads "
            "together, which are on different processes"
        )
    if heads % size or (kv_heads % size and size % kv_heads):
        raise UnsupportedModel(
            f"--tensor-parallel-size {size} does not fit a model with {heads} attention heads "
            f"and {kv_heads} key-value heads: it must divide the former, and divide or be "
            "a multiple of the latter"
        )
