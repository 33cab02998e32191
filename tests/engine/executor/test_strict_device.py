"""Models on a simulated device, sharded in all ways: `strict_device`."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.executor.in_process import InProcessExecutor
from engine.shared.config import BUNDLED_MODEL
from tests.engine.executor.many_kinds import requests, serve
from tests.engine.executor.test_sharded_experts import (
    BALANCE,
    FEW_BLOCKS,
    assert_together,
    settings,
)
from tests.engine.fixtures import SaveModel
from tests.engine.processes import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World("tests.engine.executor.expert_member", "device")
    yield made
    made.end()


@pytest.mark.parametrize(
    ("name", "layout", "balance", "scheduling"),
    [
        ("llama-deep", (1, 2, 2), None, {"async_scheduling": True}),
        ("gpt-oss-mxfp4", (2, 2, 1), BALANCE, {}),
        ("", (2, 1, 1), None, {"speculative_ngram": 3}),  # the bundled model, with grammars
    ],
)
def test_a_divided_model_that_has_slept_gives_the_tokens_of_one_process(
    world: World,
    checkpoint: SaveModel,
    name: str,
    layout: tuple[int, int, int],
    balance: tuple[int, int] | None,
    scheduling: dict[str, Any],
) -> None:
    engines, shards, stages = layout
    directory = checkpoint(name).directory if name else BUNDLED_MODEL
    config = settings(directory, num_blocks=60)
    alone = InProcessExecutor(config)
    made = requests(alone.info.vocab_size, grammars=alone.grammars is not None)
    expected: tuple[dict[int, Any], ...] = serve(alone, config, made)[0]
    alone.shutdown()

    members = world.take(engines)
    for rank, member in enumerate(members):
        # Without a number of blocks the memory is tried.
        num_blocks = None if scheduling else FEW_BLOCKS
        member.tell("load", str(directory), rank, engines, shards, num_blocks, balance, stages)
    for member in members:
        member.result()
    if engines > 1:
        world.join(members)
    world.all(members, "sleep_and_wake")
    for rank, member in enumerate(members):
        member.tell("serve", rank, scheduling, engines)
    results = [member.result() for member in members]
    assert_together(results, expected)
    if balance is not None:
        assert all(moved > 0 for _, moved in world.all(members, "balance"))
    for member in members:
        assert member.ask("on_device")
