"""Models from GGUF files match their weights in every storage type."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.models.formats.files import CheckpointError
from engine.models.formats.gguf_expansion import EXPANSIONS, INT4_TYPES, expand, int4_codes
from engine.models.hf_config import read_spec
from engine.models.products.int4 import Int4Weights
from engine.models.settings import open_checkpoint
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.shared.config import ModelConfig
from engine.shared.gguf.reader import Storage, storage_types
from engine.shared.model_files import ModelNotFound, model_directory, served_names
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.gguf_files import write_gguf
from tests.engine.quantized_files import dense
from tests.engine.tiny_models import MODELS, Checkpoint, save_tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_blocks(storage: Storage) -> np.ndarray:
    """Return 50 blocks of any values."""
    generator = np.random.default_rng(1)
    if storage.elements == 1:
        values = generator.standard_normal((50, 1), np.float32)
        return gguf.quantize(values, Kind[storage.name]).view(np.uint8)
    blocks = generator.integers(0, 256, (50, storage.num_bytes), dtype=np.uint8)
    # Scales are 16-bit floats; random bytes may not be valid ones.
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    for at in places.get(storage.name, (0,)):
        scales = generator.standard_normal((50, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks


EXPANDED = [
    each for each in storage_types().values() if each.name in (*EXPANSIONS, "IQ4_NL", "MXFP4")
]


@pytest.mark.parametrize("storage", EXPANDED, ids=lambda each: each.name)
def test_every_type_expands_like_the_reference(storage: Storage) -> None:
    blocks, kind = random_blocks(storage), Kind[storage.name]
    expected = gguf.dequantize(blocks, kind).reshape(50, -1)
    found = expand(torch.from_numpy(blocks.copy()).view(50, -1), storage.name)
    assert torch.equal(found, torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("name", INT4_TYPES)
def test_4_bit_codes_represent_the_same_elements(name: str) -> None:
    storage = next(each for each in storage_types().values() if each.name == name)
    blocks = torch.from_numpy(random_blocks(storage))
    blocks[3, :2] = 0  # a scale of zero
    codes, scales, zeros = int4_codes(blocks, name)
    values = dense(Int4Weights(codes, scales, zeros))
    torch.testing.assert_close(values, expand(blocks, name), rtol=1e-4, atol=1e-3)


def test_4_bit_weights_can_be_read_as_stored(checkpoint: SaveModel, tmp_path: Path) -> None:
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
def test_greedy_tokens_equal_those_of_expanded_weights(
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


_SLIDING = "sliding_attention"
_FULL = "full_attention"
_ONE_SCALE = {"mscale": 0.7, "mscale_all_dim": 0.7}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 7,
            "layer_types": [_SLIDING] * 5 + [_FULL, _SLIDING],
            "query_pre_attn_scalar": 32,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"factor": 1.0}}),
    "phi3-long": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite-moe": ("granitemoe", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
    "cohere": ("command-r", {}),
    "cohere-normed": ("command-r", {}),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 5, "layer_types": [_SLIDING] * 3 + [_FULL, _SLIDING]},
    ),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "glm4-moe": ("glm4moe", {}),
    "glm4-moe-normed": ("glm4moe", {}),
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "gpt-oss-mxfp4": ("gpt-oss", {"swiglu_limit": 7.0}),
    "deepseek2": ("deepseek2", {"attention_bias": False, "rope_parameters": _ONE_SCALE}),
    "deepseek2-lite": ("deepseek2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek3": ("deepseek2", {"rope_parameters": _ONE_SCALE}),
    "ministral3": ("mistral3", {"rope_parameters": {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "minimax-m2": ("minimax-m2", {}),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5-moe": ("ernie4_5-moe", {}),
    "llama4": (
        "llama4",
        {
            "num_local_experts": 16,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
}
"""By tiny models: the architecture, and values that are not keys but constants of llama.cpp."""


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_config_of_every_family_equals_its_checkpoint(
    name: str,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    architecture, changes = FAMILIES[name]
    family, settings = MODELS[name]
    rope = {**settings.get("rope_parameters", {}), **changes.get("rope_parameters", {})}
    own = {"rope_parameters": rope} if rope else {}
    monkeypatch.setitem(MODELS, name, (family, {**settings, **changes, **own}))
    model, path = save_tiny_model(name, tmp_path / "source", 5), tmp_path / "tiny.gguf"
    write_gguf(path, model.directory, architecture, divisors=divisors(model))
    tokens = prompt(90)
    expected = model.logits(tokens).log_softmax(-1)
    engine = driver(path, dtype="float32")
    engine.start(0, tokens)
    found = engine.logits({0: 90}).log_softmax(-1)
    assert (found - expected).abs().max() < 1e-3


def divisors(model: Checkpoint) -> torch.Tensor | None:
    """Return what Llama 3's stretching divides each frequency by."""
    if model.reference.config.rope_parameters.get("rope_type") != "llama3":
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


def test_gguf_file_serves_as_directory_except_for_weights(
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


def test_recommended_sampling_of_file_is_read(checkpoint: SaveModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    own = {"general.sampling.temp": 0.5, "general.basename": "Tiny"}
    write_gguf(path, checkpoint("qwen3").directory, "qwen3", metadata=own)
    directory = model_directory(ModelConfig(model=str(path)), weights=False)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2], "temperature": 0.5}
    assert json.loads((directory / "config.json").read_text())["_name_or_path"] == "Tiny"


def test_files_differing_only_in_frequencies_have_different_configs(
    checkpoint: SaveModel, tmp_path: Path
) -> None:
    found = []
    for factor in (2.0, 4.0):
        path = tmp_path / f"{factor}.gguf"
        write_gguf(path, checkpoint("llama").directory, "llama", divisors=torch.full((8,), factor))
        directory = model_directory(ModelConfig(model=str(path)), weights=False)
        found.append(read_spec(directory).distinct_ropes[0].short_factor)
    assert found == [(2.0,) * 8, (4.0,) * 8]


def _spec_of(
    checkpoint: SaveModel, tmp_path: Path, metadata: dict[str, Any], architecture: str = "llama"
) -> ModelSpec:
    path = tmp_path / "scaled.gguf"
    write_gguf(path, checkpoint("llama").directory, architecture, metadata=metadata)
    return read_spec(model_directory(ModelConfig(model=str(path)), weights=False))


def test_rope_scaling_equals_llama_cpp(checkpoint: SaveModel, tmp_path: Path) -> None:
    prefix = "llama.rope.scaling."
    (linear,) = _spec_of(checkpoint, tmp_path, {f"{prefix}factor": 4.0}).distinct_ropes
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    (older,) = _spec_of(checkpoint, tmp_path, {"llama.rope.scale_linear": 2.0}).distinct_ropes
    assert (older.kind, older.factor) == ("linear", 2.0)
    off = {f"{prefix}type": "none", f"{prefix}factor": 4.0}
    assert _spec_of(checkpoint, tmp_path, off).distinct_ropes[0].kind == "default"
    yarn = {
        f"{prefix}type": "yarn", f"{prefix}factor": 4.0, f"{prefix}original_context_length": 64,
        f"{prefix}attn_factor": 0.5, f"{prefix}yarn_beta_fast": 16.0,
    }  # fmt: skip
    (stretched,) = _spec_of(checkpoint, tmp_path, yarn).distinct_ropes
    assert (stretched.kind, stretched.beta_fast) == ("yarn", 16.0)
    assert stretched.original_max_position_embeddings == 64
    assert stretched.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    with pytest.raises(ModelNotFound, match="'linear' with attn_factor 2"):
        _spec_of(checkpoint, tmp_path, {f"{prefix}attn_factor": 2.0})


def test_unread_keys_of_file_are_named(
    checkpoint: SaveModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _spec_of(checkpoint, tmp_path, {"llama.attention.scale": 0.5, "llama.vocab_size": 256})
    (message,) = [record.getMessage() for record in caplog.records]
    assert "not read for LlamaForCausalLM: llama.attention.scale;" in message


@pytest.mark.parametrize(
    ("architecture", "metadata"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}),
        ("gemma3", {"gemma3.block_count": 1 << 30}),
        ("granite", {"granite.attention.head_count": "four"}),
        ("deepseek2", {"deepseek2.rope.dimension_count": "all"}),
        ("llama", {"llama.rope.scaling.factor": "much", "llama.rope.scaling.type": "yarn"}),
    ],
)
def test_invalid_keys_are_refused(
    checkpoint: SaveModel, tmp_path: Path, architecture: str, metadata: dict[str, Any]
) -> None:
    window = {f"{architecture}.attention.sliding_window": 8} if architecture == "gemma3" else {}
    refused = (ModelNotFound, UnsupportedModel)
    with pytest.raises(refused, match=f"{architecture}|num_attention_heads"):
        _spec_of(checkpoint, tmp_path, {**window, **metadata}, architecture)


def test_dtypes_follow_the_file_unless_set(checkpoint: SaveModel, tmp_path: Path) -> None:
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


def test_gguf_weights_have_a_fingerprint(checkpoint: SaveModel, tmp_path: Path) -> None:
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


def test_missing_parts_are_named(checkpoint: SaveModel, tmp_path: Path) -> None:
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


def test_other_architectures_are_refused_with_supported_ones(
    checkpoint: SaveModel, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, checkpoint("qwen2").directory, "qwen2vl")
    with pytest.raises(ModelNotFound, match=r"'qwen2vl' is not served.*qwen2, qwen3"):
        model_directory(ModelConfig(model=str(path)), weights=False)
