"""Weights written by the storage format benchmark are close to the originals."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.hf_config import read_spec
from tests.engine.fixtures import SaveModel
from tests.support.stored_forms import SCHEMES, write_checkpoint


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_only_rounded(name: str, checkpoint: SaveModel, tmp_path: Path) -> None:
    source = checkpoint("llama").directory
    settings, write = SCHEMES[name]
    write_checkpoint(source, tmp_path, settings, write)
    stored = SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))
    tolerance = 0.12 if "4" in name or name == "awq" else 0.04
    weights = load_file(source / "model.safetensors")
    projections = [tensor_name for tensor_name in weights if "_proj" in tensor_name]
    assert projections
    for tensor_name in projections:
        expected = weights[tensor_name].float()
        error = (stored.tensor(tensor_name).float() - expected).norm() / expected.norm()
        assert 0 < error < tolerance
