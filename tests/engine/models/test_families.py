"""Families read published configs in older and newer forms, and reject unsupported ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.families import llava
from engine.models.families.config_fields import llama_spec
from engine.models.families.family import Config, Family
from engine.models.families.registry import FAMILIES, family_of
from engine.models.families.tensor_names import llama_weights
from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.formats.files import CheckpointError
from engine.models.hf_config import parse_spec, read_spec
from engine.models.loading.decoder import AdapterCapacity
from engine.models.parallel.tensors import TensorSharding
from engine.models.spec import ModelSpec, RopeSpec, TemperatureSpec, UnsupportedModel
from engine.shared.plugins import BadPlugin
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.support.plugins import offer

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}


EXPERTS_AS_PARAMETERS = (
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
)


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return parse_spec({**BASE, "architectures": [architecture], **changes}, {})


def test_every_family_describes_weights_of_its_own_spec() -> None:
    moe = {"num_local_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    moe |= {**LATENT, "n_group": 2, "topk_group": 1}
    grid = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
    for architecture, family in FAMILIES.items():
        own: dict[str, Any] = grid if "VL" in architecture else {}
        if family is llava.FAMILY:
            own = {"model_type": "qwen2"}
        described = spec(architecture, **moe, **own)
        assert described.architecture == architecture
        weights = family.weights(described)
        assert weights["model.embed_tokens.weight"].shape == (100, 64)
        if architecture not in EXPERTS_AS_PARAMETERS:
            assert all(source.name.endswith((".weight", "bias")) for source in weights.values())


def test_gemma_3_rotates_sliding_layers_by_their_own_base() -> None:
    new = spec(
        "Gemma3ForCausalLM",
        sliding_window=20,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    old = spec(
        "Gemma3ForCausalLM",
        sliding_window=20,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert new == old
    assert [rope and rope.theta for rope in new.ropes] == [1e4] * 5 + [1e6]
    assert [rope.factor for rope in new.distinct_ropes] == [1.0, 8.0]
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        spec("Gemma3ForCausalLM", use_bidirectional_attention=True)


def test_published_ministral_3_config_is_read(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, tmp_path: Path
) -> None:
    """In 8 bits with a scale of each weight and of its inputs, within a multimodal model."""
    plain = checkpoint("ministral3")
    text = json.loads((plain.directory / "config.json").read_text())
    expanded: dict[str, torch.Tensor] = {}
    stored: dict[str, torch.Tensor] = {"vision_tower.extra.weight": torch.zeros(3)}
    for name, tensor in load_file(plain.directory / "model.safetensors").items():
        inner, expanded[name] = f"language_model.{name}", tensor
        stored[inner] = tensor
        if "_proj" in name:
            scale = tensor.abs().max() / 448
            stored[inner] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{inner}_scale_inv"] = scale
            stored[inner.replace("weight", "activation_scale")] = torch.tensor(1.0)
            expanded[name] = stored[inner].float() * scale
    quantization = {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
    }  # fmt: skip
    published: dict[str, Any] = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "quantization_config": quantization,
    }
    logits = []
    for config, tensors in ((text, expanded), (published, stored)):
        directory = tmp_path / config["architectures"][0]
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors")
        engine = driver(directory)
        engine.start(0, prompt(40))
        logits.append(engine.logits({0: 40}))
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_ministral_3_defaults_are_those_of_published_models() -> None:
    found = spec("Mistral3ForConditionalGeneration", text_config={"model_type": "ministral3"})
    assert found.attention_temperature == TemperatureSpec(scale=0.1, step=16384)
    assert found.distinct_ropes[0].kind == "yarn"
    small = spec("Mistral3ForConditionalGeneration", text_config={"model_type": "mistral"})
    assert small.attention_temperature is None
    assert small.windows == (4096,) * 6


def test_unpublished_variants_of_minimax_m2_are_refused() -> None:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2}
    found = spec("MiniMaxM2ForCausalLM", **sizes, head_dim=16, rotary_dim=8, rope_theta=5e6)
    assert found.distinct_ropes == (
        RopeSpec(theta=5e6, share=0.5, original_max_position_embeddings=512),
    )
    for key, other in (("qk_norm_type", "per_head"), ("shared_intermediate_size", 96)):
        with pytest.raises(UnsupportedModel, match=key):
            spec("MiniMaxM2ForCausalLM", **sizes, **{key: other})


def test_ernie_with_biases_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="use_bias"):
        spec("Ernie4_5_MoeForCausalLM", use_bias=True)


def test_unsupported_llama_4_settings_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="num_experts_per_tok"):
        spec("Llama4ForCausalLM", num_experts_per_tok=2)
    with pytest.raises(UnsupportedModel, match="no_rope_layers"):
        spec("Llama4ForCausalLM", no_rope_layers=[1, 1, 0])


def test_only_text_model_of_multimodal_config_is_read(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, tmp_path: Path
) -> None:
    plain = checkpoint("gemma3")
    tensors = load_file(plain.directory / "model.safetensors")
    text = json.loads((plain.directory / "config.json").read_text())
    del text["architectures"]
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    engines = [driver(plain.directory)]
    for prefix, vision in (
        ("language_model.", "vision_tower."),
        ("", "model.vision_tower."),
    ):
        directory = tmp_path / (prefix or "newer")
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(wrapper))
        inner = "language_model.model." if prefix else "model.language_model."
        named = {inner + name.removeprefix("model."): each for name, each in tensors.items()}
        save_file(
            {**named, vision + "extra.weight": torch.zeros(3)}, directory / "model.safetensors"
        )
        engines.append(driver(directory))
    logits = []
    for engine in engines:
        engine.start(0, prompt(30))
        logits.append(engine.logits({0: 30}))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_phi_3_reads_all_names_of_longrope() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for kind in ("longrope", "su", "yarn"):
        found = spec(
            "Phi3ForCausalLM",
            max_position_embeddings=4096,
            original_max_position_embeddings=512,
            rope_scaling={"type": kind, **factors},
        )
        (rope,) = found.distinct_ropes
        assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == (
            "longrope",
            8.0,
            512,
        )
    with pytest.raises(UnsupportedModel, match="short_factor"):
        spec("Phi3ForCausalLM", rope_scaling={"type": "longrope", **factors, "long_factor": [1.0]})


def test_smollm_3_leaves_every_fourth_layer_without_positions() -> None:
    ropes = spec("SmolLM3ForCausalLM").ropes
    assert [rope is None for rope in ropes] == [False, False, False, True, False, False]
    assert ropes[0] is not None
    assert ropes[0].theta == 2e6
    with pytest.raises(UnsupportedModel, match="no_rope_layers"):
        spec("SmolLM3ForCausalLM", no_rope_layers=[1, 0])


def test_layer_types_have_to_be_known_and_complete() -> None:
    for kinds in (["full_attention"] * 5, ["full_attention"] * 5 + ["chunked_attention"]):
        with pytest.raises(UnsupportedModel, match="layer_types"):
            spec("Gemma2ForCausalLM", layer_types=kinds)


def test_multipliers_have_to_be_numbers() -> None:
    with pytest.raises(UnsupportedModel, match="residual_multiplier"):
        spec("GraniteForCausalLM", residual_multiplier="0.2")


def test_norms_over_all_heads_are_not_sharded() -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor-parallel-size.*Olmo2ForCausalLM"):
        TensorSharding(spec("Olmo2ForCausalLM"), 0, 2)


def test_a_fused_tensor_of_another_shape_is_named(checkpoint: SaveModel, tmp_path: Path) -> None:
    model = checkpoint("phi3")
    tensors = load_file(model.directory / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model.directory / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight has shape \[127, 64\] instead of"):
        SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))


GLM45: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_glm_45_has_dense_layers_first_and_one_mlp_beside_its_experts() -> None:
    found = spec("Glm4MoeForCausalLM", **GLM45, n_shared_experts=2, first_k_dense_replace=3)
    assert found.moe is not None
    assert found.moe.layers == (False,) * 3 + (True,) * 3
    assert (found.moe.scoring, found.moe.shared_size) == ("sigmoid", 32)
    assert found.qk_norm == "none"
    assert spec("Glm4MoeForCausalLM", **GLM45, use_qk_norm=True).qk_norm == "head"
    assert [rope.share for rope in found.distinct_ropes] == [0.5]
    for wrong in ({"n_group": 3}, {"n_group": 2, "topk_group": 3}):
        with pytest.raises(UnsupportedModel, match="n_group"):
            spec("Glm4MoeForCausalLM", **GLM45, **wrong)


def test_draft_layers_are_not_loaded(checkpoint: SaveModel, tmp_path: Path) -> None:
    directory = checkpoint("glm4-moe").directory
    tensors = load_file(directory / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))
    behind = {"model.layers.30.eh_proj.weight": torch.zeros(64, 128)}
    save_file({**tensors, **behind}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.30"):
        SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))


DEEPSEEK: dict[str, Any] = {**LATENT, **GLM45, "n_shared_experts": 2, "num_key_value_heads": 8}
YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("architecture", "wrong", "message"),
    [
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "n_group 3"),
        ("DeepseekV3ForCausalLM", {"n_group": 4, "topk_group": 5}, "topk_group 5"),
        (
            "DeepseekV3ForCausalLM",
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "with 3 per token",
        ),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True, "q_lora_rank": None}, "q_lora_rank"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_deepseek_settings_are_refused_by_name(
    architecture: str, wrong: dict[str, Any], message: str
) -> None:
    groups = {"n_group": 1, "topk_group": 1}
    with pytest.raises(UnsupportedModel, match=message):
        spec(architecture, **{**DEEPSEEK, **groups, **wrong})


def test_adapters_of_latent_attention_are_refused_at_the_start(
    checkpoint: SaveModel, driver: LoadDriver
) -> None:
    with pytest.raises(UnsupportedModel, match=r"--enable-lora: DeepseekV3ForCausalLM"):
        driver(checkpoint("deepseek3").directory, adapters=AdapterCapacity(1, 8))


def _raises(config: Config) -> ModelSpec:
    raise KeyError("rotations")


BROKEN = Family(
    architectures=("BrokenLM",),
    spec=_raises,
    weights=llama_weights,
    reads_as="LlamaForCausalLM",
)
UNREAD = Family(architectures=("UnreadLM",), spec=llama_spec, weights=llama_weights, reads_as="Lm")


def test_a_plugin_that_fails_on_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, unread = f"{__name__}:BROKEN", f"{__name__}:UNREAD"
    offer(tmp_path, "swell.model_families", BrokenLM=broken, UnreadLM=unread)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadPlugin, match=r"BrokenLM: .*spec.* failed: KeyError: 'rotations'"):
        parse_spec({**BASE, "architectures": ["BrokenLM"]}, {})
    with pytest.raises(BadPlugin, match=r"UnreadLM: .*reads_as: 'Lm'"):
        family_of("UnreadLM")
