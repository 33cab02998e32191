"""Pipeline stages in separate processes generate the same tokens as a single process."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.batch.executor import CannotDo
from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team, WorkerFailed
from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.hf_config import read_spec
from engine.models.loading.decoder import DecoderLoader
from engine.models.parallel.stages import divide_layers
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.process.early_stop import EarlyStop
from engine.process.main import CannotStart, build_executor
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
    ParallelConfig,
)
from engine.shared.lifeline import Lifeline
from engine.shared.messages import AddRequest
from tests.engine.configs import config_of
from tests.engine.driver import Driver
from tests.engine.executor.many_kinds import Served, requests, serve
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.support.waiting import PATIENCE

NUM_BLOCKS = 30
"""Too few for all slots, so that some sequences are preempted."""


def settings(
    directory: Path,
    *,
    stages: int = 1,
    shards: int = 1,
    partition: str | None = None,
    batch_invariant: bool = False,
    num_blocks: int = NUM_BLOCKS,
    **scheduler: Any,
) -> EngineConfig:
    return config_of(
        directory,
        model={"max_model_len": 160},
        cache={"num_kv_blocks": num_blocks},
        scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 40} | scheduler,
        executor={"batch_invariant": batch_invariant},
        parallel={
            "tensor_parallel_size": shards,
            "pipeline_parallel_size": stages,
            "pipeline_layer_partition": partition,
        },
    )


class Stages:
    """An executor of several processes."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.failures: list[str] = []
        self.team = Team(config, 0, 1, on_failure=self.failures.append)
        self.executor = InProcessExecutor(config, team=self.team)


StartStages: TypeAlias = Callable[..., Stages]
AddWords: TypeAlias = Callable[[Path], Path]
ServeAlone: TypeAlias = Callable[..., Served]


@pytest.fixture(scope="module")
def stages() -> Iterator[StartStages]:
    """Return a function that starts processes once per set of arguments, for all tests."""
    running: dict[tuple[Any, ...], Stages] = {}

    def start(directory: Path, **arguments: Any) -> Stages:
        key = str(directory), *arguments.items()
        if key not in running:
            running[key] = Stages(settings(directory, **arguments))
        return running[key]

    yield start
    for each in running.values():
        pids = each.team.pids
        each.executor.shutdown()
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def alone() -> ServeAlone:
    """Return a function that serves requests with one process."""

    def serve_alone(directory: Path, made: list[AddRequest], **arguments: Any) -> Served:
        config = settings(directory, **arguments)
        executor = InProcessExecutor(config)
        try:
            return serve(executor, config, made)[0]
        finally:
            executor.shutdown()

    return serve_alone


@pytest.fixture(scope="module")
def with_words(tmp_path_factory: pytest.TempPathFactory) -> AddWords:
    """Return a function that copies a tiny model and adds a byte tokenizer, for grammars."""
    made: dict[Path, Path] = {}

    def copy(directory: Path) -> Path:
        if directory not in made:
            made[directory] = shutil.copytree(directory, tmp_path_factory.mktemp("words") / "model")
            bytes_ = sorted(ByteLevel.alphabet())
            tokenizer = Tokenizer(BPE({byte: i for i, byte in enumerate(bytes_)}, []))
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.save(str(made[directory] / "tokenizer.json"))
        return made[directory]

    return copy


def test_steps_in_flight_with_grammars_and_drafts_change_no_token(
    stages: StartStages, alone: ServeAlone
) -> None:
    pipeline = stages(BUNDLED_MODEL, stages=2, partition="2,4", batch_invariant=True)
    made = requests(2048, grammars=True)
    expected = alone(BUNDLED_MODEL, made, batch_invariant=True)
    for scheduling in ({}, {"async_scheduling": True}, {"speculative_ngram": 3}):
        scheduler = msgspec.structs.replace(pipeline.config.scheduler, **scheduling)
        config = msgspec.structs.replace(pipeline.config, scheduler=scheduler)
        served, counters = serve(pipeline.executor, config, made)
        assert served == expected
        assert counters.preemptions > 0
        assert counters.prefix_cache_hits > 0
        assert (counters.spec_accepted_tokens > 0) == ("speculative_ngram" in scheduling)


@pytest.mark.parametrize(
    ("name", "layout", "scheduling"),
    [
        ("llama-deep", {"stages": 3, "partition": "2,1,2"}, {"async_scheduling": True}),
        ("qwen3-moe-deep", {"stages": 2, "shards": 2}, {"speculative_ngram": 3}),
        ("gpt-oss-mxfp4", {"stages": 2, "num_blocks": 20}, {"async_scheduling": True}),
        ("deepseek3", {"stages": 2}, {"speculative_ngram": 3}),
    ],
)
def test_every_layout_gives_the_tokens_of_one_process(
    name: str,
    layout: dict[str, Any],
    scheduling: dict[str, Any],
    stages: StartStages,
    alone: ServeAlone,
    with_words: AddWords,
    checkpoint: SaveModel,
) -> None:
    directory = with_words(checkpoint(name).directory)
    # Windows free blocks, so only longer answers than elsewhere exceed the KV cache.
    longest = 30 if "num_blocks" in layout else 16
    pipeline, made = stages(directory, **layout), requests(256, grammars=True, longest=longest)
    expected = alone(directory, made, num_blocks=layout.get("num_blocks", NUM_BLOCKS))
    scheduler = msgspec.structs.replace(pipeline.config.scheduler, **scheduling)
    config = msgspec.structs.replace(pipeline.config, scheduler=scheduler)
    served, counters = serve(pipeline.executor, config, made)
    assert served == expected
    assert counters.preemptions > 0
    assert (counters.spec_accepted_tokens > 0) == ("speculative_ngram" in scheduling)


def test_stages_survive_sleep_profile_and_invalid_request(
    stages: StartStages,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    model = checkpoint("llama-deep")
    pipeline, whole = stages(model.directory, stages=3), driver(model.directory)
    drivers = Driver(pipeline.executor, NUM_BLOCKS), whole
    pipeline.executor.start_profile()
    for each in drivers:
        each.start(0, prompt(12))
        each.prefill(0)
    pipeline.executor.stop_profile(tmp_path / "step.json.gz")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step.json.gz", "step-rank-1.json.gz", "step-rank-2.json.gz"}
    with pytest.raises(CannotDo, match="no profile"):
        pipeline.executor.stop_profile(tmp_path / "again.json.gz")
    drivers[0].start(1, [-5])
    with pytest.raises(ValueError, match="vocabulary"):
        drivers[0].prefill(1)
    for level in (1, 2):
        pipeline.executor.sleep(level)
        with pytest.raises(RuntimeError, match="sleeps"):
            drivers[0].decode(1, 0)
        pipeline.executor.wake_up()
        again = Driver(pipeline.executor, NUM_BLOCKS)
        again.start(0, prompt(12))
        again.prefill(0)
        assert again.tokens[0] == whole.tokens[0]
    assert pipeline.failures == []


def test_a_killed_stage_fails_the_steps_in_flight_and_is_reported_at_once(
    stages: StartStages, checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    directory = checkpoint("llama-deep").directory
    pipeline = stages(directory, stages=3, async_scheduling=True)  # used by this test only
    steps = Driver(pipeline.executor, NUM_BLOCKS)
    steps.start(0, prompt(5))
    steps.prefill(0)
    os.kill(pipeline.team.pids[0], signal.SIGKILL)  # the leader has no connection to the first
    with pytest.raises(WorkerFailed, match="worker 1 has died"):
        steps.decode(2, 0)
    pipeline.team._thread.join(PATIENCE)
    assert pipeline.failures == ["worker 1 has died"]


def test_a_stage_reads_its_own_layers_only_and_the_stages_read_all(checkpoint: SaveModel) -> None:
    model = checkpoint("qwen3-moe-deep")
    spec = read_spec(model.directory)
    read = []
    for stage in divide_layers(4, 3, (1, 2, 1)):
        weights = Recording(model.directory, spec)
        loader = DecoderLoader(
            spec,
            weights,
            types=ComputeTypes(torch.float32, torch.float32),
            device=torch.device("cpu"),
            max_model_len=16,
            stage=stage,
        )
        loaded = loader.load()
        assert len(loaded.sparse_layers) == sum(map(spec.is_sparse, stage.layers))
        assert not loaded.is_whole
        read.append(weights.names)
    ends = {name for name in set().union(*read) if ".layers." not in name}
    assert [{n for n in names if ".layers." not in n} for names in read] == [
        {"model.embed_tokens.weight"},
        set(),
        {"model.embed_tokens.weight", "model.norm.weight"},
    ]
    layers = [{int(n.split(".")[2]) for n in names - ends} for names in read]
    assert layers == [{0}, {1, 2}, {3}]


class Recording(SafetensorsCheckpoint):
    """Records the requested tensors."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        super().__init__(directory, spec)
        self.names: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        self.names.add(name)
        return super().tensor(name)


def test_layers_are_divided_evenly_and_the_last_stage_has_no_more_than_others() -> None:
    counts = {
        (layers, stages): [len(stage.layers) for stage in divide_layers(layers, stages)]
        for layers, stages in [(4, 2), (5, 2), (5, 3), (7, 3), (8, 3), (3, 3), (11, 4)]
    }
    assert list(counts.values()) == [
        [2, 2], [3, 2], [2, 2, 1], [2, 3, 2], [3, 3, 2], [1, 1, 1], [3, 3, 3, 2]
    ]  # fmt: skip
    stages = divide_layers(7, 3)
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    assert [*stages[0].layers, *stages[1].layers, *stages[2].layers] == list(range(7))


def test_unsupported_pipeline_models_are_refused_with_advice() -> None:
    with pytest.raises(UnsupportedModel, match="--pipeline-parallel-size 4 is more than the 3"):
        divide_layers(3, 4)
    with pytest.raises(UnsupportedModel, match=r"--pipeline-layer-partition 1,3 has 4 layers.*5"):
        divide_layers(5, 2, (1, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "has 3 numbers for --pipeline-parallel-size 2"),
        ("1,,2", "give each stage's number"),
        ("0,4", "at least 1"),
        ("-1,5", "as in 10,14"),
        ("1e9,2", "as in 10,14"),
        ("9" * 5000 + ",1", "as in 10,14"),
        ("", "as in 10,14"),
    ],
)
def test_a_wrong_partition_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"pipeline_layer_partition.*{message}") as refusal:
        ParallelConfig(pipeline_parallel_size=2, pipeline_layer_partition=text)
    assert len(str(refusal.value)) < 300
    assert ParallelConfig(
        pipeline_parallel_size=2, pipeline_layer_partition="10, 14"
    ).layers_of_stages == (10, 14)


def test_experts_in_several_engines_and_stages_are_refused_together_at_the_start() -> None:
    config = EngineConfig(
        parallel=ParallelConfig(pipeline_parallel_size=2, enable_expert_parallel=True)
    )
    with pytest.raises(CannotStart, match="--enable-expert-parallel needs --pipeline"):
        build_executor(config, 0, Lifeline(None), EarlyStop())
