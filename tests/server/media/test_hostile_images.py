"""Malicious images are rejected with a 400 that names them, at a bounded cost."""

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
