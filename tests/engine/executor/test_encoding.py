"""The executor of encoders: overlapping steps, sleep and profiles."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.batch.batch import BatchPlan, SlotStart
from engine.batch.executor import CannotDo
from engine.executor.encoding import EncoderExecutor
from engine.shared.config import EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from engine.shared.messages import SamplingParams
from engine.shared.pooling import read_pooling
from tests.engine.pooling import prompts, save_pooling_model, vectors_of

PLAN = BatchPlan(
    step=1,
    starting=[SlotStart(0, [5, 6, 7], 3, SamplingParams(max_tokens=1, seed=0))],
    blocks=[],
    slots=[0],
    starts=[0],
    counts=[3],
    samples=[True],
)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    save_pooling_model("Bert", tmp_path)
    return tmp_path


@pytest.fixture
def executor(bert: Path) -> Iterator[Any]:
    config = EngineConfig(
        model=ModelConfig(model=str(bert)),
        executor=ExecutorConfig(threads=1),
        scheduler=SchedulerConfig(async_scheduling=True),
    )
    pooling = read_pooling(bert, config.model)
    assert pooling is not None
    executor = EncoderExecutor(config, pooling)
    yield executor
    executor.shutdown()


def test_overlapped_steps_make_the_same_vectors(bert: Path) -> None:
    token_ids = prompts(20)
    apart = vectors_of(bert, token_ids, batch_invariant=True)
    overlapped = vectors_of(bert, token_ids, batch_invariant=True, async_scheduling=True)
    assert [each.tobytes() for each in overlapped] == [each.tobytes() for each in apart]


def test_encoder_has_same_weights_after_sleep(executor: Any, bert: Path) -> None:
    before = executor.submit(PLAN).result().pooled
    for level in (1, 2):
        executor.sleep(level)
        executor.wake_up()
        assert executor.submit(PLAN).result().pooled == before
    executor.sleep(2)
    with pytest.raises(RuntimeError, match="sleeps"):
        executor.submit(PLAN)
    (bert / "config.json").write_text((bert / "config.json").read_text() + " ")
    with pytest.raises(CannotDo, match="weights have changed"):
        executor.wake_up()


def test_an_empty_step_computes_nothing(executor: Any) -> None:
    nothing = replace(PLAN, starting=[], slots=[], starts=[], counts=[], samples=[])
    assert executor.submit(nothing).result().pooled == {}


def test_steps_are_profiled(executor: Any, tmp_path: Path) -> None:
    with pytest.raises(CannotDo, match="no profile"):
        executor.stop_profile(tmp_path / "trace.json")
    executor.start_profile()
    with pytest.raises(CannotDo, match="already"):
        executor.start_profile()
    executor.submit(PLAN).result()
    executor.stop_profile(tmp_path / "trace.json")
    assert "linear" in (tmp_path / "trace.json").read_text()
