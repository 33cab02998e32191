"""CUDA devices are counted without loading torch."""

from pathlib import Path

import pytest

from engine.shared.devices import num_cuda_devices


def machine(path: Path, *, devices: int, cuda: str | None) -> Path:
    """Make `/dev` and torch's package of a machine; return their directory."""
    names = [f"nvidia{number}" for number in range(devices)]
    (path / "dev").mkdir()
    for name in (*names, "nvidiactl", "nvidia-uvm", "null"):
        (path / "dev" / name).touch()
    (path / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda!r}\n")
    return path


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8),
        ("", 0),
        ("0", 1),
        ("3,1", 2),
        ("-1", 0),
        ("0,9,1", 1),
        ("GPU-8932f937,MIG-c0ffee", 2),
        (" 2, 3", 2),
    ],
)
def test_hidden_devices_do_not_count(tmp_path: Path, visible: str | None, count: int) -> None:
    root = machine(tmp_path, devices=8, cuda="12.8")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_cuda_devices(environment, root, torch=root) == count


def test_no_devices_without_cuda_torch(tmp_path: Path) -> None:
    root = machine(tmp_path, devices=2, cuda=None)
    assert num_cuda_devices({}, root, torch=root) == 0
    assert num_cuda_devices({}, root, torch=root / "missing") == 0
    assert num_cuda_devices({}, root / "dev", torch=root) == 0
