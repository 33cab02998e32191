"""What is in the images, and how a cluster gets them."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.deploy.conftest import Compose
from tests.deploy.containers import SUBNET, Fleet
from tests.deploy.test_changes_in_containers import COORDINATOR, SIMULATED, ready
from tests.deploy.test_chart import pods, render
from tests.server.observe.test_tracing import Collector
from tests.support.http import fetch
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_request_traces_are_exported_from_image(project: Compose, running: ExitStack) -> None:
    fleet = Fleet(project.docker, running, (), ("--insecure-cluster",))
    # The container network's gateway is this machine.
    collector = running.enter_context(closing(Collector(f"{SUBNET}.1")))
    join = ("--coordinator", f"{COORDINATOR}:7550")
    fleet.start("coordinator", "--coordinator", "*:7550", alias=COORDINATOR)
    fleet.start("engine", *join, *SIMULATED)
    front = fleet.start("api-server", *join, "--otlp-traces-endpoint", collector.url)
    answer = fetch(
        f"{ready(front)}/v1/completions", {"prompt": "ROMEO:", "max_tokens": 2},
    )  # fmt: skip
    assert answer.status == 200

    def of_requests() -> list[Span]:
        return [each for each in collector.spans if not each.parent_span_id]

    until(of_requests, "a span arrives", interval=0.2)
    (span,) = of_requests()
    attributes = {each.key: each.value.int_value for each in span.attributes}
    assert attributes["gen_ai.usage.completion_tokens"] == 2


def test_responses_can_be_stored_in_a_database(project: Compose) -> None:
    found = project.docker.run(
        "docker", "run", "--rm", "--entrypoint", "python3", "swelltest-server:test", "-c",
        "import psycopg; assert psycopg.pq.__impl__ == 'binary'",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("kind", ["server", "engine", "coordinator"])
def test_doctor_passes_in_image(project: Compose, kind: str) -> None:
    report = project.docker.run(
        "docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--memory", "3g",
        "--entrypoint", "swell", f"swelltest-{kind}:test", "doctor",
    )  # fmt: skip
    assert report.returncode == 0, report.stdout
    needed = {"server": "packages of API servers", "engine": "packages of engines"}.get(kind)
    assert needed is None or f"ok    {needed}" in report.stdout, report.stdout


def test_chart_pulls_the_pushed_image(project: Compose, running: ExitStack, tmp_path: Path) -> None:
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no registry is installed (Debian: docker-registry)")
    address = f"127.0.0.1:{free_port()}"
    settings = tmp_path / "registry.yaml"
    settings.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/images}}}}\n"
        f"http: {{addr: '{address}'}}\nlog: {{level: error}}\n"
    )
    registry = running.enter_context(subprocess.Popen([program, "serve", str(settings)]))
    running.callback(registry.kill)
    until(lambda: fetch(f"http://{address}/v2/").status == 200, "the registry answers")

    published = f"image.registry={address}/llm"
    manifests = render(None, published)
    pulled = {each["image"] for _, pod in pods(manifests) for each in pod["containers"]}
    output = project.docker.output
    digests = {}
    for image in pulled:
        kind = image.rpartition("/")[2].partition(":")[0].removeprefix("swell-")
        running.callback(project.docker.run, "docker", "image", "rm", "-f", image)
        output("docker", "tag", f"swelltest-{kind}:test", image)
        output("docker", "push", image, timeout=10 * PATIENCE)
        digests[kind] = project.docker.inspect(image, "{{index .RepoDigests 0}}").partition("@")[2]
        output("docker", "image", "rm", image)
    assert set(digests) == {"coordinator", "server", "engine"}

    by_digest = (
        f"{values}.digest={digests[kind]}"
        for kind, values in (
            ("coordinator", "coordinator"),
            ("server", "api"),
            ("engine", "engine"),
        )
    )
    pinned = {
        each["image"]
        for _, pod in pods(render(None, published, *by_digest))
        for each in pod["containers"]
    }
    for image in pulled | pinned:
        output("docker", "pull", image, timeout=10 * PATIENCE)
        assert "serve" in output("docker", "run", "--rm", image, "--help")
