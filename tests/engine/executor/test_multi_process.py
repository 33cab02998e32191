"""A model sharded over several real processes computes the same as in one."""

import os
import shutil
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import psutil
import pytest

from engine.batch.weight_transfer import SentTensors, WeightTransfer
from engine.executor import worker_process
from engine.executor.in_process import InProcessExecutor
from engine.executor.rules import check_sharded_state
from engine.executor.team import MismatchedWorkers, Team, WorkerFailed
from engine.models.attention.kv_format import KvCacheDtype
from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.formats.files import CheckpointError, TensorFiles
from engine.models.hf_config import read_spec
from engine.models.parallel.sharded_state import save_sharded_state
from engine.models.parallel.tensors import TensorSharding
from engine.models.spec import UnsupportedModel
from engine.shared.config import (
    EngineConfig,
)
from tests.engine.configs import config_of
from tests.engine.driver import GREEDY, Driver
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.support.waiting import PATIENCE


def settings(
    directory: Path,
    size: int,
    *,
    stages: int = 1,
    kv_cache_dtype: KvCacheDtype = "auto",
    dtype: Literal["auto", "bfloat16"] = "auto",
    load_format: Literal["auto", "sharded_state"] = "auto",
    **scheduler: Any,
) -> EngineConfig:
    return config_of(
        directory,
        model={"dtype": dtype, "load_format": load_format},
        cache={"kv_cache_dtype": kv_cache_dtype},
        scheduler=scheduler,
        parallel={"tensor_parallel_size": size, "pipeline_parallel_size": stages},
    )


class Cluster:
    """An executor, its team, and a driver for it."""

    def __init__(self, config: EngineConfig) -> None:
        self.failures: list[str] = []
        self.team = Team(config, 0, 1, on_failure=self.failures.append)
        self.executor = InProcessExecutor(config, team=self.team)
        self.driver = Driver(self.executor)


StartCluster: TypeAlias = Callable[..., Cluster]


@pytest.fixture
def start() -> Iterator[StartCluster]:
    """Return a function that starts a cluster of processes, which is stopped after the test."""
    running: list[Cluster] = []

    def start(directory: Path, size: int, **options: Any) -> Cluster:
        config = settings(directory, size, **options)
        running.append(Cluster(config))
        return running[-1]

    yield start
    for cluster in running:
        pids = cluster.team.pids
        cluster.executor.shutdown()
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-biased", 2),
        ("qwen2-some-windows", 4),  # two key-value heads
        ("phi3-partial", 2),  # fused tensors
        ("cohere-normed", 2),  # norms of each head
        ("glm4-moe", 2),  # an MLP in addition to the experts
        ("deepseek2", 2),
        ("gpt-oss-mxfp4", 2),  # sinks; experts in one tensor, three blocks of inner outputs
        ("llama4-some-dense", 2),  # wider MLPs than experts
    ],
)
def test_every_configuration_gives_tokens_of_one_process(
    name: str,
    size: int,
    start: StartCluster,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model = checkpoint(name)
    cut = start(model.directory, size).driver
    whole = driver(model.directory)
    for engine in (cut, whole):
        engine.start(0, prompt(120))
        for count in (5, 60, 1, 54):  # a prompt in chunks
            engine.step({0: count})
        engine.start(1, prompt(40))
        engine.start(2, prompt(9))
        engine.step({1: 40, 0: 1, 2: 9})  # prefills and a decode
        engine.decode(8, 2, 0, 1)
        engine.start(3, prompt(40)[:32] + prompt(11), cached_blocks=engine.blocks[1][:4])
        engine.prefill(3)
        so_far = engine.tokens[1]
        engine.start(1, so_far, num_prompt_tokens=40)  # after a preemption
        engine.step({1: len(so_far), 0: 1})
        engine.decode(9, 0, 3, 1)
    assert cut.tokens == whole.tokens
    assert len(cut.tokens[0]) >= 120 + 18


def test_trainer_weights_are_sharded_like_a_checkpoint(
    start: StartCluster,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = checkpoint("llama-biased")
    files = TensorFiles(model.directory)
    stored = {name: files.tensor(name) for name in files.shapes}
    sent = {name: each.flip(0).contiguous() for name, each in stored.items()}
    cluster, whole = start(model.directory, 2), driver(model.directory)

    def tokens(engine: Driver) -> list[int]:
        engine.start(0, prompt(40))
        engine.prefill(0)
        engine.decode(8, 0)
        return engine.tokens[0]

    before = tokens(whole)
    assert tokens(cluster.driver) == before
    monkeypatch.setattr(WeightTransfer, "take", lambda _: SentTensors(sent))
    cluster.executor.take_weights()
    assert tokens(cluster.driver) != before
    cluster.executor.settle_weights(revert=True)
    assert tokens(cluster.driver) == before
    monkeypatch.setattr(WeightTransfer, "take", lambda _: SentTensors(stored))
    cluster.executor.take_weights()
    cluster.executor.settle_weights(revert=False)
    assert tokens(cluster.driver) == before


@pytest.mark.processor
@pytest.mark.parametrize("name", ["llama-biased", "qwen3-moe-deep"])
def test_blocked_weights_are_sharded_like_others(
    name: str,
    start: StartCluster,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    avx2_alone: pytest.MonkeyPatch,
) -> None:
    avx2_alone.setattr(worker_process, "WORKER_MODULE", "tests.engine.executor.avx2_worker")
    directory = checkpoint(name).directory
    engines = (
        start(directory, 2, dtype="bfloat16").driver,
        driver(directory, dtype="bfloat16"),
    )
    cut, whole = (prompt_logprobs(engine, prompt(70), 5, 60, 1, 4) for engine in engines)
    assert len(cut) == len(whole)
    assert statistics.mean(map(distance, cut, whole)) < 0.05


@pytest.mark.processor
@pytest.mark.parametrize(
    ("name", "size", "stages"), [("qwen3-moe-blocks", 2, 1), ("glm4-moe-blocks", 1, 2)]
)
def test_kernel_experts_are_sharded_like_others(
    name: str,
    size: int,
    stages: int,
    start: StartCluster,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    directory = checkpoint(name).directory
    engines = (
        start(directory, size, stages=stages, dtype="bfloat16").driver,
        driver(directory, dtype="bfloat16", fused=True),
    )
    cut, whole = (prompt_logprobs(engine, prompt(70), 5, 60, 1, 4) for engine in engines)
    assert len(cut) == len(whole)
    # A token with nearly tied experts may be routed differently, and some processors round more.
    assert statistics.median(map(distance, cut, whole)) < 0.1


def test_a_worker_with_other_weights_is_refused(checkpoint: SaveModel, tmp_path: Path) -> None:
    directory = checkpoint("llama").directory
    copy = Path(shutil.copytree(directory, tmp_path / "other"))
    with (copy / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x11")
    team = Team(settings(copy, 1, stages=2), 0, 1)
    with pytest.raises(MismatchedWorkers, match=r"worker 1 on .* has loaded other weights"):
        InProcessExecutor(settings(directory, 1, stages=2), team=team)
    assert not any(map(psutil.pid_exists, team.pids))


def test_prompt_and_sample_logprobs_equal_one_process(
    start: StartCluster, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("llama")
    sampling = msgspec.structs.replace(
        GREEDY, temperature=0.8, seed=3, logprobs=2, prompt_logprobs=1
    )
    results = []
    for engine in (start(model.directory, 2).driver, driver(model.directory)):
        engine.start(0, prompt(20), sampling)
        results.append(engine.prefill(0))
    one, two = results
    assert one.token_ids == two.token_ids
    assert [p.top_ids for p in one.prompt_logprobs[0]] == [
        p.top_ids for p in two.prompt_logprobs[0]
    ]
    for entry, other in zip(one.prompt_logprobs[0], two.prompt_logprobs[0], strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "stages"),
    [
        ("llama", 2, 1),
        ("deepseek3", 2, 1),  # a latent replicated on all processes
        ("mistral-window", 1, 2),
    ],
)
def test_sharded_8_bit_cache_equals_that_of_one_process(
    name: str,
    size: int,
    stages: int,
    start: StartCluster,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    directory = checkpoint(name).directory
    cluster = start(directory, size, stages=stages, kv_cache_dtype="fp8")

    def logprobs(engine: Driver) -> list[float]:
        return prompt_logprobs(engine, prompt(70), 5, 60, 5)

    cut = logprobs(cluster.driver)
    exact, rounded = (logprobs(driver(directory, kv_cache_dtype=k)) for k in ("auto", "fp8"))
    assert statistics.median(map(distance, cut, rounded)) < 1e-3
    assert statistics.median(map(distance, cut, exact)) > 1e-2
    cluster.executor.sleep(1)
    cluster.executor.wake_up()
    assert statistics.median(map(distance, logprobs(cluster.driver), rounded)) < 1e-3


def prompt_logprobs(engine: Driver, tokens: list[int], *counts: int) -> list[float]:
    """Return the log probabilities of a prompt computed in chunks of this size."""
    engine.start(0, tokens, msgspec.structs.replace(GREEDY, prompt_logprobs=0))
    steps = [engine.step({0: count}) for count in counts]
    return [entry.logprob for step in steps for entry in step.prompt_logprobs[0]]


def distance(one: float, other: float) -> float:
    return abs(one - other)


@pytest.mark.usefixtures("started_anew")
def test_a_killed_worker_fails_the_step_and_is_reported_at_once(
    start: StartCluster, checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    cluster = start(checkpoint("llama").directory, 2)
    cluster.driver.start(0, prompt(5))
    cluster.driver.prefill(0)
    names = [psutil.Process(pid).cmdline()[0] for pid in cluster.team.pids]
    assert names == ["swell: engine 0 worker 1"]
    os.kill(cluster.team.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="worker 1 has died"):
        cluster.driver.decode(1, 0)
    cluster.team._thread.join(PATIENCE)
    assert cluster.failures == ["worker 1 has died"]
    with pytest.raises(WorkerFailed):
        cluster.driver.decode(1, 0)


def test_unshardable_models_are_refused(checkpoint: SaveModel, tmp_path: Path) -> None:
    spec = read_spec(checkpoint("llama").directory)
    for size in (3, 8):
        with pytest.raises(UnsupportedModel, match=f"--tensor-parallel-size {size} does not fit"):
            TensorSharding(spec, 0, size)
    (tmp_path / "config.json").write_bytes(
        (checkpoint("llama").directory / "config.json").read_bytes()
    )
    config = settings(tmp_path, 2)
    team = Team(config, 0, 1)
    with pytest.raises((CheckpointError, WorkerFailed), match="lacks"):
        InProcessExecutor(config, team=team)
    assert not any(psutil.pid_exists(pid) for pid in team.pids)


@pytest.mark.parametrize(
    ("name", "size", "stages"),
    [
        ("qwen2-some-windows", 4, 1),  # two key-value heads, each held by two
        ("granite-moe", 2, 1),  # experts in one tensor
        ("llama", 2, 2),
    ],
)
def test_sharded_state_gives_the_same_tokens(
    name: str, size: int, stages: int,
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, start: StartCluster,
    tmp_path: Path,
) -> None:  # fmt: skip
    directory, parts = checkpoint(name).directory, tmp_path / "parts"
    written = save_sharded_state(directory, parts, size)
    assert [each.name for each in written] == [
        f"model-rank-{rank}-part-0.safetensors" for rank in range(size)
    ]
    whole = driver(directory)
    cluster = start(parts, size, stages=stages, load_format="sharded_state")
    for engine in (cluster.driver, whole):
        engine.start(0, prompt(40))
        engine.prefill(0)
        engine.decode(8, 0)
    assert cluster.driver.tokens == whole.tokens
    uncut = SafetensorsCheckpoint(directory, read_spec(directory)).fingerprint()
    assert cluster.executor.info.model_fingerprint == uncut


def test_sharded_state_for_other_process_count_is_refused(
    checkpoint: SaveModel, start: StartCluster, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    save_sharded_state(checkpoint("llama").directory, parts, 4)
    with pytest.raises(CheckpointError, match="was sharded for --tensor-parallel-size 4, not"):
        start(parts, 2, load_format="sharded_state")


def test_a_model_that_was_not_sharded_is_refused_by_its_missing_part(
    checkpoint: SaveModel, start: StartCluster
) -> None:
    with pytest.raises(CheckpointError, match=r"model-rank-0-part-0\.safetensors cannot be read"):
        start(checkpoint("llama").directory, 2, load_format="sharded_state")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": {"enable_expert_parallel": True}}, "--enable-expert-parallel"),
        ({"scheduler": {"speculative_model": "other"}}, "draft model"),
    ],
)
def test_settings_incompatible_with_sharded_state_are_named(
    changes: dict[str, dict[str, Any]], named: str, checkpoint: SaveModel, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    save_sharded_state(checkpoint("llama").directory, parts, 2)
    config = settings(parts, 2, load_format="sharded_state").changed(**changes)
    with pytest.raises(UnsupportedModel, match=named):
        check_sharded_state(config, is_fallback=False, is_pooling=False)


def test_existing_directory_is_not_overwritten(checkpoint: SaveModel, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        save_sharded_state(checkpoint("llama").directory, tmp_path, 2)
