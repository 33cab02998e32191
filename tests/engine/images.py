"""Images of noise, as requests carry them and as transformers takes them."""

import hashlib
import random

import torch

from engine.batch.batch import SlotImage
from engine.shared.messages import EncoderInput

MEAN = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
DEVIATION = 0.5


def noise(seed: int, side: int = 32) -> bytes:
    """Return the pixels of a square image."""
    return random.Random(seed).randbytes(3 * side * side)


def encoder_input(
    seed: int, position: int, *, num_tokens: int, side: int = 32, digest: bytes | None = None
) -> EncoderInput:
    """Return an image of noise at a place in a prompt."""
    pixels = noise(seed, side)
    digest = digest or hashlib.blake2b(pixels, digest_size=16).digest()
    return EncoderInput(position, num_tokens, digest, side, side, pixels)


def slot_image(given: EncoderInput) -> SlotImage:
    """Return what a plan says of it."""
    return SlotImage(given.position, given.num_tokens, given.digest)


def pixel_values(*given: EncoderInput) -> torch.Tensor:
    """Return [images, 3, height, width], normalized as the tiny models' files say."""
    images = [
        torch.frombuffer(bytearray(each.pixels), dtype=torch.uint8)
        .view(each.height, each.width, 3)
        .permute(2, 0, 1)
        for each in given
    ]
    return (torch.stack(images).float() / 255 - MEAN) / DEVIATION
