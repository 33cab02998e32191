"""A cluster that speaks IPv6 alone: coordinator, engines, front ends, probes."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.test_nodes_stack import SWELL, complete, engines_of, four_free_ports, wait_until

pytestmark = pytest.mark.stack


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A coordinator on ::1; the flags with which others find it."""
    key = tmp_path / "cluster.key"
    key.write_text("a secret of these tests")
    port = four_free_ports()
    flags = ("--coordinator", f"[::1]:{port}", "--cluster-key-file", str(key))
    health = ("--health-port", str(port + 4))
    with subprocess.Popen(
        [SWELL, "coordinator", *flags, *health], stderr=subprocess.DEVNULL
    ) as coordinator:
        try:
            yield flags
            with urllib.request.urlopen(f"http://[::1]:{port + 4}/ready", timeout=5) as answer:
                assert answer.status == 200
        finally:
            coordinator.terminate()
            assert coordinator.wait(10) == 0


@pytest.mark.parametrize("host", ["::1", "*"])
def test_a_cluster_serves_over_ipv6(flags: tuple[str, ...], host: str) -> None:
    engines = ("--executor", "simulated", "--data-parallel-size-local", "2")
    with RunningStack(*flags, *engines, "--api-server-count", "2", "--host", host) as stack:
        assert stack.url.startswith("http://[::")
        url = f"http://[::1]:{stack.url.rpartition(':')[2]}"
        wait_until(lambda: engines_of(url) == {0, 1}, "both engines are seen")
        complete(url, 6)
        said = subprocess.run(
            [SWELL, "coordinator", flags[0], "::1:7550"], capture_output=True, text=True, timeout=20
        )
        assert said.returncode != 0
        assert "an IPv6 address needs brackets" in said.stdout + said.stderr


def test_engines_that_step_together_meet_over_ipv6(flags: tuple[str, ...]) -> None:
    together = ("--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")
    with RunningStack(
        *flags, *together, "--threads", "1", "--api-server-count", "1", "--host", "::1"
    ) as stack:
        body = json.dumps({"model": "swell-shakespeare", "prompt": "Act", "max_tokens": 8}).encode()
        request = urllib.request.Request(
            f"{stack.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
