"""SigLIP for images of varying sizes, with the connectors of Idefics 3 and Gemma 3."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.models.encoders.builder import Builder, activation_of
from engine.models.encoders.encoder import EncoderLayer, EncoderLayers, SequenceGroup
from engine.models.layers import Chain, Norm, rms_norm_exact
from engine.models.module import Module, Rows, weight_of
from engine.models.products.dense import prepare_linear
from engine.models.spec import SiglipSpec
from engine.models.vision.pixels import Normalization, PixelReader, read_normalization

_MAX_SHAPES = 64
"""Number of image sizes whose patch positions are cached."""


class SiglipEncoder(Module, finds_hooks=True):
    """An encoder with its connector, on one device; stateless.

    Each image is encoded separately, so results do not depend on other images.
    """

    def __init__(
        self,
        spec: SiglipSpec,
        pixels: PixelReader,
        *,
        patches: Rows,
        positions: Tensor,
        layers: EncoderLayers,
        connector: Rows,
        dtype: torch.dtype,
    ) -> None:
        """Initialize from the weights.

        Args:
            patches: maps patches [patches, 3 * size * size] to hidden states.
            positions: [patches of the largest image, hidden]
            connector: maps the concatenated states of a square of patches to an embedding.
        """
        super().__init__()
        self.spec = spec
        self.patch_embedding = patches
        self.position_embedding = weight_of(positions)
        self.encoder = layers
        self.connector = connector
        self._dtype = dtype
        self._pixels = pixels
        self._places: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def encode(self, pixels: bytes, height: int, width: int) -> Tensor:
        """Return [tokens, hidden of the text model] for RGB bytes [height, width, 3]."""
        size, colors = self.spec.patch_size, self._pixels.read(pixels, height, width)
        rows, columns = height // size, width // size
        # Layout of a non-overlapping convolution's inputs: colors, rows, columns.
        patches = colors.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3)
        x = self.patch_embedding(patches.reshape(rows * columns, 3 * size * size).to(self._dtype))
        x = x + self.position_embedding.index_select(0, self._place(rows, columns))
        x = self.encoder(x, [[SequenceGroup(0, 1, len(x))]], [])
        return self.connector(_shuffled(x, rows, columns, self.spec.scale_factor))

    def _place(self, rows: int, columns: int) -> Tensor:
        """Return the position of each patch, scaled to an image of full size."""
        known = self._places.get((rows, columns))
        if known is None:
            side = self.spec.image_size // self.spec.patch_size
            lines = _buckets(rows, side) * side
            known = (lines[:, None] + _buckets(columns, side)).flatten()
            known = known.to(self.position_embedding.device)
            if len(self._places) < _MAX_SHAPES:
                self._places[rows, columns] = known
        return known


def _buckets(count: int, side: int) -> Tensor:
    """Return which of `side` parts of a line each of `count` patches begins in."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    begins = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    return torch.bucketize(begins.clamp(max=1.0 - 1e-6), bounds, right=True)


def _shuffled(x: Tensor, rows: int, columns: int, factor: int) -> Tensor:
    """Return the concatenated states of each square of patches, in row-major order."""
    squares = x.view(rows // factor, factor, columns // factor, factor, -1)
    return squares.transpose(1, 2).reshape((rows // factor) * (columns // factor), -1)


def load_siglip(
    directory: Path, vision: SiglipSpec, build: Builder, text_size: int
) -> SiglipEncoder:
    """Load an encoder.

    Args:
        text_size: width of the text model.
    """
    hidden, size, side = vision.hidden_size, vision.patch_size, vision.image_size
    tower = "" if vision.is_gemma else "vision_model."
    prefix = f"{tower}embeddings."
    normalization = read_normalization(directory, Normalization())
    return SiglipEncoder(
        vision,
        PixelReader(normalization, build.device),
        patches=build.flat(f"{prefix}patch_embedding", hidden, 3, size, size),
        positions=build.copy(f"{prefix}position_embedding.weight", (side // size) ** 2, hidden),
        layers=EncoderLayers(
            [
                _layer(vision, build, f"{tower}encoder.layers.{index}.")
                for index in range(vision.num_layers)
            ],
            final_norm=build.norm(f"{tower}post_layernorm", hidden, vision.eps),
        ),
        connector=_connector(vision, build, text_size),
        dtype=build.dtype,
    )


def _connector(vision: SiglipSpec, build: Builder, text_size: int) -> Rows:
    hidden, square = vision.hidden_size, vision.scale_factor**2
    if not vision.is_gemma:
        return build.linear(
            "connector.modality_projection.proj",
            rows=text_size,
            width=hidden * square,
            bias=False,
        )
    prefix = "multi_modal_projector.mm_"
    norm = build.copy(f"{prefix}soft_emb_norm.weight", hidden, dtype=torch.float32)
    weight = build.copy(f"{prefix}input_projection_weight", hidden, text_size)
    return Chain(
        partial(_mean, parts=square),
        Norm(rms_norm_exact, norm + 1, vision.eps),
        prepare_linear(weight.t().contiguous()),
    )


def _mean(x: Tensor, parts: int) -> Tensor:
    """Return the mean of `parts` equal parts of each row."""
    return x.view(len(x), parts, -1).mean(1)


def _layer(spec: SiglipSpec, build: Builder, prefix: str) -> EncoderLayer:
    hidden = spec.hidden_size
    queries, keys, values = (f"{prefix}self_attn.{name}_proj" for name in "qkv")
    return EncoderLayer(
        qkv=build.linear(queries, keys, values, rows=hidden, width=hidden),
        output=build.linear(f"{prefix}self_attn.out_proj", rows=hidden, width=hidden),
        mlp=build.mlp(
            (f"{prefix}mlp.fc1", f"{prefix}mlp.fc2"),
            activation_of({"hidden_act": spec.activation}, "hidden_act"),
            (hidden, spec.intermediate_size),
        ),
        attention_norm=build.norm(f"{prefix}layer_norm1", hidden, spec.eps),
        mlp_norm=build.norm(f"{prefix}layer_norm2", hidden, spec.eps),
        num_heads=spec.num_heads,
        norm_first=True,
    )
