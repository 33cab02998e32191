"""`docker-compose up` from a clean checkout, on a real Docker engine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.deploy.conftest import API_KEY, METRICS_KEY, Compose
from tests.deploy.docker_engine import Docker
from tests.deploy.test_chart import render
from tests.support.http import MODEL, fetch
from tests.support.load import Load
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

MEGABYTE = 1e6


def post(compose: Compose, path: str, body: dict[str, object], timeout: float = 60.0) -> str:
    answer = fetch(f"{compose.url}{path}", {"model": MODEL, **body}, key=API_KEY, timeout=timeout)
    assert answer.status == 200, answer
    return answer.text


def query(compose: Compose, expression: str) -> list[dict[str, object]]:
    status, text, _ = fetch(f"{compose.prometheus}/api/v1/query?query={quote(expression)}")
    return json.loads(text)["data"]["result"] if status == 200 else []


def test_both_endpoints_answer_from_the_host(compose: Compose) -> None:
    print("seconds:", {name: round(took, 1) for name, took in compose.timings.items()})
    completion = json.loads(post(compose, "/v1/completions", {"prompt": "ROMEO:", "max_tokens": 8}))
    assert completion["usage"]["completion_tokens"] == 8
    chat = {"messages": [{"role": "user", "content": "Good morrow"}], "max_tokens": 8}
    answered = json.loads(post(compose, "/v1/chat/completions", chat))
    assert answered["choices"][0]["message"]["content"]
    streamed = post(compose, "/v1/chat/completions", {**chat, "stream": True})
    assert streamed.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", METRICS_KEY, 401),
        ("/v1/models", API_KEY, 200),
        ("/metrics", None, 401),
        ("/metrics", METRICS_KEY, 200),
        ("/status.json", None, 401),
        ("/docs", None, 401),
        ("/ready", None, 200),
    ],
)
def test_each_key_grants_access_to_its_paths(
    compose: Compose, path: str, key: str | None, status: int
) -> None:
    assert fetch(f"{compose.url}{path}", key=key)[0] == status


def test_chart_test_pod_passes_on_running_stack(compose: Compose) -> None:
    pod = next(m for m in render(None, f"apiKeys.value={API_KEY}") if m["kind"] == "Pod")
    (container,) = pod["spec"]["containers"]
    assert {entry["name"] for entry in container["env"]} == {"URL", "API_KEYS"}
    done = subprocess.run(
        [sys.executable, *container["command"][1:]],
        env={"URL": compose.url, "API_KEYS": API_KEY}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "completion_tokens" in done.stdout


def test_image_with_torch_contains_nothing_unneeded(compose: Compose) -> None:
    size = int(compose.docker.inspect("swelltest-engine:test", "{{.Size}}")) / MEGABYTE
    print(f"engine: {size:.0f} MB")
    assert size < 1300


@pytest.mark.parametrize(("kind", "limit"), [("coordinator", 250), ("server", 390)])
def test_images_without_torch_are_small(compose: Compose, kind: str, limit: int) -> None:
    image = f"swelltest-{kind}:test"
    size = int(compose.docker.inspect(image, "{{.Size}}")) / MEGABYTE
    print(f"{kind}: {size:.0f} MB")
    assert size < limit
    search = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    found = compose.docker.run(
        "docker", "run", "--rm", "--entrypoint", "python3", image, "-c", search
    )
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("coordinator", "listening on"),
        ("engine", "waiting for the coordinator"),
        ("server", "waiting for the coordinator"),
    ],
)
def test_single_container_reports_health_and_exits_at_sigterm(
    compose: Compose, kind: str, said: str
) -> None:
    docker, name = compose.docker, f"swelltest-alone-{kind}"
    config = json.loads(docker.inspect(f"swelltest-{kind}:test", "{{json .Config}}"))
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["swell"]
    assert config["Healthcheck"]["Test"][:5] == ["CMD", "python3", "-P", "-m", "engine.probe"]
    # As PID 1, without an init process that would forward signals.
    docker.output(
        "docker", "run", "-d", "--name", name, "--read-only", "--tmpfs", "/tmp",
        "-e", "SWELL_INSECURE_CLUSTER=true", "-e", "SWELL_LOG_LEVEL=debug",
        f"swelltest-{kind}:test",
    )  # fmt: skip
    try:
        until(lambda: said in docker.output("docker", "logs", name), said)
        health = "{{.State.Health.Status}}"
        expected = "healthy" if kind == "coordinator" else "starting"
        until(lambda: docker.inspect(name, health) == expected, expected)
        began = time.monotonic()
        docker.output("docker", "stop", "-t", "60", name)
        assert time.monotonic() - began < 60
        assert docker.inspect(name, "{{.State.ExitCode}}") == "0"
    finally:
        docker.output("docker", "rm", "-f", name)


@pytest.mark.parametrize("service", ["coordinator", "engine", "api"])
def test_processes_run_with_least_privileges(compose: Compose, service: str) -> None:
    (container, *_) = compose.containers(service)
    print(service, compose.docker.inspect(container, "{{.Image}} {{.State.StartedAt}}"))
    status = compose.docker.output("docker", "exec", container, "cat", "/proc/1/status")
    assert re.search(r"^Uid:\s+10001\s", status, re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    refused = compose.docker.run("docker", "exec", container, "touch", "/opt/swell/x")
    assert "Read-only file system" in refused.stdout


def test_engines_compile_nothing_in_their_containers(compose: Compose) -> None:
    installed, kept = "/opt/swell/share/swell/kernels", "/tmp/.cache/swell/kernels"
    for container in compose.containers("engine"):
        found = compose.docker.output(
            "docker", "exec", container, "sh", "-c",
            f"cd {kept} && for target in *; do echo $target;"
            f" diff -r -x '*.lock' {installed}/$target $target; done",
        )  # fmt: skip
        (target,) = found.splitlines()
        print("kernels of the image:", target)


def test_containers_become_healthy(compose: Compose) -> None:
    for service in ("coordinator", "engine", "api"):
        for container in compose.containers(service):
            until(
                lambda which=container: (  # type: ignore[misc]
                    compose.docker.inspect(which, "{{.State.Health.Status}}") == "healthy"
                ),
                f"{service} is healthy",
            )


def test_prometheus_scrapes_series_of_both_engines_and_wave(compose: Compose) -> None:
    def engines() -> set[object]:
        series = query(compose, "swell_num_requests_running")
        return {entry["metric"]["engine"] for entry in series}  # type: ignore[index]

    until(lambda: engines() >= {"0", "1"}, "series of both engines")
    assert query(compose, "swell_wave")


def test_prometheus_has_loaded_the_alert_rules(compose: Compose) -> None:
    until(lambda: bool(query(compose, "swell_wave")), "a scrape")

    def health() -> set[str]:
        groups = json.loads(fetch(f"{compose.prometheus}/api/v1/rules")[1])["data"]["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}

    until(lambda: health() == {"ok"}, "all rules are evaluated")


def test_promtool_accepts_the_scrape(compose: Compose) -> None:
    metrics = compose.metrics()
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=metrics, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    found = set((checked.stdout + checked.stderr).splitlines())
    # A histogram name given by vLLM; any other finding is our fault.
    vllms = 'swell_iteration_tokens_total non-counter metrics should not have "_total" suffix'
    assert found <= {vllms}
    assert checked.returncode in (0, 3)  # 3: findings of style alone


def test_third_engine_joins_and_serves(compose: Compose) -> None:
    compose("up", "-d", "--no-recreate", "--scale", "engine=3", "engine")
    took = until(lambda: len(compose.engines_up()) == 3, "three engines")
    print(f"third engine after {took:.1f} s")


def test_killing_an_engine_under_load_loses_no_request(compose: Compose) -> None:
    with Load(compose.url, 8, API_KEY).running() as load:
        load.goes_on()
        victim = compose.containers("engine")[0]
        started = compose.docker.inspect(victim, "{{.State.StartedAt}}")
        # Not `docker kill`, after which the restart policy would leave it stopped.
        os.kill(int(compose.docker.inspect(victim, "{{.State.Pid}}")), signal.SIGKILL)
        load.goes_on()
        until(
            lambda: (
                compose.docker.inspect(victim, "{{.State.StartedAt}}") != started
                and compose.docker.inspect(victim, "{{.State.Running}}") == "true"
            ),
            "the engine is started again",
        )
    load.check()
    print(f"{load.count} answers, none lost")


def test_replacing_every_engine_under_load_loses_no_request(compose: Compose) -> None:
    old = compose.containers("engine")
    with Load(compose.url, 4, API_KEY).running() as load:
        load.goes_on()
        size = len(old) + 2
        compose("up", "-d", "--no-deps", "--no-recreate", "--scale", f"engine={size}", "engine")
        until(lambda: len(compose.engines_up()) == size, "new ones")
        compose.docker.output("docker", "stop", "-t", "40", *old)
        codes = {compose.docker.inspect(each, "{{.State.ExitCode}}") for each in old}
        compose.docker.output("docker", "rm", *old)
        until(lambda: len(compose.engines_up()) == 2, "two left")
        load.goes_on()
    assert codes == {"0"}
    load.check()


@pytest.mark.parametrize("service", ["engine", "api", "coordinator"])
def test_stopped_container_exits_cleanly_and_quickly(compose: Compose, service: str) -> None:
    container = compose.containers(service)[-1]
    compose.docker.output("docker", "stop", "-t", "20", container)
    assert compose.docker.inspect(container, "{{.State.ExitCode}}") == "0"
    began = compose.docker.inspect(container, "{{.State.FinishedAt}}")
    assert began
    compose.docker.output("docker", "start", container)
    until(
        lambda: compose.docker.inspect(container, "{{.State.Health.Status}}") == "healthy",
        f"{service} is healthy again",
    )


def test_compose_files_are_valid_for_both_versions_of_compose(
    docker: Docker, checkout: Path
) -> None:
    commands = [("docker-compose",)]
    if docker.run("docker", "compose", "version").returncode == 0:
        commands.append(("docker", "compose"))  # type: ignore[arg-type]
    for command in commands:
        for kinds in ((), ("cuda.",), ("vllm.",), ("cuda.", "vllm.")):
            files = [checkout / "docker" / f"compose.{kind}yaml" for kind in ("", *kinds)]
            named = [part for file in files for part in ("-f", str(file))]
            said = docker.output(*command, *named, "config", ENGINES="4")
            assert "engine.probe" in said
            assert re.search(r"replicas: [14]\b", said)
            assert ("engine-vllm:" in said) == ("vllm." in kinds)
