"""What the decoder has to know of a model, as one frozen spec; families make it from a config."""

from math import isqrt, prod
from typing import Literal

import msgspec

from engine.models.cache_groups import CacheGroups
from engine.shared.messages import MAX_ASPECT_RATIO

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
DtypeName = Literal["bfloat16", "float16", "float32"]


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this engine does not implement."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: the base and, if stretched, by which scheme and how far."""

    theta: float
    kind: RopeKind = "default"
    share: float = 1.0
    """Share of each head's dimensions that is rotated, from the first one on."""
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
    """Per frequency: longrope's divisor for sequences up to the original length."""
    long_factor: tuple[float, ...] = ()
    """The same for longer ones."""
    sections: tuple[int, ...] = ()
    """Of a model that sees: how many frequencies turn by a position's time, by its row in an image
    and by its column there, in that order. Of text all three are the same."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How states are normalized."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """By the root mean square, or by mean and variance."""
    adds_one: bool = False
    """Whether the checkpoint stores what the weights exceed one by; they are kept in float32."""


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
    """Of routers and experts."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What makes weights of a router's scores: all at once, or each by itself."""
    has_correction: bool = False
    """Whether a number of each expert is added to its score, for the choice alone."""
    scales_inputs: bool = False
    """Whether the weight of the one expert of a token multiplies what it gets, rather than what it
    makes of that."""
    in_float32: bool = False
    """Whether routers compute so, whatever the model does."""
    num_groups: int = 1
    """Experts are in that many groups of equal size."""
    groups_per_token: int = 1
    """Groups whose experts a token may choose from."""
    best_of_group: int = 2
    """Experts of a group by whose scores, added up, it is chosen."""
    weights_scale: float = 1.0
    """Of the weights of the chosen experts."""
    shared_size: int = 0
    """Inner width of the MLP that all tokens go through besides."""
    is_mxfp4: bool = False
    """Whether the checkpoint has experts in 4-bit floats, a scale for each block of inputs."""

    @property
    def has_plain_experts(self) -> bool:
        """Whether experts are products without biases, with weights that need no expanding."""
        return not self.bias and not self.is_mxfp4

    @property
    def chooses_by_softmax(self) -> bool:
        """Whether routers choose by the softmax of all scores, in the model's type."""
        return self.scoring == "softmax" and not self.in_float32


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: tokens keep a latent and one rotated key for all heads."""

    rank: int
    """Width of latents."""
    query_rank: int | None
    """The same of what queries are made of; None if they are made of states."""
    plain_size: int
    """Dimensions of each head that know no positions, of queries and of what a latent's key is."""
    rotated_size: int
    """Those that do."""
    value_size: int
    """Dimensions of each head's values."""
    eps: float
    """Of the norms of latents, and of what queries are made of."""


class TemperatureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + scale * log(1 + floor((p + offset) / step))."""

    scale: float
    step: float
    """In tokens."""
    offset: int = 0
    of_all_layers: bool = True
    """Or only of those that do not know positions."""


class ClampSpec(msgspec.Struct, frozen=True, kw_only=True):
    """MLPs that make gate * sigmoid(slope * gate) * (up + 1) of bounded gates and ups."""

    limit: float
    """Gates are at most that; ups lie between its negative and it."""
    slope: float


Block = Literal["before", "after", "around", "parallel"]
"""Where a layer normalizes: before attention and before the MLP; after each, before its result is
added; both; or once, before attention and MLP that see the same."""
QkNorm = Literal["none", "head", "each_head", "width", "unit"]
"""How queries and keys are normalized: not; every head alike; every head with weights of its own;
all queries together, and all keys; every head without weights, in layers that know positions."""


class _PatchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vision encoder: layers over patches of an image, of which each square becomes a token."""

    token_id: int
    """Stands in prompts where an embedding of an image goes."""
    patch_size: int
    scale_factor: int
    """Patches on a side of the square that becomes one token."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    eps: float

    @property
    def token_side(self) -> int:
        """Pixels on a side of the square that becomes one token."""
        return self.patch_size * self.scale_factor

    @property
    def sees_all(self) -> bool:
        """Whether the text model has each token of an image see all of the image."""
        return False

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of an image's tokens."""
        return height // self.token_side, width // self.token_side


class SiglipSpec(_PatchSpec, frozen=True, kw_only=True):
    """Positions of patches are embedded, as many as a square image has."""

    image_size: int
    """Longest side of an image in pixels."""
    is_gemma: bool = False
    """Whether the patches of a square are averaged and normalized, rather than laid side by side,
    and tokens of an image see all of it."""

    @property
    def sees_all(self) -> bool:
        """See `_PatchSpec`."""
        return self.is_gemma

    def num_tokens(self, height: int, width: int) -> int:
        """Return how many tokens stand for an image; 0 for a size that is not taken."""
        if height != width or not 0 < height <= self.image_size or height % self.token_side:
            return 0
        return prod(self.grid(height, width))

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.num_tokens(self.image_size, self.image_size)


class QwenVisionSpec(_PatchSpec, frozen=True, kw_only=True):
    """Positions of patches are rotations; layers may see windows of an image alone."""

    is_first: bool
    """Whether MLPs have no gate and norms subtract the mean, as in Qwen2-VL."""

    frames: int
    """Of a video, that a patch is made of; an image is as many frames alike."""
    window_size: int
    """Pixels on a side of a window."""
    whole_layers: tuple[int, ...]
    """Those that see all of an image."""
    theta: float
    """Base of the rotations."""
    max_pixels: int = 1280 * 28 * 28
    """Of an image whose sides are longer than a token's; what a processor takes without settings.
    """

    def num_tokens(self, height: int, width: int) -> int:
        """Return how many tokens stand for an image; 0 for a size that is not taken."""
        if height % self.token_side or width % self.token_side or min(height, width) < 1:
            return 0
        tokens = prod(self.grid(height, width))
        return tokens if tokens <= self.max_tokens else 0

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image, or of the longest one that is as narrow as a token."""
        longest = isqrt(self.max_pixels * MAX_ASPECT_RATIO) // self.token_side
        return max(self.max_pixels // self.token_side**2, longest)


VisionSpec = SiglipSpec | QwenVisionSpec
"""Of the encoder of a model that sees images."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the decoder has to know; sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Of what the KV cache keeps."""
    head_dim: int
    """Of what queries are compared with."""
    norm: NormSpec
    ropes: tuple[RopeSpec | None, ...]
    """Per layer; None for a layer that does not know positions."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    block: Block = "before"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gates of MLPs."""
    clamp: ClampSpec | None = None
    """What MLPs do in its place."""
    latent: LatentSpec | None = None
    """Of what the KV cache keeps in place of keys and values; there is one head of it then, and
    `head_dim` is the width of latent and rotated key together."""
    windows: tuple[int | None, ...]
    """Per layer: how many last positions a token attends to, itself included; None for all."""
    has_chunks: bool = False
    """Whether windows begin anew at each multiple of their length, rather than slide."""
    cache_groups: CacheGroups = CacheGroups()
    """Which layers share KV blocks."""
    moe: MoeSpec | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and MLP add."""
    attention_scale: float | None = None
    """Of scores; None for one over the root of `head_dim`."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    attention_temperature: TemperatureSpec | None = None
    attention_sinks: bool = False
    """Whether each head has a score that takes attention from all keys and gives nothing."""
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    vision: VisionSpec | None = None
    """Of a model that sees images."""
    num_outputs: int | None = None
    """Labels of a classifier, which has outputs for them in place of an LM head; 0: neither."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: DtypeName | None = None
    """The checkpoint's own type; None when the config does not say."""

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
        """What the KV cache keeps of a token in a layer: [parts, kv_heads, head_dim].

        Parts are keys and values, or what is both.
        """
        return (2 if self.latent is None else 1, self.num_kv_heads, self.head_dim)

    @property
    def rotary_size(self) -> int:
        """How many dimensions a rotary embedding is made for, whichever share it rotates."""
        return self.head_dim if self.latent is None else self.latent.rotated_size

    @property
    def distinct_ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that some layer has, each once."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


def check_heads(spec: ModelSpec, size: int) -> None:
    """Check that the attention heads of a model can be dealt out to so many processes.

    Raises:
        UnsupportedModel: they cannot.
    """
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if spec.qk_norm == "width":
        raise UnsupportedModel(
            f"--tensor-parallel-size: {spec.architecture} normalizes the queries of all heads "
            "together, which no process has"
        )
    if heads % size or (kv_heads % size and size % kv_heads):
        raise UnsupportedModel(
            f"--tensor-parallel-size {size} does not suit a model with {heads} attention heads "
            f"and {kv_heads} key-value heads: it has to divide the former, and to divide or be "
            "a multiple of the latter"
        )
