"""A checkpoint that does not match its config is rejected with a list of all mismatches."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.families.registry import family_of
from engine.models.formats.checkpoint import DummyCheckpoint, SafetensorsCheckpoint
from engine.models.formats.files import CheckpointError, computed_fingerprint, weights_fingerprint
from engine.models.hf_config import read_spec
from engine.models.spec import ModelSpec
from engine.models.weights import stored_tensors

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 16,
    "head_dim": 4,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def spec(directory: Path) -> ModelSpec:
    return read_spec(directory)


@pytest.fixture
def tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(shape)
        for name, shape in stored_tensors(family_of(spec.architecture).weights(spec)).items()
    }


def test_all_mismatched_tensors_are_named(
    directory: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]
) -> None:
    del tensors["model.norm.weight"]
    tensors["model.layers.7.extra"] = torch.zeros(1)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(16, 24)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        SafetensorsCheckpoint(directory, spec)
    assert "missing model.norm.weight" in str(refusal.value)
    assert "unexpected model.layers.7.extra" in str(refusal.value)
    assert "up_proj.weight has shape [16, 24] instead of [24, 16]" in str(refusal.value)


def test_long_lists_are_cut(directory: Path, spec: ModelSpec) -> None:
    save_file({"foreign": torch.zeros(1)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        SafetensorsCheckpoint(directory, spec)


def test_redundant_tensors_are_ignored(
    directory: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]
) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(tensors, directory / "model.safetensors")
    SafetensorsCheckpoint(directory, spec)


def test_unreadable_file_is_not_reported_as_absent(
    directory: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "model.safetensors").write_bytes(b"")

    opened = Path.open

    def refuse(path: Path, mode: str) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        SafetensorsCheckpoint(directory, spec)


def test_absent_and_broken_files_are_named(directory: Path, spec: ModelSpec) -> None:
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        SafetensorsCheckpoint(directory, spec)
    (directory / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsCheckpoint(directory, spec)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        SafetensorsCheckpoint(directory, spec)


def test_integer_weights_are_refused(
    directory: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]
) -> None:
    integers = {name: tensor.to(torch.int8) for name, tensor in tensors.items()}
    save_file(integers, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="I8"):
        _ = SafetensorsCheckpoint(directory, spec).dtype


def test_fingerprint_covers_every_tensor_and_large_ones_by_samples(
    directory: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]
) -> None:
    def fingerprint() -> str:
        save_file(tensors, directory / "model.safetensors")
        return SafetensorsCheckpoint(directory, spec).fingerprint()

    seen = {fingerprint()}
    for tensor in tensors.values():
        for value in (0, tensor.numel() // 2, -1):
            tensor.view(-1)[value] += 1
            seen.add(fingerprint())
    assert len(seen) == 1 + 3 * len(tensors)
    assert fingerprint() in seen
    (directory / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1.0}))
    assert fingerprint() not in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_large_tensor_is_sampled_from_its_first_value_to_its_last(dtype: torch.dtype) -> None:
    large = torch.zeros(3000, 1001).to(dtype)

    def fingerprint() -> str:
        return weights_fingerprint(b"", {"large": "described"}, lambda _: large)

    first = fingerprint()
    for row in (0, -1):
        large[row, row] += 1
        assert fingerprint() != first
        large[row, row] -= 1
    large += 1
    assert fingerprint() != first


def test_weights_rounded_to_8_bits_have_another_fingerprint() -> None:
    assert computed_fingerprint("f" * 32, None) == "f" * 32
    rounded = computed_fingerprint("f" * 32, "int8")
    assert rounded != "f" * 32
    assert len(rounded) == 32


def test_fingerprint_of_dummy_weights_depends_on_the_seed(directory: Path, spec: ModelSpec) -> None:
    def fingerprint(seed: int, dtype: torch.dtype = torch.float32) -> str:
        return DummyCheckpoint(directory, spec, seed, dtype).fingerprint()

    assert fingerprint(1) == fingerprint(1)
    assert len({fingerprint(1), fingerprint(2), fingerprint(1, torch.bfloat16)}) == 3


def test_dummy_weights_have_the_usual_spread(directory: Path, spec: ModelSpec) -> None:
    dummy = DummyCheckpoint(directory, spec, 0, torch.float32)
    assert dummy.tensor("model.embed_tokens.weight").std() == pytest.approx(0.02, rel=0.1)
    assert (dummy.tensor("model.norm.weight") == 1).all()
