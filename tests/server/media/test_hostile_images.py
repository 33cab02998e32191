"""Malicious images are rejected with a 400 that names them, at a bounded cost."""

import contextlib
import io
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from server.media.decode import MAX_SCANS, BadImage, ImageFile
from tests.server.conftest import FakeGenerationClient, Http
from tests.server.media.pictures import data_url, encoded, picture


def chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def png(width: int, height: int, *chunks: bytes, rows: bytes = b"") -> bytes:
    """Return a PNG file with one bit per pixel that declares this size."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def small() -> Image.Image:
    return picture(40, 30)


def jpeg_of_scans(count: int) -> bytes:
    """Return a JPEG file with this many scan headers."""
    scan = b"\xff\xda" + encoded(small(), "JPEG").partition(b"\xff\xda")[2].removesuffix(
        b"\xff\xd9"
    )
    return encoded(small(), "JPEG").partition(b"\xff\xda")[0] + scan * count + b"\xff\xd9"


def overlapping_tags() -> bytes:
    """Return EXIF data whose 12,000 tags all have the same 60 KB as their value."""
    tags = [struct.pack("<HHII", tag, 2, 60_000, 8) for tag in range(12_000)]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(tags)


def many_numbers(size: int) -> bytes:
    """Return EXIF data that turn an image upside down, with fractions of this size in bytes."""
    tags = struct.pack("<HHIHH", 0x0112, 3, 1, 3, 0) + struct.pack(
        "<HHII", 0x8298, 5, size // 8, 38
    )
    return b"II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4) + b"\1\0\0\0\3\0\0\0" * (size // 8)


def jpeg_with(segments: bytes) -> bytes:
    whole = encoded(small(), "JPEG")
    return whole[:2] + segments + whole[2:]


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def in_segments(exif: bytes) -> bytes:
    pieces = [exif[at : at + 60_000] for at in range(0, len(exif), 60_000)]
    return b"".join(segment(0xE1, b"Exif\0\0" + piece) for piece in pieces)


def gif_with(blocks: bytes) -> bytes:
    whole = encoded(small(), "GIF")
    at = 13 + (3 << (whole[10] & 7) + 1)
    return whole[:at] + blocks + whole[at:]


_SIZE = 4 << 20
OF_METADATA: dict[str, Callable[[], bytes]] = {
    "EXIF in tiny segments": lambda: jpeg_with(segment(0xE1, b"Exif\0\0" + b"x" * 10) * 200_000),
    "comments": lambda: jpeg_with(segment(0xFE, b"") * (_SIZE // 4)),
    "padding": lambda: jpeg_with(b"\xff" * _SIZE),
    "profiles": lambda: jpeg_with(segment(0xE2, b"ICC_PROFILE\0\1\1") * (_SIZE // 18)),
    "numbers in a JPEG": lambda: jpeg_with(in_segments(many_numbers(_SIZE))),
    "numbers in a PNG": lambda: png(
        8, 8, chunk(b"eXIf", many_numbers(_SIZE)), rows=b"\0\0" * 8
    ),
    "numbers in a WEBP": lambda: encoded(small(), "WEBP", exif=b"Exif\0\0" + many_numbers(_SIZE)),
    "chunks": lambda: png(8, 8, chunk(b"abCd", b"") * (_SIZE // 12), rows=b"\0\0" * 8),
    "texts": lambda: png(
        8, 8, *[chunk(b"tEXt", b"%d\0" % at) for at in range(_SIZE // 20)], rows=b"\0\0" * 8
    ),
    "empty pixels": lambda: png(8, 8, chunk(b"IDAT", b"") * (_SIZE // 12), rows=b"\0\0" * 8),
    "comments of a GIF": lambda: gif_with(b"\x21\xfe\1c\0" * (_SIZE // 5)),
    "a comment of tiny blocks": lambda: gif_with(b"\x21\xfe" + b"\1c" * (_SIZE // 2) + b"\0"),
    "bytes between the blocks of a GIF": lambda: gif_with(bytes(_SIZE)),
}  # fmt: skip
"""Small images in files of `_SIZE` bytes."""


def noisy(size: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"\x00" * size


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a bomb": lambda: png(30_000, 30_000, rows=b"\0" * (3751 * 30_000)),
    "many pixels": lambda: encoded(Image.new("1", (4000, 4000))),
    "one pixel by 100,000": lambda: png(1, 100_000, rows=b"\0\0" * 100_000),
    "100,000 by one": lambda: png(100_000, 1),
    "a strip": lambda: encoded(picture(1, 300)),
    "no width": lambda: png(0, 5),
    "a bomb of text": lambda: png(
        8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * (1 << 27), 9)), rows=b"\0\0" * 8
    ),
    "a bomb of a profile": lambda: png(
        8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * (1 << 27), 9)), rows=b"\0\0" * 8
    ),
    "a bomb of metadata": lambda: png(8, 8, chunk(b"eXIf", overlapping_tags()), rows=b"\0\0" * 8),
    "a truncated PNG": lambda: encoded(small())[:-200],
    "a truncated JPEG": lambda: encoded(small(), "JPEG")[:-200],
    "a truncated WEBP": lambda: encoded(small(), "WEBP")[:-200],
    "a truncated GIF": lambda: encoded(small(), "GIF")[:-200],
    "a head": lambda: encoded(small())[:20],
    "scans without end": lambda: jpeg_of_scans(MAX_SCANS + 1),
    "nothing": lambda: b"",
    "a text": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a TIFF": lambda: encoded(small(), "TIFF"),
    "a BMP": lambda: encoded(small(), "BMP"),
    "a PDF": lambda: encoded(small(), "PDF"),
    "an ICO": lambda: encoded(small(), "ICO"),
    "a PPM": lambda: encoded(small(), "PPM"),
    "zeros": lambda: noisy(5000),
}


def asked(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}]}


@pytest.fixture(autouse=True)
def room(engines: FakeGenerationClient) -> None:
    engines.context = 4096


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_image_is_refused_by_name(http: Http, kind: str) -> None:
    content = HOSTILE[kind]()
    tracemalloc.start()
    began = time.process_time()
    answer = http.post("/v1/chat/completions", asked(data_url(encoded(small())), data_url(content)))
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if kind.startswith("a bomb of"):  # data other than pixels is ignored or rejected
        assert answer.status_code in (200, 400)
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "messages[0].content[1]"
        assert error["code"] == "invalid_image"
        assert "0x" not in error["message"], "addresses of objects are nobody's business"
        assert "PIL" not in error["message"]
    assert seconds < 10
    assert peak < 64 << 20


@pytest.mark.parametrize("kind", OF_METADATA)
def test_metadata_cost_little_whatever_they_are(kind: str) -> None:
    content = OF_METADATA[kind]()
    tracemalloc.start()
    began = time.thread_time()
    with contextlib.suppress(BadImage):  # some consist of too many parts
        ImageFile(content, 10_000).decode()
    seconds, (_, peak) = time.thread_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.2
    assert peak < 2 * len(content) + (1 << 20)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_metadata_do_not_change_pixels(kind: str) -> None:
    exif = Image.Exif()
    exif[0x010F] = "maker"
    many: dict[str, Any] = {"comment": b"c" * 3000, "icc_profile": b"p" * 200_000, "exif": exif}
    content = encoded(picture(40, 30), kind, **many)
    with Image.open(io.BytesIO(content)) as plain:
        expected = plain.convert("RGB").tobytes()
    assert ImageFile(content, 10_000).decode().tobytes() == expected


def test_a_transparent_frame_of_a_gif_is_read_as_pillow_reads_it() -> None:
    content = encoded(picture(9, 9).quantize(16), "GIF", transparency=3, comment=b"c" * 900)
    with Image.open(io.BytesIO(content)) as plain:
        expected = plain.convert("RGB").tobytes()
    assert ImageFile(content, 10_000).decode().tobytes() == expected


@pytest.mark.parametrize("name", ["XML:com.adobe.xmp", "Raw profile type exif"])
def test_a_png_is_turned_by_what_its_texts_say(name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    texts = PngInfo()
    if name.startswith("XML"):
        texts.add_itxt(name, '<x tiff:Orientation="6"/>')
    else:
        texts.add_text(name, f"\nexif\n{len(exif.tobytes())}\n{exif.tobytes().hex()}\n", zip=True)
    image = ImageFile(encoded(picture(10, 20), pnginfo=texts), 1000).decode()
    assert image.size == (10, 20)


@pytest.mark.parametrize("url", [
    "data:image/png;base64,????", "data:image/png,abc", "data:", "data:image/png;base64",
    "data:image/png;base64,AAA", "http://example.com/a.png", "https://127.0.0.1/a.png",
    "file:///etc/passwd", "ftp://example.com/a.png", "gopher://x", "", "/etc/passwd", "x" * 10_000,
])  # fmt: skip
def test_urls_are_refused_by_default(http: Http, url: str) -> None:
    answer = http.post("/v1/chat/completions", asked(url))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"


def test_20_megabytes_of_data_are_refused(vision: Callable[..., Http]) -> None:
    url = "data:image/png;base64," + "A" * (20 << 20)
    answer = vision(max_image_bytes=1 << 20).post("/v1/chat/completions", asked(url))
    assert answer.status_code in (400, 413)
    url = "data:image/png;base64," + "A" * (2 << 20)
    answer = vision(max_image_bytes=1 << 20).post("/v1/chat/completions", asked(url))
    assert answer.status_code == 400
    assert "more than 1048576 bytes" in answer.json()["error"]["message"]


def test_thousands_of_tiny_images_are_counted_and_not_decoded(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(Image, "open", opened.append)
    answer = http.post("/v1/chat/completions", asked(*[data_url(encoded(picture(1, 1)))] * 1000))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too_many_images"
    assert opened == []


def test_image_larger_than_its_header_is_refused() -> None:
    file = ImageFile(encoded(picture(10, 10)), 100)
    file._max_pixels = 50
    with pytest.raises(BadImage):
        file.decode()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
def test_every_mode_of_a_file_is_read_as_rgb(kind: str, mode: str) -> None:
    image = Image.new("L", (5, 4), 255) if mode == "I;16" else small()
    try:
        content = encoded(image.convert(mode), kind)
    except (OSError, ValueError):
        return  # the format has no such mode
    assert ImageFile(content, 10_000).decode().mode == "RGB"


def test_only_the_first_frame_of_an_animation_counts() -> None:
    file = io.BytesIO()
    first = Image.new("RGB", (8, 8), "red")
    others = [Image.new("RGB", (8, 8), "blue")] * 50
    first.save(file, "GIF", save_all=True, append_images=others)
    assert ImageFile(file.getvalue(), 100).decode().getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_according_to_metadata(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = ImageFile(encoded(picture(10, 20), kind, exif=exif), 1000)
    counted = file.height, file.width
    assert counted == ((20, 10) if orientation > 4 else (10, 20))
    image = file.decode()
    assert (image.height, image.width) == counted


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"x" * 1000])
def test_broken_metadata_is_ignored(exif: bytes) -> None:
    image = ImageFile(encoded(picture(10, 20), "JPEG", exif=exif), 1000).decode()
    assert (image.height, image.width) == (10, 20)


DECODE = """
import sys
from pathlib import Path
from server.media.decode import ImageFile

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

content, before = sys.stdin.buffer.read(), peak()
image = ImageFile(content, 1 << 25).decode()
print(peak() - before, image.mode)
"""


def decoded_alone(content: bytes) -> tuple[int, str]:
    """Decode an image in a process of its own; return by how many bytes that grew, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", DECODE], input=content, capture_output=True, check=True
    )
    grown, mode = done.stdout.split()
    assert mode == b"RGB"
    return int(grown) << 10, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "of_pixel"), [("PNG", 4), ("WEBP", 16)])
def test_an_image_is_decoded_once_without_copies(kind: str, of_pixel: int) -> None:
    pixels = 4096 * 4096
    grown, _ = decoded_alone(encoded(Image.new("RGB", (4096, 4096)), kind))
    assert grown < (of_pixel + 2) * pixels, "and some for the decoder"


@pytest.mark.slow
def test_invalid_metadata_does_not_flood_the_log() -> None:
    _, log = decoded_alone(png(8, 8, chunk(b"eXIf", overlapping_tags()), rows=b"\0\0" * 8))
    assert log == ""
