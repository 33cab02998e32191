"""The script that replaces engines in batches, with a fake kubectl that only stores pods."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_chart import CHART
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.deploy

SCRIPT = CHART / "files" / "replace-engines.sh"
NAME = "demo-swell-engine"

KUBECTL = '''
"""Keeps a StatefulSet's pods in a file; one that is deleted comes back as the new revision."""
import json, os, sys
path = os.environ["PODS"]
state = json.load(open(path))
arguments = [each for each in sys.argv[1:] if each not in ("--namespace", "llm")]
match arguments:
    case ["get", "statefulset", _, "--output", "jsonpath={.status.updateRevision}"]:
        print("new", end="")
    case ["get", "statefulset", _, "--output", "jsonpath={.spec.replicas}"]:
        print(len(state["pods"]), end="")
    case ["get", "pod", name, "--output", what] if "revision" in what:
        pod = state["pods"][name]
        if pod["away"]:
            pod["away"] -= 1
            json.dump(state, open(path, "w"))
            sys.exit("not found")
        print(pod["revision"], end="")
    case ["get", "pod", name, "--output", _]:
        print("False" if name in state["never_ready"] else "True", end="")
    case ["delete", "pod", *names, "--wait=false"]:
        state["deleted"].append(names)
        for name in names:
            state["pods"][name] = {"revision": "new", "away": 1}
        json.dump(state, open(path, "w"))
    case _:
        sys.exit(f"unexpected: {arguments}")
'''


class Engines:
    """Engines of a StatefulSet, and the script that replaces them."""

    def __init__(self, directory: Path, replicas: int, updated: int = 0) -> None:
        self._pods = directory / "pods.json"
        names = [f"{NAME}-{ordinal}" for ordinal in range(replicas)]
        new = names[replicas - updated :]
        self._pods.write_text(json.dumps({
            "pods": {n: {"revision": "new" if n in new else "old", "away": 0} for n in names},
            "never_ready": [], "deleted": [],
        }))  # fmt: skip
        kubectl = directory / "kubectl"
        kubectl.write_text(f"#!{sys.executable}\n{KUBECTL}")
        kubectl.chmod(0o755)
        self._path = f"{directory}:{os.environ['PATH']}"

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._pods.read_text())
        return state

    def never_ready(self, *ordinals: int) -> None:
        names = [f"{NAME}-{ordinal}" for ordinal in ordinals]
        self._pods.write_text(json.dumps(self.state | {"never_ready": names}))

    def replace(self, at_a_time: int, seconds: int = 30) -> "subprocess.CompletedProcess[str]":
        environment = {"PATH": self._path, "PODS": str(self._pods), "POLL_SECONDS": "0.05"}
        return subprocess.run(
            ["sh", str(SCRIPT), "llm", NAME, str(at_a_time), str(seconds)],
            capture_output=True, text=True, timeout=120, check=False, env=environment,
        )  # fmt: skip

    @property
    def batches(self) -> list[list[int]]:
        return [[int(n.rpartition("-")[2]) for n in each] for each in self.state["deleted"]]


def test_engines_are_replaced_in_batches_from_highest_number(tmp_path: Path) -> None:
    engines = Engines(tmp_path, replicas=5)
    done = engines.replace(2)
    assert done.returncode == 0, done.stderr
    assert engines.batches == [[4, 3], [2, 1], [0]]
    assert {pod["revision"] for pod in engines.state["pods"].values()} == {"new"}
    assert "5 engines replaced" in done.stdout


def test_replacement_stops_after_first_batch_if_version_is_not_ready(tmp_path: Path) -> None:
    engines = Engines(tmp_path, replicas=6)
    engines.never_ready(5)
    done = engines.replace(2, seconds=1)
    assert done.returncode == 1
    assert f"{NAME}-5 is not ready" in done.stderr
    assert engines.batches == [[5, 4]]


def test_replacement_resumes_with_remaining_engines(tmp_path: Path) -> None:
    engines = Engines(tmp_path, replicas=4, updated=3)
    assert engines.replace(2).returncode == 0
    assert engines.batches == [[0]]
    stuck = Engines(tmp_path, replicas=4, updated=1)
    stuck.never_ready(3)
    assert stuck.replace(2, seconds=1).returncode == 1
    assert stuck.batches == [], "what is not ready yet counts"


@pytest.mark.parametrize("arguments", [[], ["llm", NAME], ["llm", NAME, "0"]])
def test_missing_arguments_print_usage(arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "AT_A_TIME" in done.stderr
