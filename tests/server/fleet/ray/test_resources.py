"""The resources that an engine requests from Ray, and the environment it gets."""

import msgspec
import pytest

from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
)
from server.config import RayConfig
from server.fleet.backend import CannotServe
from server.fleet.ray.resources import (
    copied_environment,
    differences,
    engine_config,
    rank_resources,
    uses_gpus,
)

TWO = ParallelConfig(tensor_parallel_size=2, data_parallel_rank=3)


@pytest.mark.parametrize(
    ("config", "ray", "has_gpus", "needs"),
    [
        (EngineConfig(), RayConfig(), False, {"CPU": 1}),
        (EngineConfig(), RayConfig(), True, {"CPU": 1, "GPU": 1}),
        (EngineConfig(parallel=TWO), RayConfig(), False, {"CPU": 2}),
        (EngineConfig(parallel=TWO), RayConfig(), True, {"CPU": 2, "GPU": 2}),
        (EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)),
         RayConfig(), True, {"CPU": 6, "GPU": 6}),
        (EngineConfig(parallel=TWO, executor=ExecutorConfig(threads=8)), RayConfig(), False,
         {"CPU": 8}),
        (EngineConfig(model=ModelConfig(device="cpu")), RayConfig(), True, {"CPU": 1}),
        (EngineConfig(model=ModelConfig(device="cuda")), RayConfig(), False, {"CPU": 1, "GPU": 1}),
        (EngineConfig(executor=ExecutorConfig(executor="simulated")), RayConfig(), True,
         {"CPU": 1}),
        (EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=5000)), RayConfig(), False,
         {"CPU": 1, "memory": 5000}),
        (EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=5000)), RayConfig(), True,
         {"CPU": 1, "GPU": 1}),
        (EngineConfig(), RayConfig(ray_engine_memory=7000, ray_engine_resources='{"slot": 2}'),
         False, {"CPU": 1, "memory": 7000, "slot": 2}),
    ],
)  # fmt: skip
def test_resources_follow_from_parallel_settings(
    config: EngineConfig, ray: RayConfig, has_gpus: bool, needs: dict[str, float]
) -> None:
    assert rank_resources(config, ray, has_gpus=has_gpus) == needs


@pytest.mark.parametrize("text", ["slot", "[1]", '{"slot": "one"}', '{"slot": 0}', '{"a": -1}'])
def test_invalid_resources_are_refused_by_setting_name(text: str) -> None:
    with pytest.raises(CannotServe, match="--ray-engine-resources"):
        rank_resources(EngineConfig(), RayConfig(ray_engine_resources=text), has_gpus=False)


def test_engine_uses_requested_cores_and_visible_devices() -> None:
    config = EngineConfig(parallel=TWO)
    on_cpu = engine_config(config, gpus=False, max_engines_per_node=3)
    assert (on_cpu.executor.threads, on_cpu.model.device) == (2, "cpu")
    assert on_cpu.parallel.engines_on_node == 3
    on_gpu = engine_config(config, gpus=True, max_engines_per_node=3)
    assert (on_gpu.executor.threads, on_gpu.model.device) == (None, "cuda")
    assert on_gpu.parallel.number_on_node == 0
    assert on_gpu.parallel.data_parallel_rank == 3
    given = msgspec.structs.replace(config, model=ModelConfig(device="cuda"))
    assert uses_gpus(given, has_gpus=False)


def test_only_named_variables_are_copied_except_node_specific_ones() -> None:
    here = {"HF_TOKEN": "x", "HF_HOME": "/h", "PATH": "/bin", "AWS_SECRET": "s",
            "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    assert copied_environment(["HF_*"], here) == {"HF_TOKEN": "x", "HF_HOME": "/h"}
    assert copied_environment(["*"], here) == {
        name: here[name] for name in ("HF_TOKEN", "HF_HOME", "AWS_SECRET")
    }
    assert copied_environment(["AWS_SECRET", "CUDA_VISIBLE_DEVICES"], here) == {"AWS_SECRET": "s"}


def test_versions_that_differ_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.fleet.ray.resources.SWELL_VERSION", "0.2.0")
    monkeypatch.setattr("server.fleet.ray.resources._torch", lambda: "2.13.0")
    relay = {"relay": "server.fleet.ray.messages"}
    assert differences({"swell": "0.2.0", "torch": "2.13.0", **relay}, "b") is None
    message = differences({"swell": "0.1.0", "torch": "2.12.1", **relay}, "10.0.0.7")
    assert message is not None
    assert "10.0.0.7" in message
    assert "swell 0.1.0 there, 0.2.0 here; torch 2.12.1 there, 2.13.0 here" in message
    missing = differences({"swell": "none (No module named 'engine')", "torch": "2.13.0"}, "b")
    assert missing is not None
    assert "none (No module named 'engine') there" in missing
