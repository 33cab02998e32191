"""The cache of compiled kernels, and preinstalled kernels."""

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numba
import pytest
import torch

from engine.kernels.cpu import kernel_cache
from engine.kernels.cpu.compiling import Kernel
from engine.kernels.cpu.kernel_cache import cache_directory, installed_directory
from engine.kernels.cpu.rows import CompiledKernels, swiglu

TARGET = "some"


@pytest.fixture(autouse=True)
def nothing_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the cache directory, with no preinstalled kernels."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "installation"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_directory.cache_clear()
    yield
    cache_directory.cache_clear()


@pytest.fixture
def installed() -> Path:
    """A world-readable directory with one preinstalled kernel."""
    directory = installed_directory(TARGET)
    (directory / "kernels").mkdir(parents=True)
    (directory / "kernels" / "one.nbc").write_bytes(b"code")
    return directory


def test_directory_writable_by_others_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "swell" / "kernels" / installed_directory(TARGET).name
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with caplog.at_level(logging.INFO):
        assert cache_directory(TARGET) is None
    assert f"compiled at every start: {directory} must be owned" in caplog.text
    cache_directory.cache_clear()
    directory.chmod(0o700)
    assert cache_directory(TARGET) == str(directory)


def test_uncacheable_kernels_are_still_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_directory(TARGET) is None
    kernel = Kernel(swiglu._body, 4)
    x, out = torch.randn(2, 16).bfloat16(), torch.empty(2, 8, dtype=torch.bfloat16)
    kernel(1, x.data_ptr(), out.data_ptr(), 2, 8)
    assert torch.equal(out, CompiledKernels().swiglu(x))


def test_installed_kernels_are_cached_from_start(installed: Path) -> None:
    directory = cache_directory(TARGET)
    assert directory is not None
    assert Path(directory) != installed
    assert Path(directory).stat().st_mode & 0o777 == 0o700
    assert (Path(directory) / "kernels" / "one.nbc").read_bytes() == b"code"


def test_existing_cache_is_not_changed(tmp_path: Path, installed: Path) -> None:
    directory = tmp_path / "swell" / "kernels" / installed.name
    directory.mkdir(mode=0o700, parents=True)
    assert cache_directory(TARGET) == str(directory)
    assert not list(directory.iterdir())


def test_kernels_of_other_targets_are_not_used(installed: Path) -> None:
    directory = cache_directory("another")
    assert directory is not None
    assert not list(Path(directory).iterdir())


def test_concurrent_engines_make_one_complete_copy(tmp_path: Path, installed: Path) -> None:
    target, together = tmp_path / "copies" / "one", Barrier(8)

    def copy(_: int) -> list[str]:
        together.wait()
        kernel_cache._copy(installed, target)
        return [path.name for path in target.rglob("*.nbc")]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(copy, range(8))) == [["one.nbc"]] * 8
    assert list(target.parent.iterdir()) == [target], "nothing else is left"


def test_uncopyable_kernels_are_compiled(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", fail)
    with caplog.at_level(logging.INFO):
        directory = cache_directory(TARGET)
    assert "cannot be copied: [Errno 28] No space left" in caplog.text
    assert directory is not None
    assert not list(Path(directory).iterdir())
