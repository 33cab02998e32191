"""The KubeRay manifest is valid for RayJob and Kubernetes, and its flags exist."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from engine.shared.settings import settings_of
from server.config import ServeConfig
from tests.deploy.kubernetes_schemas import validate

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]


def manifests() -> dict[str, Any]:
    """Return the objects by kind."""
    import yaml

    text = (ROOT / "docs/kuberay.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_kuberay_accepts_the_job_and_kubernetes_its_pods() -> None:
    import jsonschema

    found = manifests()
    assert set(found) == {"RayJob", "Service"}
    job = found["RayJob"]
    jsonschema.validate(job, json.loads(Path(__file__).with_name("rayjob.schema.json").read_text()))
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        metadata = {"name": "x", **group["template"].get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        pod["spec"] = group["template"]["spec"]
        validate(pod, "1.30")
    validate(found["Service"], "1.30")
    labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()


def test_service_recovers_with_keys_after_loss_of_its_head() -> None:
    spec = manifests()["RayJob"]["spec"]
    assert spec["backoffLimit"] >= 1000, "each retry is a new cluster with a new head"
    words = shlex.split(spec["entrypoint"])
    assert {"--cluster-key-file", "--api-key-file"} <= set(words)
    cluster = spec["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert {"readinessProbe", "livenessProbe"} <= head["containers"][0].keys()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"]


def test_entrypoint_uses_existing_flags() -> None:
    words = shlex.split(manifests()["RayJob"]["spec"]["entrypoint"])
    assert words[:2] == ["swell", "serve"]
    flags = {setting.flag for setting in settings_of(ServeConfig)}
    assert {word for word in words if word.startswith("--")} <= flags
