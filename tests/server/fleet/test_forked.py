"""Which of a node's first processes are forked."""

from typing import Any

import pytest

from engine.shared.config import EngineConfig, ParallelConfig
from engine.shared.config.execution import ExecutorConfig
from engine.shared.config.model import ModelConfig
from server.config import ServeConfig
from server.config.fleet import RayConfig, SupervisorConfig
from server.fleet.forking import forkable_kinds

BOTH, NEITHER = (True, True), (False, False)
ENGINES, FRONT_ENDS = (True, False), (False, True)


def choose(
    config: ServeConfig = ServeConfig(),
    engines: int = 2,
    *,
    can_fork: bool = True,
    devices: int = 0,
    **sections: Any,
) -> tuple[bool, bool]:
    engine = EngineConfig(**sections)
    return forkable_kinds(config, [engine] * engines, can_fork=can_fork, devices=devices)


def test_engines_and_front_ends_are_forked_by_default() -> None:
    assert choose() == BOTH


def test_nothing_is_forked_if_disabled_or_unsupported() -> None:
    assert choose(can_fork=False) == NEITHER
    exec_ = ServeConfig(supervisor=SupervisorConfig(start_method="exec"))
    assert choose(exec_) == NEITHER


def test_one_process_of_a_kind_loads_its_libraries_itself() -> None:
    one = ServeConfig(supervisor=SupervisorConfig(api_server_count=1))
    assert choose(one, engines=1) == NEITHER
    assert choose(one) == ENGINES
    assert choose(engines=0) == FRONT_ENDS


@pytest.mark.parametrize(
    "sections",
    [
        {"model": ModelConfig(device="cuda")},
        {"executor": ExecutorConfig(executor="simulated")},
        {"executor": ExecutorConfig(cpu_bind="0-3")},
        {"parallel": ParallelConfig(tensor_parallel_size=2)},
    ],
    ids=["on a GPU", "without a model", "bound to CPUs", "with workers"],
)
def test_engines_without_benefit_or_with_other_environment_are_not_forked(
    sections: dict[str, Any],
) -> None:
    assert choose(**sections) == FRONT_ENDS


def test_engines_with_gpu_are_not_forked() -> None:
    assert choose(devices=1) == FRONT_ENDS
    assert choose(devices=1, model=ModelConfig(device="cpu")) == BOTH


def test_engines_that_ray_starts_are_not_forked() -> None:
    assert choose(ServeConfig(ray=RayConfig(data_parallel_backend="ray"))) == FRONT_ENDS
