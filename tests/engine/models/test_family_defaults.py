"""Missing config.json keys have transformers' defaults, and no key is ignored."""

import logging
from copy import deepcopy
from typing import Any

import pytest

from engine.models.families.registry import FAMILIES
from engine.models.hf_config import parse_spec
from engine.models.spec import ModelSpec, UnsupportedModel
from scripts.write_family_defaults import TARGET, configuration_class, render
from tests.engine.models.test_families import BASE

ARCHITECTURES = [name for name in FAMILIES if not name.endswith("ForConditionalGeneration")]
_SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    # Groups that divide the number of experts.
    "DeepseekV3ForCausalLM": {"n_routed_experts": 16},
}
_NOT_DEFAULTS = {"num_hidden_layers", "eos_token_id"}
"""Other keys depend on the first; the second is not the network's."""
_PUBLISHED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "pretraining_tp": 1, "mlp_bias": False, "torch_dtype": "bfloat16", "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_type": "llama3",
        },
    },
    "Qwen2ForCausalLM": {
        "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
        "use_mrope": False, "rope_theta": 1e6,
    },
    "Qwen3MoeForCausalLM": {
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48,
        "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
    },
    "Gemma2ForCausalLM": {
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid", "sliding_window_size": 4096,
    },
    "Gemma3ForCausalLM": {
        "_sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "rope_theta": 1e6,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "rope_scaling": None,
    },
    "Phi3ForCausalLM": {
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "attention_bias": False,
        "sliding_window": 262144, "partial_rotary_factor": 1.0,
    },
    "SmolLM3ForCausalLM": {
        "max_window_layers": 28, "no_rope_layers": [1, 1, 1, 0, 1, 1], "pretraining_tp": 2,
        "no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None,
    },
    "CohereForCausalLM": {"model_max_length": 131072, "pretraining_tp": 1, "rope_theta": 8e6},
    "Cohere2ForCausalLM": {
        "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0,
        "position_embedding_type": "rope_gptj", "sliding_window_pattern": 4,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "use_qk_norm": False, "cache_implementation": "hybrid",
    },
    "GptOssForCausalLM": {
        "experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0,
        "output_router_logits": False,
    },
    "DeepseekV3ForCausalLM": {
        "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "seq_aux": True, "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
        "pretraining_tp": 1, "auto_map": {"AutoConfig": "configuration_deepseek.Config"},
    },
    "Ernie4_5_MoeForCausalLM": {
        "compression_ratio": 1.0, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
        "moe_use_aux_free": True, "num_nextn_predict_layers": 1, "moe_norm_min": 1e-12,
    },
    "MiniMaxM2ForCausalLM": {
        "attn_type_list": [1] * 6, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
        "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1, "rotary_dim": 64,
        "use_qk_norm": True, "use_routing_bias": True, "shared_intermediate_size": 0,
    },
}  # fmt: skip
"""Keys of published files, as older versions of transformers and other programs wrote them."""
_STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def spec(architecture: str, config: dict[str, Any]) -> ModelSpec:
    return parse_spec({**config, "architectures": [architecture]}, {})


def completed(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with all defaults of its class."""
    # The classes modify their arguments.
    made: dict[str, Any] = configuration_class(architecture)(**deepcopy(config)).to_dict()
    return {**made, "dtype": None}


def whole(architecture: str) -> dict[str, Any]:
    """Return a config without defaults for sizes."""
    return completed(architecture, {**BASE, **_SIZES.get(architecture, {})})


def test_defaults_table_equals_transformers() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), (
        "run python -m scripts.write_family_defaults"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_absent_key_has_default_of_its_class(architecture: str) -> None:
    given = whole(architecture)
    assert len(given) > 20
    for key in given.keys() - _NOT_DEFAULTS:
        if key == "num_experts_per_tok" and architecture == "DeepseekV2ForCausalLM":
            continue  # its class has no number for it
        left = {name: value for name, value in given.items() if name != key}
        expected = completed(architecture, left)
        assert spec(architecture, left) == spec(architecture, expected), key


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "old",
    [
        {},
        {"rope_theta": 777.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 777.0, "rope_scaling": _STRETCHED, "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["nothing", "base", "scaling", "two original lengths", "parameters without base"],
)
def test_rotary_defaults_are_those_of_their_class(architecture: str, old: dict[str, Any]) -> None:
    if architecture == "Phi3ForCausalLM" and old.keys() & {"rope_scaling", "rope_parameters"}:
        return  # Its class knows longrope alone.
    given = {key: each for key, each in whole(architecture).items() if key != "rope_parameters"}
    given |= old
    if architecture in ("Gemma3ForCausalLM", "Olmo3ForCausalLM") and "rope_parameters" in old:
        with pytest.raises(UnsupportedModel, match="must name full_attention"):
            spec(architecture, given)
        return
    expected = completed(architecture, given)
    assert spec(architecture, given).ropes == spec(architecture, expected).ropes


def test_unread_keys_of_class_must_have_default_values() -> None:
    given = whole("Ernie4_5_MoeForCausalLM")
    with pytest.raises(UnsupportedModel, match=r"moe_norm_min 0.5 is not supported .* only 1e-12"):
        spec("Ernie4_5_MoeForCausalLM", {**given, "moe_norm_min": 0.5})


def test_layer_types_that_a_class_does_not_read_are_refused() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    with pytest.raises(UnsupportedModel, match=r"layer_types: MistralForCausalLM has sliding_win"):
        spec("MistralForCausalLM", {**BASE, "sliding_window": 20, "layer_types": kinds})
    every = {"sliding_window": 20, "layer_types": ["sliding_attention"] * 6}
    assert spec("MistralForCausalLM", {**BASE, **every}).windows == (20,) * 6
    none = {"sliding_window": None, "layer_types": kinds}
    assert spec("MistralForCausalLM", {**BASE, **none}).windows == (None,) * 6


def test_unread_keys_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {**BASE, "use_cache": True, "hyper_gate": 3, "a_second": None}
    with caplog.at_level(logging.WARNING):
        spec("Qwen3ForCausalLM", given)
        spec("Qwen3ForCausalLM", given)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "not read for Qwen3ForCausalLM: a_second, hyper_gate;" in message


@pytest.mark.parametrize("architecture", _PUBLISHED)
def test_published_files_have_no_unread_keys(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {key: each for key, each in whole(architecture).items() if key != "rope_parameters"}
    caplog.clear()  # of what transformers says
    with caplog.at_level(logging.WARNING):
        spec(architecture, {**given, **_PUBLISHED[architecture]})
    assert not caplog.records


def test_disabled_windows_are_not_unread_keys(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("Qwen2", "Qwen3", "Qwen3Moe"):
        off = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 70}
        assert spec(f"{name}ForCausalLM", {**BASE, **off}).windows == (None,) * 6
    assert not caplog.records
