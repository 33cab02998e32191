"""One engine on two nodes, which are two commands on the loopback interface here."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from tests.support.adapter_files import write_adapter
from tests.support.commands import run_swell, start_swell, swell
from tests.support.http import (
    ADMIN_KEY,
    MODEL,
    are_replaced,
    complete,
    incarnations,
    ready_ranks,
)
from tests.support.lockstep import utility
from tests.support.metrics import metric, num_running
from tests.support.ports import free_port, port_of_a_coordinator
from tests.support.process_logs import printed
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

ALONE = ("--data-parallel-size", "1", "--dtype", "float32", "--threads", "1")
TOKENS = 60
"""More than are computed before an engine is ended."""


@pytest.fixture
def key(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "cluster.key"
    file.write_text("one long secret for all")
    return ("--cluster-key-file", str(file))


@pytest.fixture
def span(key: tuple[str, ...]) -> tuple[str, ...]:
    """Return the settings that both nodes have."""
    return (
        *("--pipeline-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"),
        *("--master-port", str(free_port()), *key),
    )


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the workers that a process has started, by their titles."""
    found = []
    with contextlib.suppress(psutil.Error):
        for each in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if "".join(each.cmdline()).startswith("swell: engine"):
                    found.append(each)
    return found


class OtherNode:
    """The node that runs the first stage."""

    def __init__(self, command: str, flags: tuple[str, ...]) -> None:
        self.process = start_swell(command, *flags, "--node-rank", "1")

    def workers(self) -> list[psutil.Process]:
        return workers_of(self.process.pid)

    def said(self, text: str) -> bool:
        return text in printed(self.process)

    def interrupt(self) -> None:
        """End it as Ctrl-C does, and all that it has started with it."""
        workers = self.workers()
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 0
        assert have_ended(*workers)


@contextmanager
def other_node(flags: tuple[str, ...], command: str = "serve") -> Iterator[OtherNode]:
    node = OtherNode(command, flags)
    try:
        yield node
    finally:
        node.process.kill()
        node.process.wait()


def have_ended(*processes: psutil.Process) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def test_engine_of_four_processes_on_two_nodes_equals_single_process(
    span: tuple[str, ...], key: tuple[str, ...], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "law", seed=1, rank=4, size=0.3)
    model = (*ALONE, "--enable-lora", "--lora-modules", f"law={tmp_path / 'law'}")
    port = str(port_of_a_coordinator())
    spanning = (
        *(*model, *span, "--tensor-parallel-size", "2", "--async-scheduling"),
        *("--coordinator", f"127.0.0.1:{port}", "--data-parallel-rank", "1"),
    )
    head = RunningStack(
        *(*model, *key, "--admin-key", ADMIN_KEY, "--api-server-count", "1"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port),
        *("--data-parallel-start-rank", "0"),
    )
    with head, other_node(spanning, "engine") as node:
        engine = start_swell("engine", *spanning)
        until(lambda: ready_ranks(head.url) == {0, 1}, "both engines are ready")
        assert len(node.workers()) == 2
        everything = [*node.workers(), *workers_of(engine.pid)]
        assert len(everything) == 3, "the engine's own process is the fourth"

        whole = {name: complete(head.url, "Once", TOKENS, 0, model=name) for name in (MODEL, "law")}
        assert len({*whole.values()}) == 2
        for name, text in whole.items():
            assert complete(head.url, "Once", TOKENS, 1, model=name) == text
        utility(head.url, "sleep", 1)
        utility(head.url, "wake_up", 1)
        assert complete(head.url, "Once", TOKENS, 1) == whole[MODEL]

        # The other node's end is that of the engine; its streams go on at the whole one.
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(complete, head.url, "Once", TOKENS) for _ in range(4)]
            until(
                lambda: (
                    metric(head.url, "num_requests_running").get("1", 0.0) > 0
                    or all(answer.done() for answer in answers)
                ),
                "it runs some of them",
            )
            node.interrupt()
            assert [answer.result(2 * PATIENCE) for answer in answers] == [whole[MODEL]] * 4
        assert engine.wait(PATIENCE) == 1
        assert have_ended(*everything)
        assert "node 1 is lost: it was stopped" in printed(engine)


def test_engine_recovers_from_any_death_on_either_node(span: tuple[str, ...]) -> None:
    flags = (*ALONE, *span, "--resume-timeout", str(PATIENCE))
    with (
        other_node(flags) as node,
        RunningStack("--api-server-count", "1", *flags) as stack,
        ThreadPoolExecutor(1) as clients,
    ):
        undisturbed = complete(stack.url, "Once", TOKENS)

        before, [worker] = incarnations(stack.url, [0]), node.workers()
        answer = clients.submit(complete, stack.url, "Once", TOKENS)
        until(lambda: num_running(stack.url) == 1 or answer.done(), "it runs")
        worker.kill()
        assert answer.result(2 * PATIENCE) == undisturbed, "the stream waits for the next engine"
        until(lambda: are_replaced(stack.url, before, [0]), "the engine is replaced")

        before, [worker] = incarnations(stack.url, [0]), node.workers()
        stack.processes()["engine 0"].kill()
        assert have_ended(worker)
        until(lambda: are_replaced(stack.url, before, [0]), "the engine is replaced")

        before, [worker] = incarnations(stack.url, [0]), node.workers()
        node.process.kill()
        assert have_ended(worker), "workers end with their node"
        until(lambda: not ready_ranks(stack.url), "the engine ends")
        with other_node(flags) as again:
            until(lambda: are_replaced(stack.url, before, [0]), "the node has joined again")
            assert complete(stack.url, "Once", TOKENS) == undisturbed

            # Ctrl-C on the first node ends the workers of the other, and then on that one.
            everything = [*stack.processes().values(), *again.workers()]
            stack.process.send_signal(signal.SIGINT)
            assert stack.process.wait(PATIENCE) == 0
            assert have_ended(*everything)
            until(lambda: again.said("the workers have ended"), "it waits for the next engine")
            again.interrupt()


def test_different_setting_of_a_node_is_named_on_both_nodes(span: tuple[str, ...]) -> None:
    with swell("serve", "--port", "0", *ALONE, *span) as first:
        with other_node((*ALONE, *span, "--block-size", "32")) as node:
            assert node.process.wait(PATIENCE) == 1
            assert node.said("block_size is 16 on the first node but 32 there")
        until(lambda: "block_size is 16 on" in printed(first), "the first node says so too")
        told = "waiting for node 1 to join at"
        until(lambda: told in printed(first), "it still waits for the right one")


def test_a_node_without_cluster_key_is_refused() -> None:
    span = ("--pipeline-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")
    for rank in ("0", "1"):
        run: subprocess.CompletedProcess[str] = run_swell(
            "serve", "--port", "0", *ALONE, *span, "--node-rank", rank
        )
        assert run.returncode == 1
        assert "needs --cluster-key-file" in run.stderr
        assert "Traceback" not in run.stderr
