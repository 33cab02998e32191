"""Request images converted to transformers' inputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.shared.messages import EncoderInput

MEAN = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
DEVIATION = 0.5


def pixel_values(given: EncoderInput) -> torch.Tensor:
    """Return [3, height, width], normalized as the tiny models' files say."""
    pixels = torch.frombuffer(bytearray(given.pixels), dtype=torch.uint8)
    values = pixels.view(given.height, given.width, 3).permute(2, 0, 1)
    return (values.float() / 255 - MEAN) / DEVIATION


def shown_to(reference: Any, images: Sequence[EncoderInput]) -> dict[str, torch.Tensor]:
    """Return how a model of transformers is given images."""
    values = [pixel_values(each) for each in images]
    kind, vision = reference.config.model_type, reference.config.vision_config
    if vision.model_type == "pixtral":
        sizes = [[each.height, each.width] for each in images]
        rows, columns = (max(size[side] for size in sizes) for side in (0, 1))
        padded = [
            F.pad(each, (0, columns - each.shape[2], 0, rows - each.shape[1])) for each in values
        ]
        return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}
    if kind in ("gemma3", "llava", "internvl"):
        return {"pixel_values": torch.stack(values)}
    if kind not in ("qwen2_vl", "qwen2_5_vl"):
        return {"pixel_values": torch.stack(values)[None]}
    size, side = vision.patch_size, vision.spatial_merge_size
    processor: Any = Qwen2VLImageProcessorPil()
    frames = vision.temporal_patch_size
    parts = [processor.patchify(each.numpy(), size, side, frames)[0] for each in values]
    grids = [[1, each.height // size, each.width // size] for each in images]
    patches = torch.from_numpy(np.concatenate(parts))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}
