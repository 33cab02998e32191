"""Images of noise, as requests carry them."""

import hashlib
import random

from engine.batch.batch import SlotImage
from engine.shared.messages import EncoderInput


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
    """Return a noise image at a prompt position, square unless a width is given."""
    width = width or side
    pixels = noise(seed, side, width)
    digest = digest or hashlib.blake2b(pixels, digest_size=16).digest()
    return EncoderInput(position, num_tokens, digest, side, width, pixels)


def slot_image(given: EncoderInput) -> SlotImage:
    """Return what a plan says of it."""
    return SlotImage(given.position, given.num_tokens, given.digest, given.height, given.width)
