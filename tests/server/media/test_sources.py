"""Files are read only below one directory, whatever their URLs and symlinks."""

import os
from pathlib import Path

import pytest

from server.media.decode import BadImage
from server.media.sources import ImageSources


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "shown"
    (root / "deep").mkdir(parents=True)
    (tmp_path / "shown-not").mkdir()
    (tmp_path / "shown-not" / "b.png").write_bytes(b"secret")
    (root / "deep" / "a b.png").write_bytes(b"image")
    (root / "large.png").write_bytes(b"x" * 101)
    (root / "inside").symlink_to(root / "deep" / "a b.png")
    (root / "outside").symlink_to(tmp_path / "shown-not" / "b.png")
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    return root


def sources(root: Path | None) -> ImageSources:
    return ImageSources(local_path=root, max_bytes=100, seconds=1.0)


@pytest.mark.parametrize("path", ["deep/a%20b.png", "inside", "deep/../inside"])
async def test_a_file_below_the_directory_is_read(root: Path, path: str) -> None:
    for host in ("", "localhost"):
        assert await sources(root).read(f"file://{host}{root}/{path}") == b"image"


@pytest.mark.parametrize(
    "path",
    ["../shown-not/b.png", "%2e%2e/shown-not/b.png", "outside", "up/shown-not/b.png", "deep",
     "pipe", "nothing", "a%00b", "large.png"],
)  # fmt: skip
async def test_files_outside_the_directory_are_refused(root: Path, path: str) -> None:
    with pytest.raises(BadImage):
        await sources(root).read(f"file://{root}/{path}")


async def test_file_urls_of_other_hosts_or_without_permission_are_refused(root: Path) -> None:
    with pytest.raises(BadImage, match="file:///PATH"):
        await sources(root).read(f"file://example.com{root}/inside")
    with pytest.raises(BadImage, match="--allowed-local-media-path"):
        await sources(None).read(f"file://{root}/inside")


@pytest.mark.parametrize("size", [0, 99, 100])
async def test_data_urls_up_to_the_limit_are_read(size: int) -> None:
    import base64

    url = "data:image/png;base64," + base64.b64encode(b"x" * size).decode()
    assert await sources(None).read(url) == b"x" * size


async def test_data_urls_beyond_the_limit_are_refused() -> None:
    with pytest.raises(BadImage, match="more than 100 bytes"):
        await sources(None).read("data:image/png;base64," + "A" * 200)
