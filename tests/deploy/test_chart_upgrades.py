"""What `helm upgrade` changes, on every version: which pods start anew, and what else."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.deploy.test_chart import KUBERNETES, differing, render

pytestmark = pytest.mark.deploy

API, COORDINATOR, ENGINE = (
    "Deployment/demo-swell-api", "Deployment/demo-swell-coordinator",
    "StatefulSet/demo-swell-engine",
)  # fmt: skip
SCALERS = {"HorizontalPodAutoscaler/demo-swell-api", "ScaledObject/demo-swell-engine"}
TEST = {"Pod/demo-swell-test"}
SIZES = ("engine.replicas=4", "api.replicas=3")
SCALED = (*SIZES, "engine.autoscaling.enabled=true", "api.autoscaling.enabled=true")


class Upgrade(NamedTuple):
    """Settings before and after, whose pods start anew, and what else may change."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    anew: Iterable[str]
    others: Iterable[str] = ()


UPGRADES = {
    "model": Upgrade(("model.name=a",), ("model.name=b",), {API, ENGINE}),
    "image": Upgrade((), ("image.tag=0.2.0",), {API, COORDINATOR, ENGINE}, TEST),
    "to autoscaling": Upgrade(SIZES, SCALED, {COORDINATOR}, {API, ENGINE, *SCALERS}),
    "back from autoscaling": Upgrade(SCALED, SIZES, {COORDINATOR}, {API, ENGINE, *SCALERS}),
    "keys": Upgrade(
        ("apiKeys.value=a", "adminKey.value=a", "clusterKey.value=a"),
        ("apiKeys.value=b", "adminKey.value=b", "clusterKey.value=b"), (), {"Secret/demo-swell"},
    ),
    "to GPUs": Upgrade((), ("engine.gpus=1",), {ENGINE}),
    "more GPUs": Upgrade(("engine.gpus=1",), ("engine.gpus=4",), {ENGINE}),
}  # fmt: skip


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("change", UPGRADES)
def test_pods_start_anew_only_where_a_change_concerns_them(change: str, version: str) -> None:
    upgrade = UPGRADES[change]
    before, after = (
        render(None, *sets, version=version) for sets in (upgrade.before, upgrade.after)
    )
    paths = differing(before, after)
    anew = {path.partition(".")[0] for path in paths if ".spec.template." in path}
    assert anew == set(upgrade.anew)
    assert {path.partition(".")[0] for path in paths} == {*upgrade.anew, *upgrade.others}


@pytest.mark.parametrize("version", KUBERNETES)
def test_what_an_upgrade_may_not_change_it_does_not(version: str) -> None:
    """Kubernetes refuses other fields of a StatefulSet, and another selector of a Deployment."""
    taken = {"replicas", "template", "updateStrategy"}
    for upgrade in UPGRADES.values():
        before, after = (
            {
                (m["kind"], m["metadata"]["name"]): m["spec"]
                for m in render(None, *sets, version=version)
                if m["kind"] in ("Deployment", "StatefulSet")
            }
            for sets in (upgrade.before, upgrade.after)
        )
        assert before.keys() == after.keys()
        for (kind, name), spec in before.items():
            later = after[kind, name]
            assert spec["selector"] == later["selector"]
            if kind == "StatefulSet":
                fixed = (spec.keys() | later.keys()) - taken
                assert {f: spec.get(f) for f in fixed} == {f: later.get(f) for f in fixed}
