"""Image files: validation from the header, then decoding.

Pillow's error texts are never sent to clients: they can contain object addresses.
"""

import hashlib
import io
import struct
import warnings
from contextlib import suppress

from PIL import ExifTags, Image, ImageOps

from engine.shared.messages import MAX_ASPECT_RATIO, EncoderInput
from server.media.processors import EncoderSize, ImagePlan, ImageProcessor
from server.media.stripping import MAX_METADATA, MAX_PARTS, TooManyParts, stripped

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SIDE = 32768
MAX_SCANS = 200
"""Maximum scans in a JPEG file: each covers the entire image. Encoders write about ten."""

Image.MAX_IMAGE_PIXELS = None  # `ImageFile` enforces its own limit
# Pillow warns of each invalid tag: one image could write 65,535 lines to the log.
warnings.filterwarnings("ignore", module=r"PIL\.")

_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap the sides."""


class BadImage(ValueError):
    """An image was rejected; the message is sent to the client."""


class ImageFile:
    """An encoded image, validated from its header.

    Args:
        content: a PNG, JPEG, WEBP or GIF file; only the first frame is used.
        max_pixels: maximum width x height.

    Raises:
        BadImage: the format is unsupported, the header is corrupt, or the image is too large.
    """

    def __init__(self, content: bytes, max_pixels: int) -> None:
        if content.startswith(b"\xff\xd8") and content.count(b"\xff\xda") > MAX_SCANS:
            raise BadImage(f"the image has more than {MAX_SCANS} scans")
        self.num_bytes = len(content)
        """Size of the encoded file in bytes."""
        try:
            self._content = stripped(content)
            with _opened(self._content) as image:
                self.width, self.height = image.size
                turned = _orientation(image.info.get("exif")) in _TURNED
        except TooManyParts as error:
            raise BadImage(f"the image file has more than {MAX_PARTS} parts") from error
        except Exception as error:  # decoders can raise anything on hostile input
            raise BadImage(
                "the image is not a PNG, JPEG, WEBP or GIF image, or its head is broken"
            ) from error
        if turned:
            self.width, self.height = self.height, self.width
        self._check_size(max_pixels)
        self._max_pixels = max_pixels

    def _check_size(self, max_pixels: int) -> None:
        width, height = self.width, self.height
        size = f"the image has {width} x {height} pixels"
        if min(width, height) < 1:
            raise BadImage(size)
        if max(width, height) > MAX_SIDE:
            raise BadImage(f"{size}, more than {MAX_SIDE} on a side")
        if width * height > max_pixels:
            raise BadImage(f"{size}, more than {max_pixels} in all")
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise BadImage(f"{size}: one side is more than {MAX_ASPECT_RATIO} times the other")

    def decode(self) -> Image.Image:
        """Return the image upright and in RGB, as transformers loads images.

        Takes 4 bytes for each pixel, twice that if the file is not RGB or turned, more in WEBP.

        Raises:
            BadImage: the image is corrupt, or its decoded size exceeds the limits.
        """
        try:
            with _opened(self._content) as image:
                image.load()
                self.width, self.height = image.size
                self._check_size(self._max_pixels)
                with suppress(Exception):  # corrupt metadata: stays as it is
                    ImageOps.exif_transpose(image, in_place=True)
                upright = image if image.mode == "RGB" else image.convert("RGB")
        except BadImage:
            raise
        except Exception as error:  # as above
            raise BadImage("the image is broken or truncated") from error
        self.width, self.height = upright.size
        return upright


def _opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    for name in ("exif", "xmp"):  # WEBP's are not stripped
        if len(image.info.get(name, b"")) > MAX_METADATA:
            del image.info[name]
    return image


def _orientation(exif: bytes | None) -> int:
    """Return the EXIF orientation, 1 (upright) if the metadata are corrupt."""
    found = Image.Exif()
    try:
        found.load(exif or b"")
        return int(found.get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1


def encoder_inputs(
    file: ImageFile, processor: ImageProcessor, *, whole: bool
) -> tuple[ImagePlan, tuple[EncoderInput, ...]]:
    """Decode an image; return its plan and its encoder inputs, with position 0.

    With `whole`, the only input is the image in its original size; otherwise one input per size
    of the plan.

    Raises:
        BadImage: the image cannot be decoded.
    """
    image = file.decode()
    plan = processor.plan(image.height, image.width)
    sizes, parts = plan.sizes, iter([image])
    if whole:
        sizes = (EncoderSize(image.height, image.width, plan.num_tokens),)
    else:
        parts = processor.pixels(image)
    inputs = []
    for size, part in zip(sizes, parts, strict=True):
        pixels = part.tobytes()
        digest = hashlib.blake2b(digest_size=16)
        digest.update(processor.name.encode() + struct.pack(">III", *size))
        digest.update(pixels)
        inputs.append(
            EncoderInput(
                position=0,
                num_tokens=size.num_tokens,
                digest=digest.digest(),
                height=size.height,
                width=size.width,
                pixels=pixels,
            )
        )
    return plan, tuple(inputs)
