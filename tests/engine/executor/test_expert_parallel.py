"""Engines that shard the experts of one model, each in its own process, over gloo."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.batch.executor import CannotDo
from engine.executor.in_process import InProcessExecutor
from engine.models.spec import UnsupportedModel
from engine.shared.config import EngineConfig, ParallelConfig
from tests.engine.configs import config_of
from tests.engine.driver import NUM_BLOCKS, Driver
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.processes import Process, World
from tests.engine.tiny_models import Checkpoint


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World("tests.engine.executor.expert_member")
    yield made
    made.end()


def engines(world: World, model: Checkpoint, size: int, *more: Any) -> list[Process]:
    """Return a group of engines with loaded shards."""
    members = world.take(size)
    for rank, member in enumerate(members):
        member.tell("load", str(model.directory), rank, size, *more)
    for member in members:
        member.result()
    world.join(members)
    return members


def together(members: list[Process], *requests: tuple[Any, ...]) -> None:
    """Run a different command on each engine in the same steps."""
    for member, request in zip(members, requests, strict=True):
        member.tell(*request)
    for member in members:
        member.result()


@pytest.mark.parametrize(
    ("name", "size", "way"),
    [
        ("qwen3-moe-some-dense", 3, "to where they are needed"),
        ("qwen3-moe-many", 4, "as is best"),
        ("granite-moe", 2, "to where they are needed"),
        ("gpt-oss-mxfp4", 2, "as is best"),
        ("glm4-moe-normed", 2, "as is best"),
        ("llama4", 2, "as is best"),
    ],
)
def test_expert_parallel_tokens_equal_those_of_one_engine(
    world: World,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    name: str,
    size: int,
    way: str,
) -> None:
    model = checkpoint(name)
    members = engines(world, model, size)
    world.all(members, "always_send", way == "to where they are needed")
    idle = [("steps", 1)] * (size - 2)
    members[0].ask("start", 0, prompt(90))
    members[0].ask("start", 3, prompt(5))
    together(members, ("steps", 1, 0), ("steps", 1), *idle)
    members[1].ask("start", 2, prompt(33))
    idle = [("steps", 20)] * (size - 2)
    together(members, ("steps", 20, 3, 0), ("steps", 20, 2), *idle)

    alone = driver(model.directory)
    for rank, slot, length in ((0, 0, 90), (0, 3, 5), (1, 2, 33)):
        alone.start(slot, prompt(length))
        alone.prefill(slot)
        alone.decode(19, slot)
        tokens = members[rank].ask("tokens", slot)
        assert tokens[: length + 20] == alone.tokens[slot], (rank, slot)


@pytest.mark.parametrize(
    ("name", "size", "redundant", "way"),
    [
        ("qwen3-moe-many", 3, 4, "to where they are needed"),
        ("glm4-moe-normed", 2, 0, "as is best"),
        ("gpt-oss-mxfp4", 3, 3, "as is best"),
    ],
)
def test_experts_that_move_with_their_load_change_no_token(
    world: World,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    name: str,
    size: int,
    redundant: int,
    way: str,
) -> None:
    model = checkpoint(name)
    balance = (redundant, 3)
    members = engines(world, model, size, 1, NUM_BLOCKS, balance)
    world.all(members, "always_send", way == "to where they are needed")
    shares = world.all(members, "shares")
    members[0].ask("start", 0, prompt(60))
    members[1].ask("start", 1, prompt(7))
    idle = [("steps", 16)] * (size - 2)
    together(members, ("steps", 16, 0), ("steps", 16, 1), *idle)

    known = world.all(members, "balance")
    assert known == [known[0]] * size, "all have measured the same"
    imbalance, moved = known[0]
    assert 1.0 <= imbalance <= size
    assert moved
    after = world.all(members, "shares")
    assert after != shares
    assert [[len(layer) for layer in rank] for rank in after] == [
        [len(layer) for layer in rank] for rank in shares
    ]
    alone = driver(model.directory)
    for rank, length in ((0, 60), (1, 7)):
        alone.start(rank, prompt(length))
        alone.prefill(rank)
        alone.decode(16, rank)
        tokens = members[rank].ask("tokens", rank)
        assert len(tokens) > length + 12
        assert tokens == alone.tokens[rank][: len(tokens)]


def test_moved_experts_outlast_a_sleep_and_a_new_group_starts_over(
    world: World, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("qwen3-moe-many")
    balance = (5, 2)
    members = engines(world, model, 3, 1, NUM_BLOCKS, balance)
    first = world.all(members, "shares")
    for rank, member in enumerate(members):
        member.ask("start", 1, prompt(10 + rank))
    world.all(members, "steps", 10, 1)
    moved = world.all(members, "shares")
    assert moved != first
    members[1].ask("sleep_and_wake")  # the others keep theirs
    assert world.all(members, "shares") == moved
    for rank, member in enumerate(members):
        member.ask("start", 1, prompt(10 + rank))
    world.all(members, "steps", 10, 1)

    staying = members[:2]
    for member in staying:
        member.tell("steps", 1, 1)
    world.kill(members[2])
    for member in staying:
        assert "lost the group" in member.answer()["broken"]
    shares = [member.ask("prepare", rank, 2) for rank, member in enumerate(staying)]
    assert shares == [[list(range(10))] * 3, [[*range(5), *range(10, 16)]] * 3]
    world.join(staying)
    world.all(staying, "retry")
    world.all(staying, "steps", 10, 1)
    assert all(known[1] for known in world.all(staying, "balance"))
    for rank, member in enumerate(staying):
        alone = driver(model.directory)
        alone.start(1, prompt(10 + rank))
        alone.prefill(1)
        alone.decode(20, 1)
        assert member.ask("tokens", 1) == alone.tokens[1]


def test_balancing_is_refused_if_unsupported(checkpoint: SaveModel) -> None:
    for wrong, what in (
        ({"enable_eplb": True}, "--enable-eplb needs --enable-expert-parallel"),
        ({"num_redundant_experts": 1}, "--num-redundant-experts needs --enable-eplb"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True, "data_parallel_size": 1},
            "balances the load of several processes",
        ),
    ):
        with pytest.raises(ValueError, match=what):
            ParallelConfig(**wrong)
    config = settings(
        checkpoint("mixtral").directory,
        enable_expert_parallel=True,
        enable_eplb=True,
        num_redundant_experts=5,
    )
    with pytest.raises(UnsupportedModel, match="is more than 4, with which each of 2 processes"):
        InProcessExecutor(config)
    fewer = replace(config.parallel, num_redundant_experts=1)
    invariant = replace(
        config, parallel=fewer, executor=replace(config.executor, batch_invariant=True)
    )
    with pytest.raises(UnsupportedModel, match=r"--batch-invariant: only engines .* whole model"):
        InProcessExecutor(invariant)


def settings(directory: Path, **parallel: Any) -> EngineConfig:
    return config_of(directory, parallel={"data_parallel_size": 2} | parallel)


def test_model_without_experts_is_loaded_fully_and_joins_no_group(checkpoint: SaveModel) -> None:
    directory = checkpoint("llama").directory
    for flag in (True, False):
        executor = InProcessExecutor(settings(directory, enable_expert_parallel=flag))
        with pytest.raises(CannotDo, match=r"--enable-expert-parallel and a model with experts"):
            executor.prepare_group(0, 2)


def test_single_engine_is_a_group_of_one(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    directory = checkpoint("mixtral").directory
    config = settings(directory, data_parallel_size=1, enable_expert_parallel=True)
    spread, whole = Driver(InProcessExecutor(config)), driver(directory)
    for engine in (spread, whole):
        engine.start(0, prompt(20))
        engine.prefill(0)
        engine.decode(5, 0)
        engine.step({})
    assert spread.tokens == whole.tokens


@pytest.mark.processor  # a copy to a device is several calls of copy_, which are counted here
def test_each_engine_reads_and_keeps_its_share_only(
    checkpoint: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint("qwen3-moe-many").directory
    read = []
    original = torch.Tensor.copy_

    def counted(to: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        read.append(part.numel())
        return original(to, part)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    amounts = []
    for size in (1, 4):
        read.clear()
        InProcessExecutor(settings(directory, data_parallel_size=size, enable_expert_parallel=True))
        amounts.append(sum(read))
    experts = 3 * 16 * 3 * 64 * 48
    assert amounts[0] - amounts[1] == experts * 3 // 4
