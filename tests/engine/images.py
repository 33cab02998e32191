"""Images of noise, as requests carry them and as transformers takes them."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.batch.batch import SlotImage
from engine.shared.messages import EncoderInput

MEAN = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
DEVIATION = 0.5


def noise(seed: int, height: int = 32, width: int = 32) -> bytes:
    """Return the pixels of an image."""
    return random.Random(seed).randbytes(3 * height * width)


def encoder_input(
    seed: int,
    position: int,
    *,
    num_tokens: int,
    side: int = 32,
    width: int | None = None,
    digest: bytes | None = None,
) -> EncoderInput:
    """Return an image of noise at a place in a prompt, a square unless a width is given."""
    width = width or side
    pixels = noise(seed, side, width)
    digest = digest or hashlib.blake2b(pixels, digest_size=16).digest()
    return EncoderInput(position, num_tokens, digest, side, width, pixels)


def slot_image(given: EncoderInput) -> SlotImage:
    """Return what a plan says of it."""
    return SlotImage(given.position, given.num_tokens, given.digest, given.height, given.width)


def pixel_values(given: EncoderInput) -> torch.Tensor:
    """Return [3, height, width], normalized as the tiny models' files say."""
    pixels = torch.frombuffer(bytearray(given.pixels), dtype=torch.uint8)
    values = pixels.view(given.height, given.width, 3).permute(2, 0, 1)
    return (values.float() / 255 - MEAN) / DEVIATION


def shown_to(reference: Any, images: Sequence[EncoderInput]) -> dict[str, torch.Tensor]:
    """Return how a model of transformers is given images."""
    values = [pixel_values(each) for each in images]
    if reference.config.model_type == "gemma3":
        return {"pixel_values": torch.stack(values)}
    if reference.config.model_type != "qwen2_5_vl":
        return {"pixel_values": torch.stack(values)[None]}
    vision = reference.config.vision_config
    size, side = vision.patch_size, vision.spatial_merge_size
    processor: Any = Qwen2VLImageProcessorPil()
    frames = vision.temporal_patch_size
    parts = [processor.patchify(each.numpy(), size, side, frames)[0] for each in values]
    grids = [[1, each.height // size, each.width // size] for each in images]
    patches = torch.from_numpy(np.concatenate(parts))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}
