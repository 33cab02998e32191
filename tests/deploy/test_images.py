"""The API server image supports more than HTTP without installing anything into it."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.deploy.conftest import Compose
from tests.deploy.containers import SUBNET, Fleet
from tests.deploy.test_changes_in_containers import COORDINATOR, SIMULATED, ready
from tests.server.observe.test_tracing import Collector
from tests.support.http import fetch
from tests.support.waiting import until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_traces_of_requests_leave_the_image(project: Compose, running: ExitStack) -> None:
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


def test_responses_can_be_kept_in_a_database(project: Compose) -> None:
    found = project.docker.run(
        "docker", "run", "--rm", "--entrypoint", "python3", "swelltest-server:test", "-c",
        "import psycopg; assert psycopg.pq.__impl__ == 'binary'",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
