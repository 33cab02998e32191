"""Engines with several processes each that shard the experts of a model, over gloo."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from engine.batch.executor import GroupExecutor
from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team
from engine.models.hf_config import read_spec
from engine.models.parallel.tensors import TensorSharding
from engine.models.spec import UnsupportedModel
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
)
from tests.engine.configs import config_of
from tests.engine.draft_heads import save_mtp
from tests.engine.executor.many_kinds import requests, serve
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.processes import Process, World

FEW_BLOCKS = 22
"""Too few for all requests of an engine, so that some are preempted."""
BALANCE = (2, 4)
"""Number of redundant experts, and the interval of load checks in steps."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World("tests.engine.executor.expert_member")
    yield made
    made.end()


def engines(world: World, directory: Path, size: int, shards: int, **more: Any) -> list[Process]:
    """Return a group of engines with loaded shards."""
    members = world.take(size)
    for rank, member in enumerate(members):
        member.tell("load", str(directory), rank, size, shards, *more.values())
    for member in members:
        member.result()
    world.join(members)
    return members


def settings(directory: Path, num_blocks: int, **parallel: Any) -> EngineConfig:
    return config_of(
        directory,
        model={"max_model_len": 160},
        cache={"num_kv_blocks": num_blocks},
        scheduler={"max_num_batched_tokens": 40},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    ("name", "scheduling", "balance"),
    [
        ("gpt-oss-mxfp4", {}, BALANCE),  # experts with biases
        # latent attention, experts in groups
        ("deepseek3", {"async_scheduling": True}, BALANCE),
        ("", {"speculative_ngram": 3}, BALANCE),  # the bundled model, with grammars
        # an MLP beside the experts, and dense layers
        ("mtp", {"speculative_method": "mtp", "speculative_row_price": 0.0}, None),
    ],
)
def test_two_engines_of_two_processes_give_the_tokens_of_one_process(
    world: World,
    checkpoint: SaveModel,
    name: str,
    scheduling: dict[str, Any],
    balance: tuple[int, int] | None,
    tmp_path: Path,
) -> None:
    if name == "mtp":
        directory = save_mtp("glm4-moe-normed", tmp_path, normed=True, own_head=False).directory
    else:
        directory = checkpoint(name).directory if name else BUNDLED_MODEL
    config = settings(directory, num_blocks=60)
    alone = InProcessExecutor(config)
    made = requests(alone.info.vocab_size, grammars=alone.grammars is not None)
    expected: tuple[dict[int, Any], ...] = serve(alone, config, made)[0]
    alone.shutdown()

    loading = {
        "stages": 1,
        "overlap": "async_scheduling" in scheduling,
        "method": scheduling.get("speculative_method", "auto"),
    }
    members = engines(world, directory, 2, 2, num_blocks=FEW_BLOCKS, balance=balance, **loading)
    for rank, member in enumerate(members):
        member.tell("serve", rank, scheduling)
    results = [member.result() for member in members]
    assert_together(results, expected)
    preemptions, hits, accepted = (sum(each) for each in list(zip(*results, strict=True))[3:])
    if balance is not None:
        known = [member.ask("balance") for member in members]
        assert known[0] == known[1]
        assert known[0][1] > 0, "experts have moved"
    assert preemptions > 0 or name == "gpt-oss-mxfp4", "only this one frees blocks before its end"
    assert hits > 0
    assert (accepted > 0) == any(each.startswith("speculative") for each in scheduling)


def assert_together(results: list[Any], expected: tuple[dict[int, Any], ...]) -> None:
    """Check that the combined results of a group equal those of one engine."""
    for which, whole in enumerate(expected):
        parts: dict[int, Any] = {}
        for result in results:
            parts.update(result[which])
        assert parts == {id: plain(value) for id, value in whole.items()}


def plain(value: Any) -> Any:
    """Return the value after a round trip through JSON."""
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_one_engine_of_two_processes_has_the_experts_in_both(checkpoint: SaveModel) -> None:
    directory = checkpoint("mixtral").directory
    plain = settings(directory, FEW_BLOCKS)
    alone = InProcessExecutor(plain)
    expected = serve(alone, plain, requests(256))[0]
    alone.shutdown()
    config = settings(directory, FEW_BLOCKS, tensor_parallel_size=2, enable_expert_parallel=True)
    executor = InProcessExecutor(config, team=Team(config, 0, 1))
    assert isinstance(executor, GroupExecutor)
    for overlaps in (False, True):
        scheduler = replace(config.scheduler, async_scheduling=overlaps)
        assert serve(executor, replace(config, scheduler=scheduler), requests(256))[0] == expected
        executor.sleep(2)
        executor.wake_up()
    executor.shutdown()


@pytest.mark.parametrize("victim", ["the engine", "its worker"])
def test_dead_process_ends_its_engine_and_others_regroup_without_token_changes(
    world: World, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, victim: str
) -> None:
    model = checkpoint("qwen3-moe-many")
    members = engines(world, model.directory, 3, 2)
    shares = [member.ask("shares")[0] for member in members]
    assert [share[0] for share in shares] == [0, 5, 10], "the leaders' experts"
    for rank, member in enumerate(members):
        member.ask("start", 1, prompt(10 + rank))
    world.all(members, "steps", 5, 1)

    # One process dies during a step: the other engines complete it in a smaller group.
    staying, dying = members[:2], members[2]
    workers = [psutil.Process(pid) for member in members for pid in member.ask("workers")]
    for member in staying:
        member.tell("steps", 1, 1)
    if victim == "the engine":
        world.kill(dying)
        assert not psutil.wait_procs(workers[2:], timeout=60)[1]
    else:
        os.kill(workers[2].pid, signal.SIGKILL)
        dying.tell("steps", 1, 1)
        assert dying.answer() == {"failed": "worker 1 has died"}
        world.kill(dying)
    for member in staying:
        assert "lost the group" in member.answer()["broken"]
    assert all(worker.is_running() for worker in workers[:2])
    for rank, member in enumerate(staying):
        member.tell("prepare", rank, 2)
    assert [member.result()[0][0] for member in staying] == [0, 8]
    world.join(staying)
    world.all(staying, "retry")
    world.all(staying, "steps", 5, 1)
    alone = driver(model.directory)
    for rank, member in enumerate(staying):
        alone.start(1, prompt(10 + rank))
        alone.prefill(1)
        alone.decode(10, 1)
        assert member.ask("tokens", 1) == alone.tokens[1]

    # A replacement joins, and the engines sleep before they step together.
    members = world.take(3)
    members[2].ask("load", str(model.directory), 2, 3, 2)
    for rank, member in enumerate(staying):
        member.tell("prepare", rank, 3)
    for member in staying:
        member.result()
    world.join(members)
    world.all(members, "sleep_and_wake")
    for rank, member in enumerate(members):
        member.ask("start", 1, prompt(20 + rank))
    world.all(members, "steps", 5, 1)
    for rank in range(3):
        alone.start(1, prompt(20 + rank))
        alone.prefill(1)
        alone.decode(4, 1)
        assert members[rank].ask("tokens", 1) == alone.tokens[1]


def test_experts_are_unsharded_in_sharded_layers(checkpoint: SaveModel) -> None:
    spec = read_spec(checkpoint("gpt-oss-mxfp4").directory)
    assert spec.moe is not None
    with pytest.raises(UnsupportedModel, match="more than the experts of this model"):
        TensorSharding(spec, 1, 4)
    whole, cut = TensorSharding(spec, 1, 4, whole_experts=True), TensorSharding(spec, 1, 2)
    assert whole.spec.num_heads == spec.num_heads // 4
    assert whole.spec.moe == spec.moe
    assert whole.is_unsharded("model.layers.0.mlp.experts.1.down_proj.weight")
    assert not whole.is_unsharded("model.layers.0.mlp.shared_experts.down_proj.weight")
    assert not cut.is_unsharded("model.layers.0.mlp.experts.1.down_proj.weight")
