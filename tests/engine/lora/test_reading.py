"""Adapter directories, as written by PEFT and malformed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.lora.adapter_config import MAX_CONFIG_SIZE, BadAdapter, parse_adapter_config
from engine.lora.files import MAX_HEADER_SIZE, read_adapter, resolve_adapter
from engine.lora.modules import AdaptableModules
from engine.lora.weights import adapter_weights
from engine.models.hf_config import read_spec
from tests.support.cpu_time import takes_less_than

PREFIX = "base_model.model.model.layers.0."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def modules(checkpoint: Any) -> AdaptableModules:
    return AdaptableModules(read_spec(checkpoint("llama").directory))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A valid adapter of the tiny Llama's first q_proj."""
    return write(tmp_path / "good")


def write(directory: Path, config: object = CONFIG, **tensors: torch.Tensor) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = tensors or {
        f"{PREFIX}self_attn.q_proj.lora_A.weight": torch.ones(2, 64),
        f"{PREFIX}self_attn.q_proj.lora_B.weight": torch.ones(64, 2),
    }
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def read(directory: Path, modules: AdaptableModules, max_rank: int = 4) -> Any:
    files = read_adapter(directory, None, modules.max_size(max_rank))
    return adapter_weights(files, modules.pairs(files, max_rank), torch.float32)


def test_valid_adapter_is_scaled_and_has_a_version(
    adapter: Path, modules: AdaptableModules, tmp_path: Path
) -> None:
    weights = read(adapter, modules)
    assert list(weights) == ["model.layers.0.self_attn.q_proj"]
    assert weights["model.layers.0.self_attn.q_proj"].b.unique().item() == 2.0
    versions = {read_adapter(adapter, None, 1 << 20).version}
    shutil.copytree(adapter, tmp_path / "copy")
    versions.add(read_adapter(tmp_path / "copy", None, 1 << 20).version)
    assert len(versions) == 1
    (adapter / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_alpha": 5}))
    versions.add(read_adapter(adapter, None, 1 << 20).version)
    assert len(versions) == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "single tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "r is 0"),
        ({"r": -(10**30)}, "r"),
        ({"r": "2"}, "int"),
        ({"r": None}, "no r"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 0}}, "r is 0"),
        ({"rank_pattern": {"(?=a)b": 2}}, "not a supported regular expression.*look"),
        ({"alpha_pattern": {"[": 2}}, "not a supported regular expression"),
        ({"rank_pattern": {f"a{i}*": 2 for i in range(65)}}, "64 patterns"),
        ({"alpha_pattern": {"a" * 400: 2}}, "too complex"),
        ({"rank_pattern": {str(i): 2 for i in range(2000)}}, "1000 patterns"),
    ],
)
def test_unsupported_settings_are_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadAdapter, match=reason):
        parse_adapter_config(json.dumps({**CONFIG, **config}).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b'{"r": 1}', b'"' * 99]
)
def test_invalid_config_is_refused(data: bytes) -> None:
    with pytest.raises(BadAdapter):
        parse_adapter_config(data)


@pytest.mark.parametrize("pattern", ["(a|a)" * 40 + "b", "(a+)+$", "a*a*a*a*a*b"])
def test_ambiguous_patterns_match_in_linear_time(pattern: str) -> None:
    config = parse_adapter_config(json.dumps({**CONFIG, "rank_pattern": {pattern: 2}}).encode())
    takes_less_than(1, lambda: config.rank("model.layers.0." + "a" * 1000 + "!"))


def test_patterns_match_like_peft() -> None:
    patterns = {r"layers\.1\..*_proj": 3, "^model.norm$": 4, "attn.(k|v)_proj": 5, "head": 6}
    config = parse_adapter_config(json.dumps({**CONFIG, "rank_pattern": patterns}).encode())
    names = ["model.layers.1.up_proj", "layers.1.mlp.up_proj", "model.norm", "x.model.norm",
             "self.attn.k_proj", "xattn.k_proj", "lm.head", "lm_head", "head.x"]  # fmt: skip
    r = CONFIG["r"]
    assert [config.rank(name) for name in names] == [3, 3, 4, r, 5, r, 6, r, r]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"{PREFIX}self_attn.q_proj.lora_A.weight": torch.ones(2, 64)}, "only one"),
        ({f"{PREFIX}self_attn.other.lora_A.weight": torch.ones(2, 64)}, "no module"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(2)}, "no module"),
        ({f"{PREFIX}mlp.up_proj.lora_magnitude_vector": torch.ones(9)}, "DoRA"),
        ({f"{PREFIX}mlp.up_proj.weight": torch.ones(9)}, "not part of a LoRA adapter"),
        ({f"{PREFIX}mlp.experts.3.up_proj.lora_A.weight": torch.ones(2, 64)}, "experts"),
        ({"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(9, 64)}, "vocab"),
        ({f"{PREFIX}mlp.up_proj.lora_embedding_A": torch.ones(2, 64)}, "no module"),
    ],
)
def test_tensors_of_another_model_are_refused(
    tensors: dict[str, torch.Tensor], reason: str, modules: AdaptableModules, tmp_path: Path
) -> None:
    with pytest.raises(BadAdapter, match=reason):
        read(write(tmp_path / "bad", **tensors), modules)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [(((2, 65), (64, 2)), "another model"), (((2, 64), (64, 3)), "another model"),
     (((64, 2), (2, 64)), "another model"), (((2, 64, 1), (64, 2)), "another model")],
)  # fmt: skip
def test_matrices_of_other_shapes_are_refused(
    shapes: Any, reason: str, modules: AdaptableModules, tmp_path: Path
) -> None:
    names = [f"{PREFIX}self_attn.q_proj.lora_{matrix}.weight" for matrix in "AB"]
    tensors = dict(zip(names, (torch.ones(shape) for shape in shapes), strict=True))
    with pytest.raises(BadAdapter, match=reason):
        read(write(tmp_path / "bad", **tensors), modules)


def test_too_large_rank_is_named(adapter: Path, modules: AdaptableModules) -> None:
    with pytest.raises(BadAdapter, match="rank 2 exceeds --max-lora-rank 1"):
        read(adapter, modules, max_rank=1)


def test_non_finite_numbers_are_refused(modules: AdaptableModules, tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}self_attn.q_proj.lora_A.weight": torch.full((2, 64), float("nan")),
        f"{PREFIX}self_attn.q_proj.lora_B.weight": torch.ones(64, 2),
    }
    with pytest.raises(BadAdapter, match="not finite"):
        read(write(tmp_path / "bad", **tensors), modules)


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


NAME = f"{PREFIX}self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ends before"),
        (b"\xff" * 8, "ends before"),
        ((2**63).to_bytes(8, "little") + b"{}", "ends before"),
        (header(b"{" + b" " * (MAX_HEADER_SIZE + 1)), "header of"),
        (header(b"[" * 1000), "invalid"),
        (header({NAME: 3}), "invalid"),
        (header({NAME: {"dtype": "F32", "shape": [2, 64], "data_offsets": [0]}}), "invalid"),
        (header({NAME: {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "F64"),
        (header({NAME: {"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 512]}}), "outside"),
        (header({NAME: {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}), "outside"),
        (header({NAME: {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}), "outside"),
        (header({NAME: {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}},
                bytes(4)), "size"),
        (header({NAME: {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}), "only one"),
        (header({str(i): {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}
                 for i in range(20_001)}), "20,001 tensors"),
        (header({}), "no tensors"),
    ],
)  # fmt: skip
def test_hostile_weights_are_refused(
    content: bytes, reason: str, adapter: Path, modules: AdaptableModules
) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(BadAdapter, match=reason):
        read(adapter, modules)


def test_huge_files_are_not_read(adapter: Path, modules: AdaptableModules) -> None:
    with open(adapter / "adapter_model.safetensors", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadAdapter, match="at most"):
        read(adapter, modules)
    os.truncate(adapter / "adapter_config.json", MAX_CONFIG_SIZE + 1)
    with pytest.raises(BadAdapter, match="at most"):
        read(adapter, modules)


def test_missing_files_are_named(adapter: Path, modules: AdaptableModules) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(BadAdapter, match="pickle"):
        read(adapter, modules)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json"):
        read(adapter, modules)


def test_pipes_and_directories_instead_of_files_do_not_block(
    adapter: Path, modules: AdaptableModules
) -> None:
    for make in (os.mkfifo, os.mkdir):
        path = adapter / "adapter_config.json"
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(BadAdapter):
            read(adapter, modules)
        if path.is_dir():
            path.rmdir()


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """Files that can be loaded, among files that cannot."""
    write(tmp_path / "secret")
    root = tmp_path / "root"
    root.mkdir()
    write(root / "good")
    return root


def escape(root: Path, how: str) -> str:
    secret = root.parent / "secret"
    if how == "link":
        (root / "link").symlink_to(secret)
        return "link"
    if how == "loop":
        (root / "loop").symlink_to(root / "loop")
        return "loop"
    return {
        "absolute": str(secret),
        "dots": "../secret",
        "deep dots": "good/../../secret",
        "home": "~/",
        "zero": "good\0",
        "long": "a/" * 5000,
        "none": "nothing",
        "prefix": str(root) + "-other",
    }[how]


@pytest.mark.parametrize(
    "how",
    ["link", "loop", "absolute", "dots", "deep dots", "home", "zero", "long", "none", "prefix"],
)
def test_files_outside_the_directory_are_not_opened(how: str, inside: Path) -> None:
    with pytest.raises(BadAdapter) as refused:
        resolve_adapter(escape(inside, how), str(inside))
    assert len(str(refused.value)) < 12_000


def test_links_to_outside_are_not_opened(inside: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = inside / "good" / name
        kept = path.read_bytes()
        path.unlink()
        path.symlink_to(inside.parent / "secret" / name)
        directory = resolve_adapter("good", str(inside))
        with pytest.raises(BadAdapter, match="outside"):
            read_adapter(directory, str(inside), 1 << 20)
        path.unlink()
        path.write_bytes(kept)
    assert read_adapter(directory, str(inside), 1 << 20).version


def test_paths_can_be_relative_absolute_or_links_within_directory(inside: Path) -> None:
    (inside / "alias").symlink_to("good")
    for path in ("good", "./good", "alias", str(inside / "good"), "good/."):
        assert resolve_adapter(path, str(inside)) == inside / "good"


Make = Callable[..., Any]


def test_16_bit_adapters_of_peft_are_read(trained: Make, checkpoint: Any, tmp_path: Path) -> None:
    directory = trained("qwen2").directory
    shutil.copytree(directory, tmp_path / "half")
    path = tmp_path / "half" / "adapter_model.safetensors"
    tensors = {name: each.bfloat16() for name, each in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(tensors, path)
    qwen = AdaptableModules(read_spec(checkpoint("qwen2").directory))
    whole, half = read(directory, qwen), read(tmp_path / "half", qwen)
    assert whole.keys() == half.keys()
    for name, pair in whole.items():
        assert (pair.a - half[name].a).abs().max() < 0.01


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"mlp.experts": ((12, 64), (96, 11))}, "another model"),
        ({"mlp.experts": ((12, 64), (64, 12))}, "another model"),
        ({"mlp.experts.7.up_proj": ((2, 64), (48, 2))}, "no module"),
        ({"mlp.experts.base_layer": ((12, 64), (96, 12)), "mlp.experts": ((12, 64), (96, 12))},
         "twice"),
        ({"mlp.experts": ((12, 64), (96, 12)), "mlp.experts.0.up_proj": ((2, 64), (48, 2))},
         "twice"),
        ({"mlp.experts.lora_A": ((12, 64), (96, 12))}, "no module"),
    ],
)  # fmt: skip
def test_matrices_of_experts_that_do_not_fit_are_refused(
    tensors: dict[str, Any], reason: str, checkpoint: Any, tmp_path: Path
) -> None:
    modules = AdaptableModules(read_spec(checkpoint("qwen3-moe").directory))
    made = {
        f"{PREFIX}{name}.lora_{matrix}.weight": torch.ones(shape)
        for name, shapes in tensors.items()
        for matrix, shape in zip("AB", shapes, strict=True)
    }
    with pytest.raises(BadAdapter, match=reason):
        read(write(tmp_path / "bad", **made), modules)
