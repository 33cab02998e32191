"""Draft models and heads of a model sharded over several processes change no token."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.executor.in_process import InProcessExecutor
from engine.executor.rules import BadDraftModel
from engine.executor.team import Team
from engine.shared.config import (
    EngineConfig,
)
from engine.shared.messages import AddRequest
from tests.engine.configs import config_of
from tests.engine.draft_heads import save_eagle3, save_mtp
from tests.engine.executor.many_kinds import requests, serve
from tests.engine.fixtures import SaveModel


@pytest.fixture(scope="module")
def drafting(checkpoint: SaveModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return, by the kind of drafts, a model's directory and the settings that draft for it."""
    deep, heads = checkpoint("llama-deep"), tmp_path_factory.mktemp("heads")
    (heads / "mtp").mkdir()
    (heads / "eagle").mkdir()
    save_mtp("glm4-moe-normed", heads / "mtp", normed=True, own_head=False)
    save_eagle3(deep, heads / "eagle", layer_ids=[1, 2, 3])
    other = shutil.copytree(checkpoint("qwen2").directory, heads / "other")
    return {
        "itself": (deep.directory, {"speculative_model": str(deep.directory)}),
        "another": (deep.directory, {"speculative_model": str(other)}),
        "eagle": (deep.directory, {"speculative_model": str(heads / "eagle")}),
        "mtp": (heads / "mtp", {"speculative_method": "mtp"}),
    }


def settings(
    directory: Path, scheduling: dict[str, Any], parallel: dict[str, Any], blocks: int = 30
) -> EngineConfig:
    step = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "speculative_row_price": 0}
    return config_of(
        directory,
        model={"max_model_len": 160},
        cache={"num_kv_blocks": blocks},
        scheduler=step | scheduling,
        parallel=parallel,
    )


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("another", {"pipeline_parallel_size": 2}),
        ("itself", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("eagle", {"tensor_parallel_size": 2}),
        ("mtp", {"enable_expert_parallel": True, "tensor_parallel_size": 2}),
    ],
)
def test_drafts_of_a_model_in_several_processes_change_no_token(
    kind: str, parallel: dict[str, Any], drafting: Any
) -> None:
    directory, scheduling = drafting[kind]
    plain = settings(directory, {}, {})
    alone = InProcessExecutor(plain)
    # Bias makes some drafts of random models right.
    made = [biased(each) for each in requests(256, longest=20)]
    expected, _ = serve(alone, plain, made)
    alone.shutdown()

    config = settings(directory, scheduling, parallel)
    executor = InProcessExecutor(config, team=Team(config, 0, 1))
    try:
        served, counters = serve(executor, config, made)
        for level in (1, 2):
            executor.sleep(level)
            executor.wake_up()
        awake, after = serve(executor, config, made)
    finally:
        executor.shutdown()
    assert served == awake == expected
    assert 0 < counters.spec_accepted_tokens <= counters.spec_draft_tokens
    assert after.spec_accepted_tokens == counters.spec_accepted_tokens
    assert counters.preemptions > 0
    assert counters.prefix_cache_hits > 0


def biased(each: AddRequest) -> AddRequest:
    return replace(each, sampling=replace(each.sampling, logit_bias={70: 8.0, 71: 8.0}))


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_head_is_refused_where_states_of_earlier_layers_are_elsewhere(
    kind: str, drafting: Any
) -> None:
    directory, scheduling = drafting[kind]
    config = settings(directory, scheduling, {"pipeline_parallel_size": 2})
    team = Team(config, 0, 1)
    with pytest.raises(BadDraftModel, match="leave --pipeline-parallel-size at 1"):
        InProcessExecutor(config, team=team)
