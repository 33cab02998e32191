"""Incompatible draft models and settings are rejected with a hint on what to change."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from engine.executor.rules import BadDraftModel, check_draft_model, check_draft_settings
from engine.models.hf_config import read_spec
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)

SERVED = ModelConfig(model=str(BUNDLED_MODEL))
DRAFTING = SchedulerConfig(speculative_model="draft")


@pytest.mark.parametrize("scheduling", [DRAFTING, SchedulerConfig(speculative_method="mtp")])
def test_executor_without_model_is_refused_by_name(scheduling: SchedulerConfig) -> None:
    simulated = ExecutorConfig(executor="simulated")
    with pytest.raises(BadDraftModel, match=r"--speculative-m.*--executor"):
        check_draft_settings(EngineConfig(scheduler=scheduling, executor=simulated))
    check_draft_settings(EngineConfig(executor=simulated))


def test_two_draft_sources_are_refused() -> None:
    places = {"speculative_ngram": 2, "speculative_model": "draft", "speculative_method": "mtp"}
    for two in itertools.combinations(places.items(), 2):
        with pytest.raises(ValueError, match="give one of them"):
            SchedulerConfig(**dict(two))  # type: ignore[arg-type]


def test_several_engines_can_each_have_a_draft_model() -> None:
    parallel = ParallelConfig(data_parallel_size=4)
    check_draft_settings(EngineConfig(scheduler=DRAFTING, parallel=parallel))


@pytest.fixture
def draft(tmp_path: Path) -> ModelConfig:
    """A model directory without weights that tests change."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((BUNDLED_MODEL / name).read_bytes())
    return ModelConfig(model=str(tmp_path))


def check(draft: ModelConfig, max_model_len: int = 512) -> None:
    check_draft_model(draft, SERVED, read_spec(BUNDLED_MODEL), max_model_len)


def rewrite(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_same_tokens_are_accepted(draft: ModelConfig) -> None:
    check(draft)
    (Path(draft.model) / "tokenizer.json").unlink()
    check(draft)


def test_another_size_of_vocabulary_is_refused(draft: ModelConfig) -> None:
    rewrite(Path(draft.model) / "config.json", lambda c: c.update(vocab_size=2049))
    with pytest.raises(
        BadDraftModel, match="2049 tokens, the model that is served has one of 2048"
    ):
        check(draft)


def test_other_tokens_are_refused(draft: ModelConfig) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        one, other = (text for text, index in vocabulary.items() if index in (1000, 1001))
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    rewrite(Path(draft.model) / "tokenizer.json", swap)
    with pytest.raises(BadDraftModel, match="token 1000 is"):
        check(draft)


def test_fewer_positions_are_refused(draft: ModelConfig) -> None:
    rewrite(Path(draft.model) / "config.json", lambda c: c.update(max_position_embeddings=256))
    with pytest.raises(BadDraftModel, match="--max-model-len to that or less, which is 512"):
        check(draft)
    check(draft, max_model_len=256)


def test_any_draft_tokens_are_accepted_without_tokenizer(
    draft: ModelConfig, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "config.json").write_bytes((BUNDLED_MODEL / "config.json").read_bytes())
    check_draft_model(draft, ModelConfig(model=str(served)), read_spec(BUNDLED_MODEL), 512)
