"""Converts image bytes to the inputs of encoders."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.models.hf_config import read_image_settings
from engine.models.spec import UnsupportedModel

Colors = tuple[float, float, float]


class Normalization(msgspec.Struct, frozen=True):
    """Conversion of bytes to encoder inputs: (byte * scale - mean) / deviation per color."""

    scale: float = 1 / 255
    mean: Colors = (0.5, 0.5, 0.5)
    deviation: Colors = (0.5, 0.5, 0.5)


CLIP = Normalization(
    mean=(0.48145466, 0.4578275, 0.40821073), deviation=(0.26862954, 0.26130258, 0.27577711)
)
"""What most encoders use if a model's files specify none."""


def read_normalization(directory: Path, default: Normalization) -> Normalization:
    """Read the normalization from a model directory; unspecified values have the default.

    Raises:
        UnsupportedModel: the files cannot be read.
    """
    settings = read_image_settings(directory)
    values: dict[str, Any] = {
        "scale": settings.get("rescale_factor", default.scale),
        "mean": settings.get("image_mean") or default.mean,
        "deviation": settings.get("image_std") or default.deviation,
    }
    if not settings.get("do_rescale", True):
        values["scale"] = 1.0
    if not settings.get("do_normalize", True):
        values |= {"mean": (0, 0, 0), "deviation": (1, 1, 1)}
    try:
        return msgspec.convert(values, Normalization)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(
            f"preprocessor_config.json of {directory} cannot be read: {error}"
        ) from error


class PixelReader:
    """Converts bytes to normalized values, on one device."""

    def __init__(self, normalization: Normalization, device: torch.device) -> None:
        self._scale = normalization.scale
        self._mean = torch.tensor(normalization.mean, device=device)
        self._deviation = torch.tensor(normalization.deviation, device=device)

    def read(self, pixels: bytes, height: int, width: int) -> Tensor:
        """Return [height, width, 3] in float32 for RGB bytes of that shape."""
        values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).to(self._mean.device)
        return (values.view(height, width, 3) * self._scale - self._mean) / self._deviation
