"""Writes adapters with random matrices in PEFT's format, without its library."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.lora.modules import AdaptableModules
from engine.models.hf_config import read_spec
from engine.shared.config import BUNDLED_MODEL

SIZE = 0.05
"""Maximum absolute value of matrix elements."""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    *,
    seed: int = 0,
    rank: int = 2,
    size: float = SIZE,
    modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
    config: dict[str, Any] | None = None,
    model: Path = BUNDLED_MODEL,
) -> Path:
    """Write an adapter of a model; `config` has additional keys."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **(config or {})}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    source, header, blocks, first = np.random.default_rng(seed), {}, [], 0
    for name, module in AdaptableModules(read_spec(model))._modules.items():
        if name.rsplit(".", 1)[-1] not in modules:
            continue
        for matrix, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
            block = source.uniform(-size, size, shape).astype(np.float32).tobytes()
            header[f"base_model.model.{name}.lora_{matrix}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [first, first + len(block)],
            }
            blocks.append(block)
            first += len(block)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"".join(blocks)
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory
