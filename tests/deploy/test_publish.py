"""Publishing a tag: images and a chart that match each other and the sources."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.test_chart import CHART, EXAMPLES, ROOT, helm
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.deploy

WORKFLOW: dict[str, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
)
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def matrix() -> list[dict[str, str]]:
    images: list[dict[str, str]] = WORKFLOW["jobs"]["images"]["strategy"]["matrix"]["include"]
    return images


def test_every_image_is_a_stage_of_the_dockerfile_with_arguments_that_it_has() -> None:
    for image in matrix():
        assert re.search(rf"^FROM \S+ AS {image['target']}$", DOCKERFILE, re.MULTILINE)
        name = image["arguments"].partition("=")[0]
        assert not name or f"ARG {name}" in DOCKERFILE


def test_chart_names_only_published_images() -> None:
    published = {image["image"] for image in matrix()}
    for path in (CHART / "values.yaml", *EXAMPLES):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        named = {
            values[component]["repository"]
            for component in ("api", "coordinator", "engine")
            if values.get(component, {}).get("repository")
        }
        assert named <= published, path.name


def test_only_the_tag_of_the_sources_is_published() -> None:
    (step,) = (each for each in WORKFLOW["jobs"]["version"]["steps"] if "run" in each)
    for tag, expected in (("v0.0.0", 1), (f"v{version()}", 0)):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step["run"]], cwd=ROOT,
            timeout=PATIENCE, check=False,
            capture_output=True, text=True,
            env={
                "PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": tag, "GITHUB_OUTPUT": "/dev/stdout",
                "GITHUB_REPOSITORY_OWNER": "Our-Lab",
            },
        )  # fmt: skip
        assert done.returncode == expected
    assert "registry=ghcr.io/our-lab" in done.stdout, "registries refuse capital letters"


def version() -> str:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    return str(chart["appVersion"])


def test_the_chart_is_packaged_with_the_version(tmp_path: Any) -> None:
    done = helm(
        "package", str(CHART), "--version", "9.8.7", "--app-version", "9.8.7",
        "--destination", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    packed = tmp_path / "swell-9.8.7.tgz"
    done = helm("template", "demo", str(packed), "--kube-version", "1.30.0")
    assert "swell-server:9.8.7" in done.stdout


def test_actions_are_pinned_and_artifacts_are_signed() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values():
            for step in job["steps"]:
                assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), file.name
    for job in ("images", "chart"):
        signs = [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]
        assert any("cosign sign --yes" in each for each in signs), job
