"""Request defaults come from the model's files, or from known presets of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from engine.shared.config import ModelConfig
from server.text.sampling_defaults import (
    SamplingDefaults,
    preset_of,
    presets,
    read_sampling_defaults,
)
from server.text.tokenizer import ServedTokenizer


def test_every_preset_is_valid_and_changes_something() -> None:
    for each in presets():
        assert each.family or each.name or each.gguf
        assert each.sampling or each.tool_call_parser or each.reasoning_parser
        read_sampling_defaults(Path("/"), "none", json.dumps(each.sampling or {}))


@pytest.mark.parametrize(
    ("name", "gguf", "expected"),
    [
        ("Meta-Llama-3.1-8B.Q4_K_M.gguf", True, {"temperature": 0.6, "top_p": 0.9}),
        ("SmolLM2-135M-Instruct", False, {"temperature": 0.2, "top_p": 0.9}),
        ("unheard-of.gguf", True, {"temperature": 0.7, "top_p": 0.9}),
        ("unheard-of", False, None),
    ],
)
def test_models_are_recognized_by_their_names(name: str, gguf: bool, expected: Any) -> None:
    assert preset_of("", name, gguf=gguf).sampling == expected


def test_entries_add_to_each_other() -> None:
    preset = preset_of("qwen3_moe", "Qwen/Qwen3-Coder-30B")
    assert (preset.sampling or {})["top_k"] == 20
    assert preset.tool_call_parser == "qwen3_coder"
    assert preset_of("granite", "mine").tool_call_parser == "granite"


def test_recommendations_of_model_override_presets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "SmolLM2"
    model.mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))

    def defaults() -> SamplingDefaults:
        return ServedTokenizer.load(model, ModelConfig(model=str(model))).sampling_defaults

    generation = model / "generation_config.json"
    generation.write_text('{"eos_token_id": 0}')
    with caplog.at_level("INFO"):
        assert defaults().temperature == 0.2
    assert 'sampling: {"temperature": 0.2, "top_p": 0.9} (from the presets' in caplog.text
    generation.write_text('{"temperature": 0.9}')
    assert (defaults().temperature, defaults().top_p) == (0.9, 1.0)
