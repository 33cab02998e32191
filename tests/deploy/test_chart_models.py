"""The chart during the replacement of a model: neither model is removed too early."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from engine.shared.config import EngineConfig
from engine.shared.group_config import AGREED_IN_LOCKSTEP, AGREED_SETTINGS
from engine.shared.settings import settings_of
from engine.shared.version import PROTOCOL_VERSION
from tests.deploy.fake_kubernetes import FakeKubernetes, fake_kubernetes
from tests.deploy.test_chart import Manifest, environment, find, helm, install, render

pytestmark = pytest.mark.deploy

OLD = ("model.name=old", "model.servedName=chat", "engine.replicas=4")
NEW = ("model.name=new", "model.servedName=chat", "model.group=next", "engine.replicas=6")
BOTH = (*NEW, "previous.model.name=old", "previous.engineReplicas=4")
POOL = ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=picker")


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the engines and API pods, by name."""
    return {
        m["metadata"]["name"]: m
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet") and "engine_group" in m["metadata"]["labels"]
    }


def test_pods_of_old_model_are_unchanged_by_new_model() -> None:
    before, both, after = (workloads(render(None, *sets)) for sets in (OLD, BOTH, NEW))
    names = {"demo-swell-engine", "demo-swell-api"}
    assert before.keys() == names
    assert both.keys() == names | {"demo-swell-engine-next", "demo-swell-api-next"}
    assert after.keys() == {"demo-swell-engine-next", "demo-swell-api-next"}
    for name in names:
        assert both[name] == before[name]
    for name in after:
        assert both[name] == after[name], "the old model's end starts nothing anew"
    assert environment(both["demo-swell-engine-next"])["SWELL_MODEL"] == "new"
    groups = {name: environment(each).get("SWELL_ENGINE_GROUP") for name, each in both.items()}
    assert groups == {name: "next" if name.endswith("next") else None for name in both}, (
        "engines and front ends of one model see only each other"
    )


def least_ready(group: str, *sets: str) -> str:
    """Return the number of engines that a group's starting API pods wait for."""
    manifests = render(None, *sets)
    name = f"demo-swell-api-{group}" if group else "demo-swell-api"
    api = find(manifests, "Deployment", name)
    reference = environment(api)["SWELL_MIN_READY_ENGINES"]["configMapKeyRef"]
    kept = find(manifests, "ConfigMap", reference["name"])["data"]
    assert isinstance(kept[reference["key"]], str)
    return str(kept[reference["key"]])


def test_api_pods_of_a_new_model_wait_for_half_of_its_engines() -> None:
    assert least_ready("", *OLD) == "1"
    assert least_ready("", *BOTH) == "1"
    assert least_ready("next", *BOTH) == "3"
    assert least_ready("next", *NEW) == "1", "pods that come later do not wait for so many"
    assert least_ready("next", *BOTH, "api.minReadyEngines=5") == "5"
    assert least_ready("next", *NEW, "api.minReadyEngines=5") == "5"


def test_previous_model_can_be_null() -> None:
    assert render(None, *NEW, "previous=null") == render(None, *NEW)
    scaled = (*NEW, "engine.autoscaling.enabled=true", *POOL)
    assert render(None, *scaled, "previous=null") == render(None, *scaled)


def test_both_models_share_a_service_and_no_selector_matches_other_model() -> None:
    manifests = render(None, *BOTH)
    service = find(manifests, "Service", "demo-swell")["spec"]["selector"]
    pods = {
        name: each["spec"]["template"]["metadata"]["labels"]
        for name, each in workloads(manifests).items()
    }
    behind = {name for name, labels in pods.items() if service.items() <= labels.items()}
    assert behind == {"demo-swell-api", "demo-swell-api-next"}
    for name, each in workloads(manifests).items():
        wanted = each["spec"]["selector"]["matchLabels"]
        assert [n for n, labels in pods.items() if wanted.items() <= labels.items()] == [name]


def test_settings_of_previous_model_can_be_specified() -> None:
    manifests = render(
        None, *BOTH, "previous.model.servedName=", "previous.model.revision=v1",
        "previous.model.maxLength=512", "previous.apiReplicas=1",
        "previous.engineEnv.SWELL_DTYPE=float32",
    )  # fmt: skip
    engine = find(manifests, "StatefulSet", "demo-swell-engine")
    variables = environment(engine)
    assert engine["metadata"]["annotations"]["swell/agreed"] == (
        "old, v1, max length 512, dtype float32"
    )
    assert (variables["SWELL_REVISION"], variables["SWELL_DTYPE"]) == ("v1", "float32")
    assert "SWELL_SERVED_MODEL_NAME" not in variables
    assert find(manifests, "Deployment", "demo-swell-api")["spec"]["replicas"] == 1


def test_engines_of_old_model_keep_image_and_resources(tmp_path: Path) -> None:
    """More GPUs, nodes and settings of a larger model do not affect the previous one."""
    small = {
        "gpus": 1, "repository": "small", "nodeSelector": {"gpu": "a100"}, "env": {"SWELL_SEED": 1},
        "resources": {
            "requests": {"cpu": 2, "memory": "16Gi"}, "limits": {"cpu": 4, "memory": "16Gi"}
        },
    }  # fmt: skip
    large = {
        "gpus": 8, "repository": "large", "digest": f"sha256:{'0' * 64}", "shmSize": "8Gi",
        "nodeSelector": {"gpu": "h100", "pool": "large"},
        "env": {"SWELL_PIPELINE_PARALLEL_SIZE": 2, "SWELL_DTYPE": "bfloat16"},
    }  # fmt: skip

    def with_engines(sets: tuple[str, ...], **values: object) -> dict[str, Manifest]:
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values), encoding="utf-8")
        return workloads(render(file, *sets))

    before = with_engines(OLD, engine=small)
    kept = {**small, "digest": "", "shmSize": "1Gi"}
    both = with_engines(BOTH, engine=large, previous={"engine": kept})
    after = with_engines(NEW, engine=large)
    assert both["demo-swell-engine"] == before["demo-swell-engine"]
    assert both["demo-swell-engine-next"] == after["demo-swell-engine-next"]
    assert environment(after["demo-swell-engine-next"])["SWELL_TENSOR_PARALLEL_SIZE"] == "4"


def test_only_the_new_models_engines_are_counted_and_scaled() -> None:
    on = ("engine.autoscaling.enabled=true", "api.autoscaling.enabled=true")
    manifests = render(None, *BOTH, *on)
    scaled = find(manifests, "ScaledObject", "demo-swell-engine-next")["spec"]
    assert scaled["scaleTargetRef"]["name"] == "demo-swell-engine-next"
    assert 'engine_group="next"' in scaled["triggers"][0]["metadata"]["query"]
    assert find(manifests, "StatefulSet", "demo-swell-engine")["spec"]["replicas"] == 4
    scaler = find(manifests, "HorizontalPodAutoscaler", "demo-swell-api-next")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "demo-swell-api-next"


def test_coordinator_gets_expected_engines_of_each_model() -> None:
    def expected(*sets: str) -> str:
        kept = find(render(None, *sets), "ConfigMap", "demo-swell-engines")["data"]
        return str(kept["expected"])

    assert expected(*OLD) == "4"
    assert expected(*BOTH) == "next=6,4"
    assert expected(*NEW) == "next=6"
    assert expected(*BOTH, "engine.autoscaling.enabled=true") == "4", "an autoscaler knows best"


def test_two_models_need_two_groups() -> None:
    sets = [part for each in (*OLD, "previous.model.name=older") for part in ("--set", each)]
    done = helm("template", "demo", "helm/swell", "--kube-version", "1.30.0", *sets)
    assert done.returncode != 0
    assert "previous.model.group" in done.stderr


def serve(cluster: FakeKubernetes, kind: str, name: str, **status: int) -> None:
    cluster.objects[f"/apis/apps/v1/namespaces/llm/{kind}/{name}"]["status"] = status


def test_upgrade_that_leaves_no_serving_model_is_refused(
    tmp_path: Path,
) -> None:
    with fake_kubernetes(tmp_path) as (cluster, config):

        def refused(*sets: str) -> str:
            done = install(config, *sets)
            assert done.returncode != 0
            return done.stderr

        def release(*sets: str) -> None:
            done = install(config, *sets)
            assert done.returncode == 0, done.stdout + done.stderr

        release(*OLD)
        serve(cluster, "statefulsets", "demo-swell-engine", readyReplicas=4)
        in_place = refused("model.name=new", *OLD[1:])
        assert "previous.model.name" in in_place
        assert '"old"' in in_place
        assert "model.group" in in_place
        assert "no API pod of demo-swell-api-next is ready" in refused(*NEW)
        release(*BOTH)
        serve(cluster, "statefulsets", "demo-swell-engine-next", readyReplicas=2)
        assert "is ready" in refused(*NEW), "half of the engines are not ready yet"
        serve(cluster, "deployments", "demo-swell-api-next", availableReplicas=2)
        release(*NEW)
        paths = [path for path in cluster.objects if "statefulsets" in path]
        assert [path.rsplit("/", 1)[-1] for path in paths] == ["demo-swell-engine-next"]
        assert set(cluster.replicas_seen["demo-swell-engine"]) == {4}


def test_upgrade_with_pause_can_be_allowed(tmp_path: Path) -> None:
    with fake_kubernetes(tmp_path) as (cluster, config):
        assert install(config, *OLD).returncode == 0
        serve(cluster, "statefulsets", "demo-swell-engine", readyReplicas=4)
        done = install(config, *NEW, "allowPause=true")
        assert done.returncode == 0, done.stderr


def test_an_upgrade_over_several_protocols_is_refused_while_the_coordinator_runs(
    tmp_path: Path,
) -> None:
    def to(version: int) -> subprocess.CompletedProcess[str]:
        return install(config, f"image.protocol={version}")

    newest, step = PROTOCOL_VERSION, PROTOCOL_VERSION - 1
    with fake_kubernetes(tmp_path) as (cluster, config):
        assert to(newest - 2).returncode == 0
        assert to(newest).returncode == 0, "nothing runs yet"
        assert to(newest - 2).returncode == 0
        serve(cluster, "deployments", "demo-swell-coordinator", readyReplicas=1)
        refused = to(newest)
        assert refused.returncode != 0
        assert f"Upgrade to a version that speaks protocol {step} first" in refused.stderr
        assert to(step).returncode == 0
        serve(cluster, "deployments", "demo-swell-coordinator", readyReplicas=1)
        assert to(newest).returncode == 0


def test_the_chart_and_the_images_state_the_protocol_of_the_code() -> None:
    annotations = yaml.safe_load(Path("helm/swell/Chart.yaml").read_text())["annotations"]
    assert annotations["swell/protocol"] == str(PROTOCOL_VERSION)
    label = f"LABEL swell.protocol={PROTOCOL_VERSION}"
    assert label in Path("docker/Dockerfile").read_text().splitlines()
    coordinator = find(render(None), "Deployment", "demo-swell-coordinator")
    assert coordinator["metadata"]["annotations"]["swell/protocol"] == str(PROTOCOL_VERSION)


@pytest.mark.parametrize("setting", [*AGREED_SETTINGS, *AGREED_IN_LOCKSTEP])
def test_upgrade_guard_covers_every_setting_engines_compare(setting: str) -> None:
    name = f"SWELL_{setting.upper()}"
    assert name in {each.variable for each in settings_of(EngineConfig)}

    def agreed(*sets: str) -> str:
        engine = find(render(None, "engine.expertParallel=true", *sets), "StatefulSet",
                      "demo-swell-engine")  # fmt: skip
        text: str = engine["metadata"]["annotations"]["swell/agreed"]
        return text

    default = agreed()
    extra = (f"engine.extraEnv[0].name={name}", "engine.extraEnv[0].value=7")
    assert f"{setting} 7" in agreed(f"engine.env.{name}=7")
    assert agreed(*extra) == agreed(f"engine.env.{name}=7") != default


def test_upgrade_guard_reads_settings_of_config_map(tmp_path: Path) -> None:
    from_map = ("engine.replicas=2", "engine.envFrom[0].configMapRef.name=engines")
    path = "/api/v1/namespaces/llm/configmaps/engines"
    with fake_kubernetes(tmp_path) as (cluster, config):
        settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "engines"}}
        cluster.objects[path] = {**settings, "data": {"SWELL_KV_CACHE_DTYPE": "auto"}}
        assert install(config, *from_map).returncode == 0
        serve(cluster, "statefulsets", "demo-swell-engine", readyReplicas=2)
        cluster.objects[path]["data"]["SWELL_KV_CACHE_DTYPE"] = "fp8"
        refused = install(config, *from_map)
        assert refused.returncode != 0
        assert "kv_cache_dtype fp8" in refused.stderr
