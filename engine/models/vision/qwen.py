"""Qwen2-VL's and Qwen2.5-VL's encoders: patches with rotary row and column positions.

Qwen2.5-VL's attends within windows.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.reference import rms_norm
from engine.models.attention.rotary import Rotary, rotary_table
from engine.models.encoders.builder import Builder, activation_of
from engine.models.encoders.encoder import (
    EncoderLayer,
    EncoderLayers,
    SequenceGroup,
    groups_of,
)
from engine.models.layers import Chain, Norm
from engine.models.module import Module, Rows
from engine.models.products.dense import prepare_linear
from engine.models.spec import QwenVisionSpec, RopeSpec
from engine.models.vision.pixels import CLIP, PixelReader, read_normalization


class _PatchLayout(NamedTuple):
    """The squares of an image in the order in which they are computed."""

    order: Tensor
    """[squares] row-major index of each square; those of a window are adjacent."""
    windows: list[SequenceGroup]
    """The patches of each window."""
    positions: Tensor
    """[2, patches] row and column of each patch."""


class QwenVisionEncoder(Module, finds_hooks=True):
    """An encoder with its merger, on one device; stateless.

    Each image is encoded separately, so results do not depend on other images.
    """

    def __init__(
        self,
        spec: QwenVisionSpec,
        pixels: PixelReader,
        *,
        patches: Rows,
        rotary: Tensor,
        layers: EncoderLayers,
        merger: Rows,
        dtype: torch.dtype,
    ) -> None:
        """Initialize from the weights.

        Args:
            patches: maps patches [patches, 3 * size * size] to hidden states.
            rotary: table of which each half rotates half of each head.
            merger: maps the concatenated states of a square's patches to an embedding.
        """
        super().__init__()
        self.spec = spec
        self._pixels = pixels
        self.patch_embed = patches
        half = rotary.shape[2] // 2
        self.rotary = Rotary(rotary, (half, half))
        self.encoder = layers
        self.merger = merger
        self._dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: bytes, height: int, width: int) -> Tensor:
        """Return [tokens, hidden of the text model] for RGB bytes [height, width, 3]."""
        size, factor = self.spec.patch_size, self.spec.scale_factor
        rows, columns = self.spec.grid(height, width)
        layout = self._layout(rows, columns)
        colors = self._pixels.read(pixels, height, width).to(self._dtype)
        # By square, then by patch: colors, rows, columns.
        squares = colors.view(rows, factor, size, columns, factor, size, 3)
        squares = squares.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 1).index_select(0, layout.order)
        x = self.patch_embed(squares.reshape(-1, 3 * size * size))
        whole = [SequenceGroup(0, 1, len(x))]
        x = self.encoder(x, [whole, layout.windows], [self.rotary(layout.positions)])
        merged = self.merger(x.view(rows * columns, -1))
        return torch.empty_like(merged).index_copy_(0, layout.order, merged)

    def _layout(self, rows: int, columns: int) -> _PatchLayout:
        device, spec = self.rotary.table.device, self.spec
        side, factor = spec.window_size // spec.token_side, spec.scale_factor
        row = torch.arange(rows).repeat_interleave(columns)
        column = torch.arange(columns).repeat(rows)
        window = (row // side) * -(-columns // side) + column // side
        _, number, sizes = torch.unique(window, return_inverse=True, return_counts=True)
        # Sort windows by size, so that those of equal size are adjacent.
        by_size = sizes.argsort(stable=True)
        order = by_size.argsort()[number].argsort(stable=True)
        groups = groups_of((sizes[by_size] * factor**2).tolist())
        inside = torch.arange(factor**2)
        patch_rows = row[order, None] * factor + inside // factor
        patch_columns = column[order, None] * factor + inside % factor
        positions = torch.stack((patch_rows.flatten(), patch_columns.flatten()))
        return _PatchLayout(order.to(device), groups, positions.to(device))


def load_qwen_vision(
    directory: Path, vision: QwenVisionSpec, build: Builder, text_size: int
) -> QwenVisionEncoder:
    """Load an encoder.

    Args:
        text_size: width of the text model.
    """
    hidden, size = vision.hidden_size, vision.patch_size
    square = hidden * vision.scale_factor**2
    weight = build.copy("patch_embed.proj.weight", hidden, 3, vision.frames, size, size)
    half = rotary_table(
        RopeSpec(theta=vision.theta),
        hidden // vision.num_heads // 2,
        vision.max_tokens * vision.scale_factor,
        build.dtype,
        build.device,
    )
    return QwenVisionEncoder(
        vision,
        PixelReader(read_normalization(directory, CLIP), build.device),
        # All frames of an image are equal, so their weights can be summed.
        patches=prepare_linear(weight.float().sum(2).to(build.dtype).flatten(1), None),
        rotary=torch.cat((half, half), dim=2),
        layers=EncoderLayers(
            [_layer(vision, build, index) for index in range(vision.num_layers)],
            final_norm=_norm(build, "merger.ln_q", vision),
        ),
        merger=Chain(
            build.linear("merger.mlp.0", rows=square, width=square),
            F.gelu,
            build.linear("merger.mlp.2", rows=text_size, width=square),
        ),
        dtype=build.dtype,
    )


def _layer(spec: QwenVisionSpec, build: Builder, index: int) -> EncoderLayer:
    hidden, prefix = spec.hidden_size, f"blocks.{index}."
    gate, up, down = (f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down"))
    activation = activation_of({"hidden_act": spec.activation}, "hidden_act")
    sizes = hidden, spec.intermediate_size
    return EncoderLayer(
        qkv=build.linear(f"{prefix}attn.qkv", rows=3 * hidden, width=hidden),
        output=build.linear(f"{prefix}attn.proj", rows=hidden, width=hidden),
        mlp=build.mlp((f"{prefix}mlp.fc1", f"{prefix}mlp.fc2"), activation, sizes)
        if spec.is_first
        else build.gated_mlp(((gate, up), down), activation, sizes, bias=True),
        attention_norm=_norm(build, f"{prefix}norm1", spec),
        mlp_norm=_norm(build, f"{prefix}norm2", spec),
        num_heads=spec.num_heads,
        norm_first=True,
        rotary=0,
        grouping=0 if index in spec.full_attention_layers else 1,
    )


def _norm(build: Builder, name: str, spec: QwenVisionSpec) -> Rows:
    if spec.is_first:
        return build.norm(name, spec.hidden_size, spec.eps)
    return Norm(rms_norm, build.copy(f"{name}.weight", spec.hidden_size), spec.eps)
