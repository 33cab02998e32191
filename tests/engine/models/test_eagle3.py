"""EAGLE-3 heads incompatible with a model or settings are rejected with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.executor.in_process import InProcessExecutor
from engine.executor.rules import BadDraftModel
from engine.models.formats.files import CheckpointError
from engine.models.heads.eagle3 import Eagle3Spec
from engine.models.hf_config import parse_spec
from engine.models.spec import ModelSpec, UnsupportedModel
from tests.engine.configs import config_of
from tests.engine.draft_heads import save_eagle3
from tests.engine.fixtures import SaveModel
from tests.engine.tiny_models import Checkpoint

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(checkpoint: SaveModel) -> Checkpoint:
    return checkpoint("llama-deep")


@pytest.fixture
def start(target: Checkpoint, tmp_path: Path) -> Callable[..., None]:
    """Starts an executor with the head that is in `tmp_path`."""
    save_eagle3(target, tmp_path, layer_ids=[1, 2, 3], draft_tokens=[4, 9, 200])

    def begin(**model: Any) -> None:
        drafting = {"speculative_model": str(tmp_path)}
        config = config_of(target.directory, model=model, scheduler=drafting)
        InProcessExecutor(config).shutdown()

    return begin


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def store(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 300}, "vocabulary of 300 tokens, .* has one of 256"),
        ({"target_hidden_size": 128}, "states of 128 values, .* have 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is not supported"),
        ({"parallel_drafting": True}, "parallel_drafting is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"eagle_config": {LAYER_IDS: [1, 3, 4]}}, "does not match a model of 5 layers"),
        ({"eagle_config": {LAYER_IDS: [2, 4]}}, "does not match a model of 5 layers"),
        ({"eagle_config": {LAYER_IDS: "all"}}, "does not match a model of 5 layers"),
        ({"eagle_config": None}, r"5 layers: \[2, 2, 2\]"),
    ],
    ids=str,
)
def test_unsupported_head_configs_are_refused(
    start: Callable[..., None], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    rewrite(tmp_path, lambda content: content.update(changes))
    with pytest.raises(UnsupportedModel, match=reason):
        start()


def test_tapped_layers_are_the_same_in_all_config_formats() -> None:
    target = spec_of(36)
    config = config_of_head()
    assert Eagle3Spec(config, target).tapped == (2, 18, 33)
    assert Eagle3Spec({**config, LAYER_IDS: [2, 18, 33]}, target).tapped == (2, 18, 33)
    named = {**config, "eagle_config": {LAYER_IDS: [1, 17, 32]}}
    assert Eagle3Spec(named, target).tapped == (2, 18, 33)


def config_of_head() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "vocab_size": 256,
        "hidden_act": "silu",
    }


def spec_of(layers: int) -> ModelSpec:
    config = {**config_of_head(), "architectures": ["LlamaForCausalLM"]}
    return parse_spec({**config, "num_hidden_layers": layers}, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "missing fc.weight"),
        (lambda tensors: tensors.pop("d2t"), "missing d2t"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "unexpected extra"),
        (lambda tensors: tensors["d2t"].add_(100), "has tokens outside of 256"),
        (lambda tensors: tensors["d2t"].copy_(torch.tensor([4, 3, 9])), "has a token twice"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 64)}),
            r"lm_head.weight has shape \[7, 64\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    start: Callable[..., None], tmp_path: Path, change: Any, reason: str
) -> None:
    store(tmp_path, change)
    with pytest.raises(CheckpointError, match=reason):
        start()


def test_head_without_supported_files_is_refused(
    start: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"lacks model.safetensors"):
        start()


@pytest.mark.parametrize(
    "described",
    [
        {"architectures": ["EagleLlamaForCausalLM"]},
        {"architectures": ["MedusaModel"]},
        {"architectures": ["Other"], "speculators_model_type": "dflash"},
    ],
    ids=str,
)
def test_other_kinds_of_heads_are_named(
    start: Callable[..., None], tmp_path: Path, described: dict[str, Any]
) -> None:
    rewrite(tmp_path, lambda content: content.update(described))
    with pytest.raises(BadDraftModel, match="of draft heads EAGLE-3 is"):
        start()


@pytest.mark.parametrize(
    ("model", "flag"),
    [({"load_format": "dummy"}, "--load-format"), ({"model_impl": "transformers"}, "--model-impl")],
    ids=str,
)
def test_incompatible_settings_are_named(
    start: Callable[..., None], model: dict[str, Any], flag: str
) -> None:
    with pytest.raises(BadDraftModel, match=f"--speculative-model .*{flag}"):
        start(**model)
