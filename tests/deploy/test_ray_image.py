"""The image for Ray: a cluster of its containers runs the job of the KubeRay manifest."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.conftest import API_KEY, Compose
from tests.deploy.docker_engine import BASE_IMAGE, Docker
from tests.deploy.test_kuberay import manifests
from tests.support.http import fetch
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

IMAGE = "swelltest-ray:test"
NETWORK = "swelltest-ray"
STARTING = 3 * PATIENCE


@pytest.fixture
def ray_image(project: Compose) -> Iterator[Docker]:
    """The engine, with the image for Ray."""
    project.docker.output(
        "docker", "build", "-f", str(project.checkout / "docker" / "Dockerfile"), "--target", "ray",
        "--build-arg", f"BASE_IMAGE={BASE_IMAGE}", "--build-arg", "PIP_NO_INDEX=1",
        "--build-arg", "TORCH_INDEX_URL=", "-t", IMAGE, str(project.checkout), timeout=900,
    )  # fmt: skip
    yield project.docker
    project.docker.run("docker", "image", "rm", "-f", IMAGE)


def entrypoint() -> str:
    """Return the job's command, with simulated engines that fit on a small node."""
    command: str = manifests()["RayJob"]["spec"]["entrypoint"]
    for ours, here in (
        ("/models/my-model", "--executor simulated"),
        ("--data-parallel-size 4", "--data-parallel-size 2"),
    ):
        assert ours in command
        command = command.replace(ours, here)
    return command


def test_a_job_serves_with_its_engines_on_another_node(ray_image: Docker, tmp_path: Path) -> None:
    docker = ray_image
    tmp_path.chmod(0o755)
    for name, key in (("cluster-key", "a secret of the cluster"), ("api-keys", API_KEY)):
        (tmp_path / name).write_text(f"{key}\n")
        (tmp_path / name).chmod(0o644)
    head_pod = manifests()["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    user = head_pod["spec"]["securityContext"]
    head, worker = "swelltest-head", "swelltest-worker"

    def shell(node: str, command: str) -> "subprocess.CompletedProcess[str]":
        return docker.run("docker", "exec", node, "/bin/bash", "-lc", command)

    with ExitStack() as running:
        docker.output("docker", "network", "create", NETWORK)
        running.callback(docker.run, "docker", "network", "rm", NETWORK)
        for node, command in (
            (head, "ray start --head --dashboard-host 0.0.0.0"),
            (worker, f"ray start --address {head}:6379"),
        ):
            running.callback(docker.run, "docker", "rm", "-f", node)
            # As KubeRay does: in a login shell, as the user of the manifest.
            docker.output(
                "docker", "run", "-d", "--name", node, "--network", NETWORK, "--shm-size", "1g",
                "--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--cap-drop", "ALL",
                "--security-opt", "no-new-privileges",
                "-v", f"{tmp_path}:/run/secrets/swell:ro", IMAGE,
                "/bin/bash", "-lc", "--", f"ulimit -n 65536; {command} --num-cpus 2 --block",
            )  # fmt: skip
        submit = f"ray job submit --address http://{head}:8265 --no-wait -- {entrypoint()}"
        until(
            lambda: shell(head, submit).returncode == 0,
            "Ray takes the job", within=STARTING, interval=1,
        )  # fmt: skip
        address = docker.inspect(
            head, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        )  # fmt: skip
        url = f"http://{address}:8000"
        try:
            until(lambda: fetch(f"{url}/ready").status == 200, "it serves", STARTING, interval=1)
        except AssertionError:
            print(shell(head, "tail -n 40 /tmp/ray/session_latest/logs/job-driver*").stdout)
            raise
        answer = fetch(
            f"{url}/v1/completions", {"prompt": "ROMEO:", "max_tokens": 2}, key=API_KEY
        )  # fmt: skip
        assert answer.status == 200, answer
        processes = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        assert "swell: engine" in shell(worker, processes).stdout
        assert "swell: engine" not in shell(head, processes).stdout
