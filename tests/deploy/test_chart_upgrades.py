"""Effects of `helm upgrade` on every Kubernetes version: which pods restart, and what changes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from tests.deploy.test_chart import KUBERNETES, Manifest, differing, render

pytestmark = pytest.mark.deploy

API, COORDINATOR, ENGINE = (
    "Deployment/demo-swell-api", "Deployment/demo-swell-coordinator",
    "StatefulSet/demo-swell-engine",
)  # fmt: skip
NUMBERS = "ConfigMap/demo-swell-engines"
SCALERS = {"HorizontalPodAutoscaler/demo-swell-api", "ScaledObject/demo-swell-engine", NUMBERS}
TEST = {"Pod/demo-swell-test"}
SIZES = ("engine.replicas=4", "api.replicas=3")
SCALED = (*SIZES, "engine.autoscaling.enabled=true", "api.autoscaling.enabled=true")


class Upgrade(NamedTuple):
    """Settings before and after, the components that restart, and allowed other changes."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    anew: Iterable[str]
    others: Iterable[str] = ()


KEYS = ("apiKeys", "adminKey", "metricsKey", "clusterKey")
UPGRADES = {
    "model": Upgrade(("model.name=a",), ("model.name=b",), {API, ENGINE}),
    "image": Upgrade((), ("image.tag=0.2.0",), {API, COORDINATOR, ENGINE}, TEST),
    "more engines": Upgrade((), ("engine.replicas=5",), (), {ENGINE, NUMBERS}),
    "to autoscaling": Upgrade(SIZES, SCALED, (), {API, ENGINE, *SCALERS}),
    "back from autoscaling": Upgrade(SCALED, SIZES, (), {API, ENGINE, *SCALERS}),
    "keys": Upgrade(
        tuple(f"{kind}.value=a" for kind in KEYS), tuple(f"{kind}.value=b" for kind in KEYS),
        (), {"Secret/demo-swell"},
    ),
    "to GPUs": Upgrade((), ("engine.gpus=1",), {ENGINE}),
    "more GPUs": Upgrade(("engine.gpus=1",), ("engine.gpus=4",), {ENGINE}),
}  # fmt: skip


def fixed(manifests: list[Manifest]) -> dict[str, Any]:
    """Return the immutable fields of existing workloads."""
    taken = {"replicas", "template", "updateStrategy"}
    kept = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Deployment":
            kept[name] = spec["selector"]
        elif manifest["kind"] == "StatefulSet":
            kept[name] = {field: value for field, value in spec.items() if field not in taken}
    return kept


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("change", UPGRADES)
def test_pods_restart_only_if_affected_by_change(change: str, version: str) -> None:
    upgrade = UPGRADES[change]
    before, after = (
        render(None, *sets, version=version) for sets in (upgrade.before, upgrade.after)
    )
    paths = differing(before, after)
    anew = {path.partition(".")[0] for path in paths if ".spec.template." in path}
    assert anew == set(upgrade.anew)
    assert {path.partition(".")[0] for path in paths} == {*upgrade.anew, *upgrade.others}
    assert fixed(before) == fixed(after)
