"""The health check of a container that holds all engines of a machine asks every one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.running_stack import RunningStack
from tests.support.ports import free_ports
from tests.support.waiting import until

pytestmark = pytest.mark.stack

COMPOSE = Path(__file__).parents[1] / "docker" / "compose.cuda.yaml"


def test_gpu_health_check_covers_every_engine() -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["engine"]
    _, _, *command = service["healthcheck"]["test"]
    port, _ = free_ports(2)
    variables = {"SWELL_HEALTH_PORT": str(port), "SWELL_DATA_PARALLEL_SIZE_LOCAL": "2"}

    def check() -> int:
        done = subprocess.run(
            [sys.executable, *command], env={**os.environ, **variables}, capture_output=True,
            check=False,
        )  # fmt: skip
        return done.returncode

    assert check() == 1, "nothing runs"
    with RunningStack("--executor", "simulated", environment=variables) as stack:
        until(lambda: check() == 0, "both engines are ready")
        engine = stack.processes()["engine 1"]
        engine.suspend()
        assert check() == 1, "one of two does not answer"
        engine.kill()
        until(lambda: check() == 0 and stack.processes()["engine 1"] != engine, "it is back")
