"""Adapters on quantized weights: equal to merging into the dequantized weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.models.products.int4 import fits_int4, quantized
from tests.engine.comparing import relative
from tests.engine.gguf_files import write_gguf
from tests.engine.lora.adapters import train
from tests.engine.lora.test_adapted_models import load
from tests.engine.quantized_files import Written, awq, fp8, gptq
from tests.engine.tiny_models import Checkpoint

Tensors = dict[str, torch.Tensor]

FORMATS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int], int], Written]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        lambda shape, seed: gptq(shape, seed=seed),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda shape, seed: awq(shape, seed=seed),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
        lambda shape, seed: fp8(shape, block=(40, 24), seed=seed),
    ),
}


def written(form: str, model: Checkpoint, directory: Path) -> tuple[Path, Tensors]:
    """Write a model in a format; return its directory and its dequantized weights."""
    if form in ("Q4_0", "Q4_1"):
        path = directory / "tiny.gguf"
        return path, write_gguf(path, model.directory, "llama", Kind[form])
    tensors = load_file(model.directory / "model.safetensors")
    config = msgspec.json.decode((model.directory / "config.json").read_bytes())
    stored: Tensors = {}
    expanded: Tensors = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        expanded[name], parts = tensor, {"weight": tensor}
        if form in FORMATS and "_proj" in name:
            parts, expanded[name] = FORMATS[form][1]((len(tensor), tensor.shape[1]), seed)
        stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
    if form in FORMATS:
        config["quantization_config"] = FORMATS[form][0]
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    return directory, expanded


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as rounded by `--quantization int4`."""
    whole = quantized(weight)
    if whole is None or not fits_int4(whole):
        return weight
    groups = whole.codes.float().view(len(weight), whole.scales.shape[1], -1)
    return ((groups - whole.zeros.unsqueeze(2)) * whole.scales.unsqueeze(2)).flatten(1)


@pytest.mark.parametrize(
    ("form", "settings", "error"),
    [
        ("gptq", {"dtype": "float32"}, 1e-5),
        ("awq", {"dtype": "float32"}, 1e-5),
        ("fp8", {"dtype": "float32"}, 1e-5),
        ("Q4_0", {"dtype": "float32"}, 1e-5),
        ("plain", {"dtype": "bfloat16", "quantization": "int4"}, 0.15),
        ("gptq", {"dtype": "bfloat16", "quantization": "int4"}, 0.15),
        ("Q4_1", {"dtype": "bfloat16", "quantization": "int4"}, 0.15),
        ("awq", {"dtype": "bfloat16", "quantization": "stored"}, 0.15),
        ("Q4_1", {"dtype": "bfloat16", "quantization": "stored"}, 0.15),
        ("gptq", {"dtype": "float32", "quantization": "int8"}, 0.03),
    ],
    ids=str,
)
def test_adapters_equal_merging_into_expanded_weights(
    form: str, settings: dict[str, Any], error: float, checkpoint: Any, driver: Any, prompt: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = checkpoint("llama")
    path, expanded = written(form, model, tmp_path)
    if form == "plain":
        cut = {name: rounded(each) for name, each in expanded.items() if each.dim() == 2}
        expanded |= {name: each for name, each in cut.items() if "embed_tokens" not in name}
    reference = type(model.reference)(model.reference.config).eval()
    reference.load_state_dict(expanded)
    base = Checkpoint(path, reference)
    adapter = train(base, tmp_path / "adapter", 7, r=8)
    engine = load(driver, path, adapter.directory, **settings)
    engine.start(0, prompt(30), adapter=0)
    engine.start(1, prompt(31))
    logits = engine.logits({0: 30, 1: 31})
    merged, plain = adapter.merged.logits(prompt(30)), base.logits(prompt(31))
    assert relative(merged, base.logits(prompt(30))) > 0.3, "the adapter changes little"
    without = relative(logits[30:], plain)
    assert without < error
    assert relative(logits[:30], merged) < 2 * without + 2e-5  # float32 adds up in another order
