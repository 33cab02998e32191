"""Engines on several nodes: a LeaderWorkerSet whose pods run an engine and its workers."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.fake_kubernetes import fake_kubernetes
from tests.deploy.kubernetes_schemas import validate
from tests.deploy.namespaces import Network, network_or_skip
from tests.deploy.test_chart import (
    CHART,
    KUBERNETES,
    Manifest,
    environment,
    find,
    install,
    render,
    templates,
)
from tests.deploy.test_chart_models import serve
from tests.deploy.test_chart_values import refused
from tests.deploy.test_several_nodes import FAR, HEAD, NEAR, Cluster, Process
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.deploy

EXAMPLE = CHART / "examples" / "multi-node.yaml"
SET = "LeaderWorkerSet"
STAGES = "SWELL_PIPELINE_PARALLEL_SIZE"


def engines(
    *settings: str, values: Path | None = None, name: str = "demo-swell-engine"
) -> Manifest:
    return find(render(values, *settings), SET, name)


def variables(template: Manifest) -> dict[str, Any]:
    """Return the variables of the engine's container in a pod."""
    entries = template["spec"]["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def of_label(name: str) -> dict[str, Any]:
    label = f"leaderworkerset.sigs.k8s.io/{name}"
    return {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}


# -- what is rendered ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("engine.autoscaling.enabled=true",),
        ("engine.updateStrategy.maxUnavailable=50%", "engine.updateStrategy.partition=1"),
        ("engine.modelClaim.accessModes[0]=ReadWriteOnce",
         "engine.modelClaim.resources.requests.storage=900Gi"),
        ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=picker"),
    ],
)  # fmt: skip
def test_controller_accepts_the_set_and_kubernetes_its_pods(
    settings: tuple[str, ...], version: str
) -> None:
    import jsonschema

    found = find(render(EXAMPLE, *settings, version=version), SET, "demo-swell-engine")
    schema = Path(__file__).with_name("leaderworkerset.schema.json").read_text(encoding="utf-8")
    jsonschema.validate(found, json.loads(schema))
    for template in templates(found):
        metadata = {"name": "x", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        validate(pod, version)
    for claim in found["spec"]["leaderWorkerTemplate"].get("volumeClaimTemplates", ()):
        whole = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
        validate(whole, version)


def test_leader_pod_is_the_engine_and_others_find_it() -> None:
    spec = engines(values=EXAMPLE)["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None", "the others wait"
    leader, worker = templates(engines(values=EXAMPLE))
    of_leader, of_worker = variables(leader), variables(worker)
    own = {"SWELL_MASTER_ADDR", "SWELL_NODE_RANK", "SWELL_DATA_PARALLEL_RANK"}
    assert {name: of_leader[name] for name in of_leader.keys() - own} == {
        name: of_worker[name] for name in of_worker.keys() - own
    }
    assert (of_leader["SWELL_NNODES"], of_leader[STAGES]) == ("2", "2")
    assert of_leader["SWELL_TENSOR_PARALLEL_SIZE"] == "8"
    assert of_leader["SWELL_DATA_PARALLEL_SIZE"] == "1"
    assert of_leader["SWELL_DATA_PARALLEL_RANK"] == of_label("group-index")
    assert "SWELL_DATA_PARALLEL_RANK" not in of_worker
    assert of_leader["SWELL_MASTER_ADDR"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert of_worker["SWELL_MASTER_ADDR"] == "$(LWS_LEADER_ADDRESS)"
    assert of_worker["SWELL_NODE_RANK"] == of_label("worker-index")
    assert "SWELL_NODE_RANK" not in of_leader
    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & (
        worker["spec"]["containers"][0].keys()
    ), "workers answer nobody"
    assert leader["metadata"]["labels"] == worker["metadata"]["labels"]


def test_pipeline_stages_and_tensor_shards_use_all_gpus_of_nodes() -> None:
    def layout(*settings: str) -> tuple[str, str]:
        found = environment(engines("engine.nodes=2", *settings))
        return found[STAGES], found.get("SWELL_TENSOR_PARALLEL_SIZE", "1")

    assert layout("engine.gpus=8") == ("2", "8")
    assert layout("engine.gpus=8", f"engine.env.{STAGES}=4") == ("4", "4")
    assert layout("engine.gpus=1") == ("2", "1")
    assert layout() == ("2", "1")
    assert STAGES in refused("engine.nodes=2", f"engine.env.{STAGES}=3")
    assert STAGES in refused("engine.nodes=2", "engine.gpus=3", f"engine.env.{STAGES}=4")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("engine.expertParallel=true", "expertParallel"),
        ("engine.updateStrategy.type=OnDelete", "updateStrategy"),
        ("engine.env.SWELL_MASTER_ADDR=10.0.0.1", "SWELL_MASTER_ADDR"),
        ("engine.env.SWELL_DATA_PARALLEL_SIZE=2", "SWELL_DATA_PARALLEL_SIZE"),
        ("engine.leaderWorkerSet=true", "leaderWorkerSet"),
    ],
)
def test_unsupported_settings_of_multi_node_engines_are_refused_by_name(
    setting: str, named: str
) -> None:
    assert named in refused("engine.nodes=2", setting)


def test_the_autoscaler_scales_the_set() -> None:
    manifests = render(None, "engine.nodes=2", "engine.autoscaling.enabled=true")
    target = find(manifests, "ScaledObject", "demo-swell-engine")["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": SET, "name": "demo-swell-engine"
    }  # fmt: skip
    assert "replicas" not in find(manifests, SET, "demo-swell-engine")["spec"]


def test_inference_gateway_sends_to_leader_pods() -> None:
    pool = ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=picker")
    manifests = render(None, "engine.nodes=2", *pool)
    leader, worker = templates(find(manifests, SET, "demo-swell-engine"))
    assert [each["name"] for each in leader["spec"]["containers"]] == ["engine", "api"]
    assert [each["name"] for each in worker["spec"]["containers"]] == ["engine"]
    (chosen,) = (each for each in manifests if each["kind"] == "InferencePool")
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    assert chosen["spec"]["selector"]["matchLabels"][index] == "0"


def test_multi_node_model_replaces_single_node_model(tmp_path: Path) -> None:
    before = ("model.name=small",)
    large = ("model.name=large", "model.group=next", "engine.nodes=2")
    both = (*large, "previous.model.name=small", "previous.engine.nodes=1")
    old = find(render(None, *before), "StatefulSet", "demo-swell-engine")
    manifests = render(None, *both)
    assert find(manifests, "StatefulSet", "demo-swell-engine") == old
    assert find(manifests, SET, "demo-swell-engine-next") == engines(
        *large, name="demo-swell-engine-next"
    )
    with fake_kubernetes(tmp_path) as (cluster, config):
        assert install(config, *before).returncode == 0
        serve(cluster, "statefulsets", "demo-swell-engine", readyReplicas=2)
        for sets in ((*before, "engine.nodes=2"), ("model.name=large", "engine.nodes=2")):
            said = install(config, *sets).stderr
            assert "engine.nodes, engine.kind: demo-swell-engine is a StatefulSet" in said
            assert "previous.model.group=" in said
        assert install(config, *both).returncode == 0
        path = f"/apis/{SET_PATH}/namespaces/llm/leaderworkersets/demo-swell-engine-next"
        cluster.objects[path]["status"] = {"readyReplicas": 2}
        # StatefulSets made by its controller have its name and labels but are not the chart's.
        made = json.loads(json.dumps(cluster.objects[path]))
        made["metadata"]["ownerReferences"] = [{"kind": SET, "name": "demo-swell-engine-next"}]
        same = "/apis/apps/v1/namespaces/llm/statefulsets/demo-swell-engine-next"
        cluster.objects[same] = {**made, "kind": "StatefulSet", "apiVersion": "apps/v1"}
        serve(cluster, "deployments", "demo-swell-api-next", availableReplicas=2)
        done = install(config, *large)
        assert done.returncode == 0, done.stderr
        back = install(config, "model.name=large", "model.group=next")
        assert f"demo-swell-engine-next is a {SET}" in back.stderr
        other = install(config, "model.name=small")
        assert "demo-swell-engine-next serves" in other.stderr, "it is not taken away yet"


SET_PATH = "leaderworkerset.x-k8s.io/v1"


def test_replicas_of_a_set_that_an_autoscaler_has_chosen_are_kept(tmp_path: Path) -> None:
    with fake_kubernetes(tmp_path) as (cluster, config):
        on = ("engine.nodes=2", "engine.autoscaling.enabled=true")
        assert install(config, "engine.nodes=2", "engine.replicas=3").returncode == 0
        assert install(config, *on).returncode == 0
        path = f"/apis/{SET_PATH}/namespaces/llm/leaderworkersets/demo-swell-engine"
        assert cluster.objects[path]["spec"]["replicas"] == 3
        cluster.objects[path]["spec"]["replicas"] = 5  # the autoscaler's doing
        assert install(config, *on, "engine.env.SWELL_SEED=1").returncode == 0
        assert cluster.objects[path]["spec"]["replicas"] == 5
        assert "--set engine.replicas=5" in install(config, "engine.nodes=2").stderr


# -- what its pods do ------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip(3) as made:
        yield made


def as_started(
    template: Manifest, address: str, leader: str, head: str, worker_index: int, key: Path
) -> dict[str, str]:
    """Return the environment of a pod's container, as set by the kubelet and the controller."""
    labels = {"group-index": "0", "worker-index": str(worker_index)}
    found = {}
    for name, value in variables(template).items():
        if isinstance(value, str):
            text = value.replace("$(LWS_LEADER_ADDRESS)", leader)
            assert "$(" not in text
        elif "resourceFieldRef" in value:
            text = "1"
        elif "fieldRef" in value:
            field = value["fieldRef"]["fieldPath"]
            label = re.fullmatch(
                r"metadata\.labels\['leaderworkerset\.sigs\.k8s\.io/(.*)'\]", field
            )
            fields = {"status.podIP": address, "spec.nodeName": f"node-{address}"}
            text = labels[label[1]] if label else fields[field]
        found[name] = text
    assert found["SWELL_COORDINATOR"] == "demo-swell-coordinator:7550"
    found["SWELL_COORDINATOR"] = f"{head}:7550"
    found["SWELL_CLUSTER_KEY_FILE"] = str(key)
    found["SWELL_ACCEPTED_CLUSTER_KEY_FILE"] = str(key.with_name("accepted"))
    return found


def test_pods_of_set_serve_together_and_wait_for_lost_pod(network: Network, tmp_path: Path) -> None:
    settings = ("engine.nodes=2", "engine.env.SWELL_DTYPE=float32", "engine.replicas=1")
    leader_pod, worker_pod = templates(engines(*settings))
    head, near = network.address(HEAD), network.address(NEAR)
    key = tmp_path / "cluster.key"
    with ExitStack() as running:
        cluster = Cluster(network, tmp_path, running)

        def start(node: int, template: Manifest, worker_index: int) -> Process:
            environment = as_started(template, network.address(node), near, head, worker_index, key)
            process = Process(network, node, "engine", environment=environment)
            running.callback(lambda: print("\n".join(process.lines[-40:])))  # if the test fails
            return process

        worker = start(FAR, worker_pod, 1)
        running.callback(lambda: worker.close())
        leader = start(NEAR, leader_pod, 0)
        running.callback(lambda: leader.close())
        cluster.wait_for_engines(0)
        assert worker.said("workers 1 have started")
        undisturbed = cluster.complete(1, 30)

        # A worker container exits: the engine exits with it, and both restart.
        worker.kill()
        until(leader.has_ended, "the engine ends, too", PATIENCE)
        leader.close()
        worker, leader = start(FAR, worker_pod, 1), start(NEAR, leader_pod, 0)
        cluster.wait_for_engines(0)
        assert cluster.complete(1, 30) == undisturbed

        # Only the engine's container exits: the other pod joins the next engine without a restart.
        leader.kill()
        leader = start(NEAR, leader_pod, 0)
        until(lambda: leader.said("node 1 has joined"), "the same pod joins again")
        cluster.wait_for_engines(0)
        assert cluster.complete(1, 30) == undisturbed
        assert not worker.has_ended()
