"""Model config keys in both spellings, and rejected keys by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.families.registry import FAMILIES
from engine.models.hf_config import parse_spec, read_spec
from engine.models.spec import ModelSpec, UnsupportedModel

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def spec(
    architecture: str = "Llama", generation: dict[str, Any] | None = None, **changes: Any
) -> ModelSpec:
    config = {**BASE, "architectures": [f"{architecture}ForCausalLM"], **changes}
    return parse_spec(config, generation or {})


def test_both_spellings_are_equivalent() -> None:
    old = spec(
        rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 2.0},
        torch_dtype="bfloat16",
    )
    new = spec(
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        dtype="bfloat16",
    )
    assert old == new
    (rope,) = old.distinct_ropes
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


def test_head_dim_follows_from_the_width_unless_given() -> None:
    assert spec().head_dim == 8
    assert spec(head_dim=32).head_dim == 32
    assert spec(head_dim=None).head_dim == 8
    assert spec(num_key_value_heads=None).num_kv_heads == 8


def test_generation_config_decides_about_endings() -> None:
    assert spec().eos_token_ids == ()
    assert spec(eos_token_id=5).eos_token_ids == (5,)
    assert spec(eos_token_id=5, generation={"eos_token_id": [7, 5]}).eos_token_ids == (7, 5)


def test_windows_are_read_per_layer() -> None:
    assert spec("Mistral", sliding_window=30).windows == (30,) * 4
    assert spec("Qwen2", sliding_window=30).windows == (None,) * 4
    some: dict[str, Any] = {"sliding_window": 30, "use_sliding_window": True}
    assert spec("Qwen2", max_window_layers=3, **some).windows == (None, None, None, 30)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec("Qwen3", layer_types=kinds, **some).windows == (30, None, 30, None)


def test_yarn_stretches_the_stated_length() -> None:
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert spec(rope_scaling=stretched).max_position_embeddings == 2048
    assert spec(rope_scaling={**stretched, "rope_type": "linear"}).max_position_embeddings == 512


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "quip"}}, "quip"),
        ({"dtype": "float8"}, "float8"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_refusals_name_the_setting(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_spec({**BASE, **changes}, {})


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        parse_spec({**BASE, "architectures": ["MambaForCausalLM"]}, {})
    assert all(name in str(refusal.value) for name in FAMILIES)


def test_files_are_read_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 1}))
    assert read_spec(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_spec(tmp_path).eos_token_ids == (9,)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<end>"}}')
    added = [{"id": 5, "content": "<end>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert read_spec(tmp_path).eos_token_ids == (9, 5)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<end>": 1 << 40}}}))
    assert read_spec(tmp_path).eos_token_ids == (9,)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(UnsupportedModel, match="not JSON"):
        read_spec(tmp_path)
