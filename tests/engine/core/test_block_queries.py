"""Front ends that query an engine's KV blocks get a reply if the blocks have changed."""

from engine.core.engine_core import EngineCore
from engine.core.events import FrontEndLeft
from engine.shared.block_names import SHORT_NAME
from engine.shared.messages import ALL_BLOCKS, KvBlocks, KvBlocksQuery, UtilityCall
from tests.engine.core.conftest import request, run


def received(core: EngineCore) -> list[tuple[int, KvBlocks]]:
    return [each for step in run(core) for each in step.blocks]


def ask(core: EngineCore, front_end: int, after: int) -> list[tuple[int, KvBlocks]]:
    core.handle(KvBlocksQuery(front_end, after))
    return received(core)


def test_a_query_for_all_blocks_is_answered_immediately_and_later_ones_when_blocks_are_stored(
    core: EngineCore,
) -> None:
    assert core.setup.reports_blocks
    assert ask(core, 1, ALL_BLOCKS) == [(1, KvBlocks(2, 77, ALL_BLOCKS, 0, b"", b""))]
    assert ask(core, 1, 0) == []
    assert not core.has_work, "an open query keeps no engine awake"
    core.handle(request(1, length=9))
    [(front_end, blocks)] = received(core)
    assert (front_end, blocks.after, blocks.number) == (1, 0, 2)
    assert len(blocks.stored) == 2 * SHORT_NAME


def test_query_is_answered_once_regardless_of_later_steps(core: EngineCore) -> None:
    ask(core, 0, ALL_BLOCKS)
    ask(core, 0, 0)
    for id_ in range(3):
        core.handle(request(id_, length=9 + id_))
    assert len(received(core)) == 1


def test_a_reset_is_reported_without_a_step(core: EngineCore) -> None:
    core.handle(request(1, length=9))
    run(core)
    [(_, known)] = ask(core, 0, ALL_BLOCKS)
    assert ask(core, 0, known.number) == []
    core.handle(UtilityCall(1, 0, "reset_prefix_cache"))
    [(_, blocks)] = received(core)
    assert (blocks.after, blocks.stored) == (ALL_BLOCKS, b"")


def test_front_ends_that_left_or_are_unknown_get_no_answer(core: EngineCore) -> None:
    assert ask(core, 7, ALL_BLOCKS) == []
    [(_, known)] = ask(core, 0, ALL_BLOCKS)
    assert ask(core, 0, known.number) == []
    core.handle(FrontEndLeft(0))
    core.front_end_joined(0, 200)
    core.handle(request(1, front_end=1, length=9))
    assert received(core) == []
