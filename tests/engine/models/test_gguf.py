"""Models from GGUF files say what the weights in them say, whatever these are stored as."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.models.formats.checkpoint import CheckpointError
from engine.models.formats.gguf.expansion import INT4_TYPES, expand, int4_codes
from engine.models.hf_config import read_spec
from engine.models.products.int4 import Int4Weights
from engine.models.settings import open_checkpoint
from engine.shared.config import ModelConfig
from engine.shared.gguf.reader import STORAGE, Storage
from engine.shared.model_files import ModelNotFound, model_directory, served_names
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.gguf_files import write_gguf
from tests.engine.quantized_files import dense
from tests.engine.tiny_models import Checkpoint


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_blocks(storage: Storage) -> np.ndarray:
    """Return 50 blocks of any values."""
    generator = np.random.default_rng(1)
    if storage.name in ("F32", "F16", "BF16"):
        values = generator.standard_normal((50, 1), np.float32)
        return gguf.quantize(values, Kind[storage.name]).view(np.uint8)
    blocks = generator.integers(0, 256, (50, storage.num_bytes), dtype=np.uint8)
    # Scales are 16-bit floats, which random bytes need not be.
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    for at in places.get(storage.name, (0,)):
        scales = generator.standard_normal((50, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks


ALL_STORAGE = pytest.mark.parametrize("storage", STORAGE.values(), ids=lambda each: each.name)


@ALL_STORAGE
def test_every_type_expands_to_what_the_reference_makes_of_it(storage: Storage) -> None:
    blocks, kind = random_blocks(storage), Kind[storage.name]
    expected = gguf.dequantize(blocks, kind).reshape(50, -1)
    found = expand(torch.from_numpy(blocks.copy()).view(50, -1), storage.name)
    assert torch.equal(found, torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("name", INT4_TYPES)
def test_codes_of_4_bits_stand_for_the_same_elements(name: str) -> None:
    storage = next(each for each in STORAGE.values() if each.name == name)
    blocks = torch.from_numpy(random_blocks(storage))
    blocks[3, :2] = 0  # a scale of zero
    codes, scales, zeros = int4_codes(blocks, name)
    values = dense(Int4Weights(codes, scales, zeros))
    torch.testing.assert_close(values, expand(blocks, name), rtol=1e-4, atol=1e-3)


def test_weights_of_4_bits_are_to_be_had_as_stored(checkpoint: SaveModel, tmp_path: Path) -> None:
    model, path = checkpoint("llama"), tmp_path / "tiny.gguf"
    write_gguf(path, model.directory, "llama", Kind.Q4_1)
    config = ModelConfig(model=str(path), dtype="float32")
    directory = model_directory(config, weights=True)
    stored = open_checkpoint(directory, read_spec(directory), config)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        weights = stored.int4(f"model.layers.1.{name}.weight")
        assert weights is not None
        expected = stored.tensor(f"model.layers.1.{name}.weight")
        torch.testing.assert_close(dense(weights), expected, rtol=1e-4, atol=1e-4)
    assert stored.int4("model.norm.weight") is None


@pytest.mark.parametrize(
    ("name", "architecture", "kind"),
    [
        ("llama-tied-llama3", "llama", Kind.Q4_0),
        ("mistral", "llama", Kind.Q4_1),
        ("mixtral", "llama", Kind.Q8_0),
        ("qwen2", "qwen2", Kind.BF16),
        ("qwen3", "qwen3", Kind.Q5_1),
        ("qwen3-moe", "qwen3moe", Kind.F32),
    ],
)
def test_greedy_tokens_are_those_of_the_expanded_weights(
    name: str,
    architecture: str,
    kind: Kind,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    model, path = checkpoint(name), tmp_path / "tiny.gguf"
    expanded = write_gguf(path, model.directory, architecture, kind, divisors=divisors(model))
    reference = reread(model, expanded, tmp_path / "expanded")
    engine = driver(path, dtype="float32")
    tokens = prompt(90)
    engine.start(0, tokens)
    assert (engine.logits({0: 90}) - reference.logits(tokens)).abs().max() < 1e-3
    engine.start(1, tokens[:30])
    engine.prefill(1)
    engine.decode(63, 1)
    assert engine.tokens[1][30:] == reference.greedy(tokens[:30], 64)


def divisors(model: Checkpoint) -> torch.Tensor | None:
    """Return what Llama 3's stretching divides each frequency by."""
    if model.reference.config.rope_parameters["rope_type"] != "llama3":
        return None
    stretched: torch.Tensor = model.reference.model.rotary_emb.inv_freq
    count = len(stretched)
    plain = 1.0 / 10000.0 ** (torch.arange(count, dtype=torch.float32) / count)
    return plain / stretched


def reread(model: Checkpoint, tensors: dict[str, torch.Tensor], directory: Path) -> Checkpoint:
    """Return the reference with other weights."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((model.directory / "config.json").read_bytes())
    return Checkpoint(directory, type(model.reference).from_pretrained(directory).eval())


def test_a_file_is_a_directory_for_all_but_the_weights(
    checkpoint: SaveModel, tmp_path: Path
) -> None:
    path = tmp_path / "Tiny-Model.Q8_0.gguf"
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    write_gguf(path, checkpoint("qwen3").directory, "qwen3", Kind.Q8_0, template)
    config = ModelConfig(model=str(path))
    directory = model_directory(config, weights=False)
    assert model_directory(config, weights=True) == directory
    assert served_names(config) == ("Tiny-Model.Q8_0",)
    spec = read_spec(directory)
    assert (spec.architecture, spec.qk_norm, spec.eos_token_ids) == (
        "Qwen3ForCausalLM",
        "head",
        (2,),
    )
    text = json.loads((directory / "tokenizer_config.json").read_text())
    assert text["chat_template"] == "{{ messages[0].content }}"


def test_types_are_those_of_the_file_unless_set(checkpoint: SaveModel, tmp_path: Path) -> None:
    for kind, dtype in (
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.Q8_0, torch.bfloat16),
    ):
        path = tmp_path / f"{kind.name}.gguf"
        write_gguf(path, checkpoint("qwen2").directory, "qwen2", kind)
        config = ModelConfig(model=str(path))
        directory = model_directory(config, weights=True)
        opened = open_checkpoint(directory, read_spec(directory), config)
        assert opened.dtype == opened.tensor("model.norm.weight").dtype == dtype


def test_weights_have_their_own_fingerprint(checkpoint: SaveModel, tmp_path: Path) -> None:
    prints = set()
    for at in (None, -1):
        path = tmp_path / f"{at}.gguf"
        write_gguf(path, checkpoint("qwen2").directory, "qwen2")
        if at is not None:
            content = bytearray(path.read_bytes())
            content[at] ^= 1
            path.write_bytes(content)
        config = ModelConfig(model=str(path))
        directory = model_directory(config, weights=True)
        prints.add(open_checkpoint(directory, read_spec(directory), config).fingerprint())
    assert len(prints) == 2


def test_what_is_missing_is_named(checkpoint: SaveModel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(checkpoint("qwen2").directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    content = (checkpoint("qwen2").directory / "config.json").read_bytes()
    (source / "config.json").write_bytes(content)
    write_gguf(tmp_path / "less.gguf", source, "qwen2")
    config = ModelConfig(model=str(tmp_path / "less.gguf"))
    directory = model_directory(config, weights=True)
    with pytest.raises(CheckpointError, match=r"missing blk\.1\.ffn_up\.weight"):
        open_checkpoint(directory, read_spec(directory), config)


def test_other_architectures_are_refused_with_what_is_served(
    checkpoint: SaveModel, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, checkpoint("qwen2").directory, "mamba")
    with pytest.raises(ModelNotFound, match=r"'mamba' is not served.*llama, qwen2"):
        model_directory(ModelConfig(model=str(path)), weights=False)
