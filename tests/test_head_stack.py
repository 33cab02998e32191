"""A head that others join, and a node of engines only: watched, scaled and checked as one."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL
from tests.support.commands import SWELL, run_swell, swell
from tests.support.http import ADMIN_KEY, call, ready_ranks
from tests.support.load import Load
from tests.support.metrics import metric
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

FLAGS = ("--executor", "simulated", "--simulated-step-us", "10000", "--admin-key", ADMIN_KEY)
QUICK = ("--heartbeat-interval", "0.3")


class Nodes:
    """A head, and what joins it."""

    def __init__(self, directory: Path, running: ExitStack) -> None:
        self._running = running
        self.port = port_of_a_coordinator()
        self.key = directory / "cluster.key"
        self.key.write_text("a secret of these tests, long enough")
        self.join = (
            "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self.port),
            "--cluster-key-file", str(self.key), *QUICK,
        )  # fmt: skip
        self.head = running.enter_context(
            RunningStack(
                *self.join, *FLAGS, "--node", "head", "--data-parallel-size-local", "1",
                "--api-server-count", "2",
            )
        )  # fmt: skip
        self.url = self.head.url

    def headless(self, name: str) -> None:
        flags = ("--headless", *self.join, *FLAGS, "--node", name)
        self._running.enter_context(swell("serve", *flags, "--data-parallel-size-local", "1"))

    def sizes(self) -> dict[str, int]:
        nodes = call(f"{self.url}/admin/scale")["nodes"]
        return {name: len(node["engines"]) for name, node in nodes.items()}

    def run_each(self, size: int) -> bool:
        return self.sizes() == {"head": size, "far": size}

    def hosts(self) -> list[str]:
        """Return the node of each engine that is ready."""
        engines = call(f"{self.url}/admin/engines")["engines"]
        return sorted(engine["host"] for engine in engines if engine["ready"])

    def serve(self, hosts: list[str]) -> bool:
        return self.hosts() == hosts

    def scale(self, size: int) -> str:
        """Run `swell scale` and return what it says in the end."""
        run = run_swell("scale", str(size), "--url", self.url, "--admin-key", ADMIN_KEY)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def run(self, *command: str, timeout: float = PATIENCE) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ExitStack() as running:
        made = Nodes(tmp_path_factory.mktemp("head"), running)
        made.headless("far")
        until(lambda: made.hosts() == ["far", "head"], "both engines serve")
        until(lambda: set(made.sizes()) == {"far", "head"}, "both supervisors are known")
        yield made


def test_killed_coordinator_is_restarted_by_head_and_all_members_return(nodes: Nodes) -> None:
    with Load(nodes.url, 8).running() as load:
        until(lambda: len(metric(nodes.url, "routing_decisions_total")) == 2, "both engines work")
        killed = nodes.head.processes()["coordinator"]
        killed.kill()
        killed.wait()
        until(lambda: "coordinator" in nodes.head.processes(), "another coordinator")
        until(
            lambda: sum("registered again" in line for line in nodes.head.lines) >= 3,
            "the head's engine and front ends have registered again",
        )
        until(lambda: nodes.hosts() == ["far", "head"], "both engines are known again")
        until(lambda: set(nodes.sizes()) == {"far", "head"}, "both supervisors are known again")
        load.goes_on()
    load.check()
    assert nodes.scale(2).startswith("2 engines; ")


def test_engines_are_scaled_over_all_nodes_under_load(nodes: Nodes) -> None:
    with Load(nodes.url, 8).running() as load:
        for size, hosts in ((4, ["far", "far", "head", "head"]), (2, ["far", "head"])):
            said = nodes.scale(size)
            assert f"head: {size // 2} engine" in said
            assert f"far: {size // 2} engine" in said
            until(partial(nodes.serve, hosts), f"{hosts} serve")
            until(partial(nodes.run_each, size // 2), "each supervisor runs half of them")
    load.check()


def test_a_front_end_of_another_tokenizer_is_refused_by_name(nodes: Nodes, tmp_path: Path) -> None:
    model = tmp_path / BUNDLED_MODEL.name
    shutil.copytree(BUNDLED_MODEL, model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    join = ("--coordinator", f"127.0.0.1:{nodes.port}", "--cluster-key-file", str(nodes.key))
    refused = nodes.run(
        SWELL, "api-server", str(model), *join, "--port", "0", "--api-server-count", "1"
    )
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert "tokenizer is '" in said
    assert "front ends have to serve the model that the engines do" in said
    until(lambda: len(ready_ranks(nodes.url)) == 2, "nothing has changed for the others")


def test_a_process_of_another_protocol_is_refused_by_name(nodes: Nodes) -> None:
    program = (
        "from engine.shared import version; version.PROTOCOL_VERSION = 99; "
        "version.SPOKEN_PROTOCOLS = (99, 98); "
        "import sys; from server.cli import main; sys.exit(main())"
    )
    refused = nodes.run(
        sys.executable, "-c", program, "engine", "--executor", "simulated",
        "--coordinator", f"127.0.0.1:{nodes.port}", "--cluster-key-file", str(nodes.key),
    )  # fmt: skip
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert "protocol is 99 there" in said or "protocol is 98 there" in said
    until(lambda: len(ready_ranks(nodes.url)) == 2, "nothing has changed for the others")


def test_contradicting_settings_of_a_node_are_named() -> None:
    run = run_swell("serve", "--headless")
    assert run.returncode == 1
    assert "--headless needs --data-parallel-address" in run.stderr


def test_head_expects_engines_of_other_nodes(tmp_path: Path) -> None:
    port = port_of_a_coordinator()
    key = tmp_path / "key"
    key.write_text("a secret of these tests, long enough")
    join = (
        "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port),
        "--cluster-key-file", str(key), "--executor", "simulated", *QUICK,
        "--data-parallel-size", "4", "--data-parallel-size-local", "2",
    )  # fmt: skip
    with RunningStack(*join, "--admin-key", ADMIN_KEY) as head:

        def status() -> tuple[int, list[tuple[int, str]]]:
            found = call(f"{head.url}/status.json")
            return found["num_expected"], [
                (each["rank"], each["reason"]) for each in found["missing"]
            ]

        until(lambda: any("2 of 4 engines are" in line for line in head.lines), "it says so")
        until(lambda: status() == (4, [(2, "not_joined"), (3, "not_joined")]), "two are missing")
        beyond = run_swell("serve", "--headless", *join, "--data-parallel-start-rank", "3")
        assert beyond.returncode == 1
        assert "data_parallel_rank is 4 here" in beyond.stdout + beyond.stderr
        with swell("serve", "--headless", *join, "--data-parallel-start-rank", "2"):
            until(lambda: status() == (4, []), "all are there")
