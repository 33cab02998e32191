"""Small pictures, the same at every run."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an RGB picture with smooth and noisy parts."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack([rows * 3, columns * 5, rows + columns], axis=-1)
    noisy = smooth + generator.integers(0, 64, (height, width, 3))
    return Image.fromarray((noisy % 256).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture encoded as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """Return bytes as a `data:` URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
