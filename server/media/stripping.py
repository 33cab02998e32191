"""Image files without the data that their first frame does not need.

Pillow keeps and parses metadata before it knows the size of an image, at a cost that a client
chooses: it joins EXIF segments one by one, and makes objects of each number in a tag. A file with
millions of empty parts takes seconds and hundreds of megabytes too. So parts are read here first,
up to a number, and Pillow sees only those that affect pixels or how the image is turned.
"""

import struct
from collections.abc import Iterator

MAX_PARTS = 16_384
"""Maximum JPEG segments, PNG chunks, or blocks of a GIF before its first frame; encoders write a
few hundred, or a thousand for the largest images."""
MAX_METADATA = 2**16
"""Maximum bytes of EXIF data and of XMP data; longer ones are ignored."""

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")
"""Chunks that can say how the image is turned, by their type, or a text's keyword."""
_PNG_TEXTS = (b"iTXt", b"tEXt", b"zTXt")

_JPEG = b"\xff\xd8"
_START_OF_SCAN = 0xDA
_APP0, _APP1, _APP14, _APP15, _COMMENT = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
_JPEG_METADATA = (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0")
_WITHOUT_LENGTH = (0x00, 0x01, *range(0xD0, 0xDA))

_GIF = (b"GIF87a", b"GIF89a")
_GIF_HEAD = 13
_EXTENSION, _IMAGE, _GRAPHIC_CONTROL = b"!", b",", 0xF9


class TooManyParts(ValueError):
    """The file consists of more than `MAX_PARTS` parts."""


def stripped(content: bytes) -> bytes:
    """Return a file without metadata before the first frame, and PNG files without later frames.

    Anything else is returned unchanged, WEBP files too: libwebp reads their parts.

    Raises:
        TooManyParts: see `MAX_PARTS`.
        IndexError, ValueError, struct.error: the file ends within a part.
    """
    if content.startswith(_PNG):
        pieces = _png(content)
    elif content.startswith(_JPEG):
        pieces = _jpeg(content)
    elif content.startswith(_GIF):
        pieces = _gif(content)
    else:
        return content
    view = memoryview(content)
    return b"".join([view[piece] for piece in pieces])


def _png(content: bytes) -> Iterator[slice]:
    yield slice(0, len(_PNG))
    at, seen = len(_PNG), set()
    for _ in range(MAX_PARTS):
        size, kind = struct.unpack_from(">I4s", content, at)
        part = slice(at, at + size + 12)
        named = content[at + 8 : at + 40] if kind in _PNG_TEXTS else kind
        known = next((each for each in _PNG_METADATA if named.startswith(each)), None)
        if kind in _PNG_PIXELS:
            yield part
        elif known and known not in seen and size <= MAX_METADATA:
            seen.add(known)
            yield part
        if kind == b"IEND" or part.stop >= len(content):
            return
        at = part.stop
    raise TooManyParts


def _jpeg(content: bytes) -> Iterator[slice]:
    yield slice(0, len(_JPEG))
    at, seen = len(_JPEG), set()
    for _ in range(MAX_PARTS):
        at = content.index(b"\xff", at)  # Pillow skips anything between segments
        marker = content[at + 1]
        if marker == _START_OF_SCAN:
            yield slice(at, None)
            return
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        (size,) = struct.unpack_from(">H", content, at + 2)
        part = slice(at, at + 2 + max(size, 2))
        if marker == _APP1:
            known = next((i for i in _JPEG_METADATA if content.startswith(i, at + 4)), None)
            if known and known not in seen:
                seen.add(known)
                yield part
        elif marker in (_APP0, _APP14) or not (_APP0 <= marker <= _APP15 or marker == _COMMENT):
            yield part
        at = part.stop
    raise TooManyParts


def _gif(content: bytes) -> Iterator[slice]:
    at = _GIF_HEAD
    flags = content[10]
    if flags & 0x80:
        at += 3 << (flags & 7) + 1
    yield slice(0, at)
    control = slice(0, 0)
    parts = iter(range(MAX_PARTS))  # of both loops together
    for _ in parts:
        kind = content[at : at + 1]
        if kind == _IMAGE or not kind:
            yield control
            yield slice(at, None)
            return
        if kind != _EXTENSION:  # Pillow skips anything between blocks
            at += 1
            continue
        end = at + 2
        for _ in parts:
            size = content[end]
            end += size + 1
            if not size:
                break
        else:
            raise TooManyParts
        if content[at + 1] == _GRAPHIC_CONTROL:
            control = slice(at, end)
        at = end
    raise TooManyParts
