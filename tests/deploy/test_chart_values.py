"""The chart's values for special clusters take effect, for each component."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from server.upstreams.routes import read_routes
from tests.deploy.fake_kubernetes import fake_kubernetes
from tests.deploy.kubernetes_schemas import validate
from tests.deploy.test_chart import (
    CHART,
    EXAMPLES,
    Manifest,
    differing,
    environment,
    find,
    helm,
    install,
    pods,
    render,
)
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.deploy

KINDS = {"api": "Deployment", "coordinator": "Deployment", "engine": "StatefulSet"}
COMPONENTS = pytest.mark.parametrize("component", KINDS)


def with_values(tmp_path: Path, values: dict[str, Any]) -> list[Manifest]:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return render(file)


def refused(*settings: str) -> str:
    """Return the error with which rendering the chart fails."""
    sets = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", "demo", str(CHART), "--kube-version", "1.30.0", *sets)
    assert done.returncode != 0
    return done.stderr


def workload(manifests: list[Manifest], component: str) -> Manifest:
    return find(manifests, KINDS[component], f"demo-swell-{component}")


def pod_of(manifests: list[Manifest], component: str) -> Manifest:
    spec: Manifest = workload(manifests, component)["spec"]["template"]["spec"]
    return spec


DIGEST = f"sha256:{'ab' * 32}"
GPUS = "E:image=swell-engine-cuda:0.1.0 E:env[SWELL_DEVICE].value=cuda E:env[SWELL_THREADS]=None"
CLAIM = "engine.modelClaim.resources.requests.storage=2Gi"
OWN_VOLUME = (
    "E/volumes[models].name=None E.volumeClaimTemplates[0].metadata.name=models "
    "E.volumeClaimTemplates[0].spec.resources.requests.storage=2Gi"
)
CHANGES = {
    "engine.replicas=5 api.replicas=4": (
        "ConfigMap/demo-swell-engines.data.expected=5 E.replicas=5 A.replicas=4"
    ),
    "model.name=org/a model.offline=true model.volume.persistentVolumeClaim.claimName=c": (
        "StatefulSet/demo-swell-engine.metadata.annotations.swell/agreed=org/a "
        "E:env[SWELL_MODEL].value=org/a E:env[HF_HUB_OFFLINE].value=1 "
        "A:env[SWELL_MODEL].value=org/a A:env[HF_HUB_OFFLINE].value=1 "
        "E/volumes[models].persistentVolumeClaim.claimName=c "
        "A/volumes[models].persistentVolumeClaim.claimName=c"
    ),
    "image.tag=0.2.0": (
        "C:image=swell-coordinator:0.2.0 A:image=swell-server:0.2.0 E:image=swell-engine:0.2.0 "
        "Pod/demo-swell-test.spec.containers[ask].image=swell-server:0.2.0"
    ),
    f"coordinator.digest={DIGEST} engine.digest={DIGEST}": (
        f"C:image=swell-coordinator@{DIGEST} E:image=swell-engine@{DIGEST}"
    ),
    f"api.digest={DIGEST}": (
        f"A:image=swell-server@{DIGEST} "
        f"Pod/demo-swell-test.spec.containers[ask].image=swell-server@{DIGEST}"
    ),
    "image.pullSecrets[0].name=pull": (
        "E/imagePullSecrets[pull].name=pull A/imagePullSecrets[pull].name=pull "
        "C/imagePullSecrets[pull].name=pull "
        "Pod/demo-swell-test.spec.imagePullSecrets[pull].name=pull"
    ),
    "engine.gpus=1": f"{GPUS} E:resources.limits.nvidia.com/gpu=1",
    "engine.gpus=1 engine.repository=mine": (
        f"{GPUS} E:image=mine:0.1.0 E:resources.limits.nvidia.com/gpu=1"
    ),
    "engine.gpus=4": (
        f"{GPUS} E:env[SWELL_TENSOR_PARALLEL_SIZE].value=4 E:resources.limits.nvidia.com/gpu=4"
    ),
    "engine.gpus=8 engine.env.SWELL_PIPELINE_PARALLEL_SIZE=2": (
        f"{GPUS} E:env[SWELL_TENSOR_PARALLEL_SIZE].value=4 E:resources.limits.nvidia.com/gpu=8 "
        "E:env[SWELL_PIPELINE_PARALLEL_SIZE].value=2"
    ),
    "engine.gpus=2 engine.env.SWELL_PIPELINE_PARALLEL_SIZE=2": (
        f"{GPUS} E:env[SWELL_PIPELINE_PARALLEL_SIZE].value=2 E:resources.limits.nvidia.com/gpu=2"
    ),
    "engine.shmSize=16Gi engine.tmpSize=2Gi api.tmpSize=1Gi": (
        "E/volumes[shm].emptyDir.sizeLimit=16Gi E/volumes[tmp].emptyDir.sizeLimit=2Gi "
        "A/volumes[tmp].emptyDir.sizeLimit=1Gi"
    ),
    "engine.startupSeconds=3600 api.startupSeconds=300": (  # a rollout waits for longer
        "E:startupProbe.failureThreshold=1800 A:startupProbe.failureThreshold=300 "
        "A.progressDeadlineSeconds=3960"
    ),
    "engine.updateStrategy.type=OnDelete": "E.updateStrategy.type=OnDelete",
    "engine.updateStrategy.maxUnavailable=25% engine.updateStrategy.partition=60": (
        "E.updateStrategy.rollingUpdate.maxUnavailable=25% "
        "E.updateStrategy.rollingUpdate.partition=60"
    ),
    CLAIM: OWN_VOLUME,
    f"{CLAIM} engine.modelClaimRetention.whenScaled=Delete": (
        f"{OWN_VOLUME} E.persistentVolumeClaimRetentionPolicy.whenDeleted=Retain "
        "E.persistentVolumeClaimRetentionPolicy.whenScaled=Delete"
    ),
    "model.volume.hostPath.path=/srv api.modelVolume.configMap.name=tokenizer": (
        "E/volumes[models].hostPath.path=/srv A/volumes[models].configMap.name=tokenizer"
    ),
    "api.responses.size=null": (
        "A:env[SWELL_RESPONSE_STORE].value=none A/volumes[responses].name=None "
        "A/volumes[responses].emptyDir.sizeLimit=None A:volumeMounts[responses].name=None "
        "A:volumeMounts[responses].mountPath=None"
    ),
    "api.responses.existingSecret=db": (
        "A:env[SWELL_RESPONSE_STORE].value=None "
        "A:env[SWELL_RESPONSE_STORE].valueFrom.secretKeyRef.name=db "
        "A:env[SWELL_RESPONSE_STORE].valueFrom.secretKeyRef.key=url "
        "A/volumes[responses].name=None A/volumes[responses].emptyDir.sizeLimit=None "
        "A:volumeMounts[responses].name=None A:volumeMounts[responses].mountPath=None"
    ),
    "api.service.type=LoadBalancer api.service.spec.externalTrafficPolicy=Local "
    "api.service.spec.loadBalancerSourceRanges[0]=10.0.0.0/8": (
        "Service/demo-swell.spec.type=LoadBalancer "
        "Service/demo-swell.spec.externalTrafficPolicy=Local "
        "Service/demo-swell.spec.loadBalancerSourceRanges[0]=10.0.0.0/8"
    ),
}
"""What is set, and every leaf of all manifests that then differs from the defaults': E, A and C are
the specs of engines, API and coordinator, `E/` that of their pods and `E:` their container."""


@pytest.mark.parametrize("sets", CHANGES, ids=lambda sets: sets[:60])
def test_each_value_changes_only_its_own_part(sets: str) -> None:
    manifests = render(None, *sets.split())
    for manifest in manifests:
        validate(manifest, "1.30")
    found = {}
    for path, (_, after) in differing(render(), manifests).items():
        short = path
        if after is None:  # one leaf suffices for a removed reference
            short = re.sub(r"env\[(\w+)\]\.valueFrom.*", r"env[\1]", path)
        for name, kind in KINDS.items():
            spec = f"{kind}/demo-swell-{name}.spec"
            for start, mark in (
                (f"{spec}.template.spec.containers[{name}].", ":"),
                (f"{spec}.template.spec.", "/"),
                (f"{spec}.", "."),
            ):
                short = short.replace(start, name[0].upper() + mark)
        if not re.search(r"env\[\w+\]\.name$", short):
            found[short] = str(after)
    words = [word.rpartition("=") for word in CHANGES[sets].split()]
    assert found == {path: value for path, _, value in words}


@pytest.mark.parametrize(
    ("sets", "image"),
    [
        ("engine.backend=vllm", "swell-engine-vllm:0.1.0"),
        ("engine.backend=vllm engine.gpus=1", "swell-engine-vllm:0.1.0"),
        ("engine.backend=vllm engine.repository=mine", "mine:0.1.0"),
        ("previous.model.group=a previous.model.name=A previous.engine.backend=vllm "
         "model.group=b", "swell-engine-vllm:0.1.0"),
    ],
)  # fmt: skip
def test_engines_of_other_type_use_its_image_and_join_no_others(sets: str, image: str) -> None:
    manifests = render(None, *sets.split())
    name = "demo-swell-engine" + ("-a" if "previous" in sets else "")
    engines = find(manifests, "StatefulSet", name)
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image
    assert environment(engines)["SWELL_ENGINE_BACKEND"] == "vllm"
    assert "engine backend vllm" in engines["metadata"]["annotations"]["swell/agreed"]
    front_ends = find(manifests, "Deployment", name.replace("-engine", "-api"))
    assert "SWELL_ENGINE_BACKEND" not in str(front_ends)


POOL = "inferencePool.enabled=true inferencePool.endpointPicker.name=epp"


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        ("engine.gpus=4 engine.env.SWELL_TENSOR_PARALLEL_SIZE=2", "SWELL_TENSOR_PARALLEL_SIZE"),
        (
            "engine.gpus=4 engine.env.SWELL_DATA_PARALLEL_SIZE_LOCAL=2",
            "SWELL_DATA_PARALLEL_SIZE_LOCAL",
        ),
        (
            "engine.gpus=4 engine.env.SWELL_PIPELINE_PARALLEL_SIZE=3",
            "SWELL_PIPELINE_PARALLEL_SIZE",
        ),
        *((f"{component}.digest=0.1.0", "digest") for component in KINDS),
        ("api.service.spec.selector.app=other", "selector"),
        ("engine.updateStrategy.type=Recreate", "updateStrategy"),
        ("model.volume.hostPath.path=/srv", "api.modelVolume"),
        ("inferencePool.enabled=true", "endpointPicker.name"),
        (f"{POOL} engine.ranksFromOrdinals=false", "ranksFromOrdinals"),
        (
            f"{POOL} model.group=b previous.model.group=a previous.model.name=A",
            "second release",
        ),
        (f"{POOL} inferencePool.endpointPicker.failureMode=Fail", "failureMode"),
        ("api.modelRoutes.b=coder-swell:80", "modelRoutes"),
        ("api.replica=3", "replica"),
        ("engine.replicas=many", "engine.replicas"),
        ("image.tag=latest", "image.tag"),
        ("engine.env.lower=1", "engine.env"),
        ("api.route.enabled=true", "api.route.parentRefs"),
        ("api.service.port=0", "api.service.port"),
        ("engine.autoscaling.waitingPerEngine=4", "waitingPerEngine"),
        ("engine.autoscaling.authentication.modes=password", "authentication.modes"),
        ("engine.expertParallel=true engine.autoscaling.enabled=true", "autoscaling"),
        # The API server would refuse a number in the middle of an upgrade.
        ("engine.podAnnotations.port=8080", "podAnnotations.port"),
        ("api.nodeSelector.pool=1", "nodeSelector.pool"),
    ],
)
def test_invalid_values_are_refused_by_name(sets: str, named: str) -> None:
    assert named in refused(*sets.split())


def test_large_numbers_in_values_file_are_not_reformatted(tmp_path: Path) -> None:
    numbers = {"SWELL_KV_CACHE_MEMORY_BYTES": 40_000_000_000, "SWELL_GPU_MEMORY_UTILIZATION": 0.85}
    manifests = with_values(tmp_path, {"engine": {"env": numbers}})
    variables = environment(workload(manifests, "engine"))
    assert variables["SWELL_KV_CACHE_MEMORY_BYTES"] == "40000000000"
    assert variables["SWELL_GPU_MEMORY_UTILIZATION"] == "0.85"


@pytest.mark.parametrize("example", ["ingress-tls", "gateway"])
def test_operator_paths_are_not_published(example: str) -> None:
    manifests = render(CHART / "examples" / f"{example}.yaml")
    published = set()
    for manifest in manifests:
        if manifest["kind"] == "Ingress":
            (rule,) = manifest["spec"]["rules"]
            published = {path["path"] for path in rule["http"]["paths"]}
        if manifest["kind"] == "HTTPRoute":
            (rule,) = manifest["spec"]["rules"]
            published = {match["path"]["value"] for match in rule["matches"]}
    assert "/v1" in published
    for path in ("/metrics", "/status.json", "/docs", "/openapi.json", "/admin/scale"):
        assert not [each for each in published if path.startswith(each)], path


def test_user_ids_can_be_assigned_by_cluster(tmp_path: Path) -> None:
    none = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for name, pod in pods(with_values(tmp_path, {"podSecurityContext": none})):
        assert not none.keys() & pod["securityContext"].keys(), name
        assert pod["securityContext"]["runAsNonRoot"], name


def test_unhealthy_pods_do_not_block_node_drain() -> None:
    manifests = render()
    budgets = [m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"]
    assert {budget["unhealthyPodEvictionPolicy"] for budget in budgets} == {"AlwaysAllow"}


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda v: v.stem if v else "defaults")
def test_every_priority_class_of_the_examples_is_created(values: Path | None) -> None:
    manifests = render(values)
    made = {m["metadata"]["name"] for m in manifests if m["kind"] == "PriorityClass"}
    used = {pod["priorityClassName"] for _, pod in pods(manifests) if "priorityClassName" in pod}
    assert used == made


def test_coordinator_leaves_lost_node_within_seconds_and_is_rescheduled() -> None:
    manifests = render(None, "coordinator.priorityClass.create=true")
    pod = pod_of(manifests, "coordinator")
    waits = {
        each["key"]: each["tolerationSeconds"]
        for each in pod["tolerations"]
        if each["effect"] == "NoExecute"
    }
    assert waits == {"node.kubernetes.io/not-ready": 10, "node.kubernetes.io/unreachable": 10}
    classes = [m for m in manifests if m["kind"] == "PriorityClass"]
    assert [m["metadata"]["name"] for m in classes] == [pod["priorityClassName"]]
    other = render(None, "coordinator.priorityClassName=ours")
    assert pod_of(other, "coordinator")["priorityClassName"] == "ours"
    assert not [m for m in other if m["kind"] == "PriorityClass"]


def test_defaults_need_no_cluster_wide_permissions() -> None:
    assert not [
        m for m in render()
        if m["kind"] in ("PriorityClass", "ClusterRole", "ClusterRoleBinding", "Namespace")
    ]  # fmt: skip


_PROBE = {
    "initialDelaySeconds": 3, "periodSeconds": 7, "timeoutSeconds": 9, "failureThreshold": 11
}  # fmt: skip
USUAL: dict[str, Any] = {
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "envFrom": [{"configMapRef": {"name": "proxy"}}],
    "extraVolumes": [{"name": "certs", "configMap": {"name": "certs"}}],
    "extraVolumeMounts": [{"name": "certs", "mountPath": "/etc/ssl/certs"}],
    "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    "sidecars": [{"name": "logs", "image": "logs:1"}],
    "labels": {"team": "llm"}, "annotations": {"owner": "llm"},
    "podLabels": {"cost": "7"}, "podAnnotations": {"inject": "no"},
    "topologySpreadConstraints": [
        {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "rack"}
    ]}},
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "pool", "operator": "Exists"}],
    "podSecurityContext": {"runAsUser": 20000},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    "podSpec": {
        "schedulerName": "volcano", "hostIPC": True, "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.2"]},
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}],
    },
    "resources": {"claims": [{"name": "gpu"}]},
    "probes": {"startup": _PROBE, "liveness": _PROBE, "readiness": _PROBE},
}  # fmt: skip
USUAL_LEAVES = """
metadata.labels.team=llm metadata.annotations.owner=llm
pod.metadata.labels.cost=7 pod.metadata.annotations.inject=no
pod.spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=rack
pod.spec.nodeSelector.pool=a pod.spec.schedulerName=volcano pod.spec.hostIPC=True
pod.spec.dnsPolicy=None pod.spec.dnsConfig.nameservers[0]=10.0.0.2
pod.spec.resourceClaims[gpu].resourceClaimTemplateName=one
pod.spec.securityContext.runAsUser=20000
pod.spec.volumes[certs].configMap.name=certs pod.spec.initContainers[fetch].image=fetch:1
pod.spec.containers[logs].image=logs:1
own.env[NCCL_DEBUG].value=INFO own.envFrom[0].configMapRef.name=proxy
own.volumeMounts[certs].mountPath=/etc/ssl/certs own.securityContext.capabilities.add[0]=IPC_LOCK
own.resources.claims[gpu].name=gpu
"""
"""The resulting differences in a component's workload, its pods (`pod`) and its container."""


@COMPONENTS
def test_component_accepts_common_chart_values_and_others_are_unchanged(
    tmp_path: Path, component: str
) -> None:
    manifests = with_values(tmp_path, {component: USUAL})
    whole, pod = workload(manifests, component), pod_of(manifests, component)
    validate(whole, "1.37")
    start = f"{KINDS[component]}/demo-swell-{component}."
    found = set[str]()
    for path, (_, after) in differing(render(), manifests).items():
        if component == "api" and path.startswith("Pod/demo-swell-test."):
            continue  # the `helm test` pod resembles an API pod
        assert path.startswith(start), "another component's"
        short = path.removeprefix(start).replace("spec.template.", "pod.")
        found.add(f"{short.replace(f'pod.spec.containers[{component}]', 'own')}={after}")
    assert set(USUAL_LEAVES.split()) <= found
    for probe in ("startup", "liveness", "readiness"):
        default = pod_of(render(), component)["containers"][0][f"{probe}Probe"]
        assert pod["containers"][0][f"{probe}Probe"] == {**default, **_PROBE}
    assert pod["topologySpreadConstraints"] == USUAL["topologySpreadConstraints"]
    assert USUAL["tolerations"][0] in pod["tolerations"]
    assert "podSpec" in refused(f"{component}.podSpec.volumes[0].name=x")


def test_probes_and_scrapes_follow_https() -> None:
    on = ("api.tls.secret=certificate", "metrics.serviceMonitor.enabled=true")
    manifests = render(None, *on)
    api = workload(manifests, "api")
    container = pod_of(manifests, "api")["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert environment(api)["SWELL_SSL_CERTFILE"] == "/run/secrets/swell-tls/tls.crt"
    assert "/run/secrets/swell-tls" in {mount["mountPath"] for mount in container["volumeMounts"]}
    (endpoint,) = find(manifests, "ServiceMonitor", "demo-swell")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    (test,) = find(manifests, "Pod", "demo-swell-test")["spec"]["containers"]
    assert test["env"][0]["value"].startswith("https://")
    # The kubelet has no client certificate.
    both = render(None, on[0], "api.env.SWELL_SSL_CA_CERTS=/ca.pem")
    assert pod_of(both, "api")["containers"][0]["livenessProbe"]["tcpSocket"] == {"port": "http"}
    plain = pod_of(render(), "api")["containers"][0]
    assert "scheme" not in plain["livenessProbe"]["httpGet"]


def test_a_pool_has_an_api_server_beside_each_engine_for_the_endpoint_picker() -> None:
    manifests = render(CHART / "examples" / "inference-pool.yaml", "apiKeys.value=key")
    pool = find(manifests, "InferencePool", "demo-swell")["spec"]
    template = workload(manifests, "engine")["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert pool["endpointPickerRef"] == {
        "name": "swell-epp", "port": {"number": 9002}, "failureMode": "FailClose"
    }  # fmt: skip
    engine, api = template["spec"]["containers"]
    assert pool["targetPorts"] == [{"number": api["ports"][0]["containerPort"]}]
    of_engine, of_api = (environment(workload(manifests, "engine"), each) for each in (0, 1))
    assert of_api["SWELL_DATA_PARALLEL_LB"] == "external"
    assert of_api["SWELL_DATA_PARALLEL_RANK"] == of_engine["SWELL_DATA_PARALLEL_RANK"]
    # The path that the reference picker scrapes, without a key.
    assert of_api["SWELL_METRICS_PREFIX"] == "vllm:"
    assert of_api["SWELL_OPEN_METRICS"] == "true"
    assert of_api["SWELL_API_KEY_FILE"]
    volumes = [volume["name"] for volume in template["spec"]["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for mount in (*engine["volumeMounts"], *api["volumeMounts"]):
        assert mount["name"] in volumes
    (backend,) = find(manifests, "HTTPRoute", "demo-swell")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "demo-swell")
    ports = [
        (rule.get("ports"), rule.get("from"))
        for rule in find(manifests, "NetworkPolicy", "demo-swell-engine")["spec"]["ingress"]
    ]
    assert ports[-1][0] == [{"protocol": "TCP", "port": 8000}]
    assert len(ports[-1][1]) == 2


@pytest.mark.parametrize("mode", ["FailOpen", "FailClose"])
def test_inference_extension_accepts_the_pool(mode: str) -> None:
    import jsonschema

    file = Path(__file__).with_name("inferencepool.schema.json")
    example = CHART / "examples" / "inference-pool.yaml"
    for sets in ((), ("inferencePool.name=p",), ("model.group=next", "engine.gpus=1")):
        picker = f"inferencePool.endpointPicker.failureMode={mode}"
        pools = [m for m in render(example, picker, *sets) if m["kind"] == "InferencePool"]
        assert len(pools) == 1
        jsonschema.validate(pools[0], json.loads(file.read_text(encoding="utf-8")))


def test_endpoint_picker_of_separate_chart_creates_the_pool() -> None:
    settings = ("inferencePool.enabled=true", "inferencePool.create=false", "inferencePool.name=p")
    manifests = render(None, *settings, "api.route.enabled=true", "api.route.parentRefs[0].name=g")
    assert "InferencePool" not in {manifest["kind"] for manifest in manifests}
    (backend,) = find(manifests, "HTTPRoute", "demo-swell")["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == "p"


HUB_MODEL = (
    "model.name=org/name",
    "model.revision=main",
    "model.volume.persistentVolumeClaim.claimName=models",
    "model.hubSecret.name=hub",
)


def fetch_job(*settings: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the Job that fetches, and the spec of its pod."""
    manifests = render(None, *HUB_MODEL, "model.prefetch.enabled=true", *settings)
    (job,) = (m for m in manifests if m["kind"] == "Job")
    validate(job, "1.27")
    assert "annotations" not in job["metadata"], "a hook would end with helm's patience"
    return job["metadata"]["name"], job["spec"]["template"]["spec"]


def test_pods_wait_for_the_job_that_fetches_the_model(tmp_path: Path) -> None:
    _, spec = fetch_job()
    (container,) = spec["containers"]
    (script,) = container["args"]
    assert "swell fetch 'org/name' --revision 'main'" in script
    assert spec["serviceAccountName"] == "demo-swell"
    models = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    assert models in spec["volumes"]
    manifests = render(None, *HUB_MODEL, "model.prefetch.enabled=true")
    for component in ("api", "engine"):
        pod = pod_of(manifests, component)
        assert models in pod["volumes"]
        (waits,) = pod["initContainers"]
        # Pods wait for the file that the Job writes last.
        (mark,) = re.findall(r"/models/[^ ]+", waits["args"][0])
        assert script.splitlines()[-1] == f"touch {mark}"
        wait = waits["args"][0].replace("/models", str(tmp_path)).replace("sleep 5", "exit 7")
        assert subprocess.run(["sh", "-c", wait], check=False, timeout=PATIENCE).returncode == 7
        (tmp_path / Path(mark).name).touch()
        assert subprocess.run(["sh", "-c", wait], check=False, timeout=PATIENCE).returncode == 0
        (tmp_path / Path(mark).name).unlink()
    assert "initContainers" not in pod_of(manifests, "coordinator")
    assert "hub id" in refused("model.prefetch.enabled=true", "model.name=/models/own")
    assert "claim" in refused("model.prefetch.enabled=true", "model.name=org/name")


def test_fetch_job_has_own_variables_nodes_and_a_name_from_its_content() -> None:
    name, spec = fetch_job(
        "engine.gpus=1", "engine.nodeSelector.accelerator=h100", "engine.tolerations[0].key=gpu",
        "model.prefetch.env.HTTPS_PROXY=http://proxy:3128",
        "model.prefetch.envFrom[0].secretRef.name=hub",
        "model.prefetch.podSpec.nodeSelector.pool=cpu",
    )  # fmt: skip
    (container,) = spec["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert "tolerations" not in spec
    plain, _ = fetch_job()
    other, _ = fetch_job("model.revision=v2")
    assert len({name, plain, other}) == 3, "a Job cannot be changed"
    _, both = fetch_job("model.group=b", "previous.model.name=org/old")
    assert "org/old" in both["containers"][0]["args"][0], "its pods wait, too"


def test_chart_creates_a_volume_claim_shared_by_all_pods() -> None:
    storage = "model.claim.resources.requests.storage=200Gi"
    manifests = render(None, storage, "model.claim.storageClassName=files")
    claim = find(manifests, "PersistentVolumeClaim", "demo-swell-models")
    validate(claim, "1.27")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for component in ("api", "engine"):
        assert {
            "name": "models", "persistentVolumeClaim": {"claimName": "demo-swell-models"}
        } in pod_of(manifests, component)["volumes"]  # fmt: skip
    once = (storage, "model.claim.accessModes[0]=ReadWriteOnce")
    assert "ReadWriteMany" in refused(*once)
    here = ("engine.nodeSelector.kubernetes\\.io/hostname=n",
            "api.nodeSelector.kubernetes\\.io/hostname=n")  # fmt: skip
    found = find(render(None, *once, *here), "PersistentVolumeClaim", "demo-swell-models")
    assert found["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "model.volume" in refused(storage, "model.volume.emptyDir.medium=Memory")


def test_extra_objects_are_templated_with_the_release(tmp_path: Path) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap",
             "metadata": {"name": "{{ .Release.Name }}-own"}, "data": {"a": "b"}}  # fmt: skip
    made = find(with_values(tmp_path, {"extraObjects": [other]}), "ConfigMap", "demo-own")
    assert made["data"] == {"a": "b"}


def test_threads_follow_cpu_limit_of_engine_and_not_node(tmp_path: Path) -> None:
    def threads(**resources: dict[str, str] | None) -> Any:
        manifests = with_values(tmp_path, {"engine": {"resources": resources}})
        return environment(workload(manifests, "engine")).get("SWELL_THREADS")

    assert threads()["resourceFieldRef"]["resource"] == "limits.cpu"
    without_limit = threads(limits={"cpu": None})  # type: ignore[dict-item]
    assert without_limit["resourceFieldRef"]["resource"] == "requests.cpu"
    nothing = {"cpu": None}
    assert threads(limits=nothing, requests=nothing) is None  # type: ignore[arg-type]


def test_engines_in_deployment_restart_elsewhere_after_node_loss() -> None:
    manifests = render(None, "engine.kind=Deployment", "engine.updateStrategy.maxUnavailable=2")
    engine = find(manifests, "Deployment", "demo-swell-engine")
    validate(engine, "1.27")
    assert engine["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 2}
    assert "SWELL_DATA_PARALLEL_RANK" not in environment(engine), "the coordinator gives it"
    assert not [m for m in manifests if m["kind"] == "StatefulSet"]
    kind = "engine.kind=Deployment"
    assert "modelClaim" in refused(kind, "engine.modelClaim.storageClassName=a")
    assert "engine.nodes" in refused(kind, "engine.nodes=2", "engine.gpus=1")
    assert "updateStrategy" in refused(kind, "engine.updateStrategy.type=OnDelete")
    pool = ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=epp")
    assert "engine.kind" in refused(kind, *pool)
    scaled = render(None, kind, "engine.autoscaling.enabled=true")
    target = find(scaled, "ScaledObject", "demo-swell-engine")["spec"]["scaleTargetRef"]
    assert target["kind"] == "Deployment"


def test_monitors_accept_extra_endpoint_fields(tmp_path: Path) -> None:
    drop = {"sourceLabels": ["__name__"], "regex": ".*_bucket", "action": "drop"}
    endpoint = {"scrapeTimeout": "10s", "relabelings": [{"targetLabel": "a"}],
                "metricRelabelings": [drop]}  # fmt: skip
    manifests = with_values(tmp_path, {
        "metrics": {"serviceMonitor": {"enabled": True, "endpoint": endpoint}},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "epp"}},
    })  # fmt: skip
    (of_service,) = find(manifests, "ServiceMonitor", "demo-swell")["spec"]["endpoints"]
    assert endpoint.items() <= of_service.items()
    (of_pods,) = find(manifests, "PodMonitor", "demo-swell")["spec"]["podMetricsEndpoints"]
    assert of_pods["metricRelabelings"][-1] == drop
    assert of_pods["scrapeTimeout"] == "10s"


def test_proxies_reach_pods_that_serve_https() -> None:
    tls = "api.tls.secret=certificate"
    manifests = render(None, tls, "api.ingress.enabled=true")
    service = find(manifests, "Service", "demo-swell")
    assert service["spec"]["ports"][0]["appProtocol"] == "https"
    assert "https" in service["metadata"]["annotations"].values()
    ingress = find(manifests, "Ingress", "demo-swell")["metadata"]["annotations"]
    assert ingress["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    route = (tls, "api.route.enabled=true", "api.route.parentRefs[0].name=g")
    assert "backendTLS" in refused(*route)
    checks = ("hostname=llm.example.com", "wellKnownCACertificates=System")
    policy = find(
        render(None, *route, *(f"api.route.backendTLS.{each}" for each in checks)),
        "BackendTLSPolicy", "demo-swell",
    )["spec"]  # fmt: skip
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": "demo-swell"}]
    assert policy["validation"]["hostname"] == "llm.example.com"
    plain = find(render(), "Service", "demo-swell")
    assert "appProtocol" not in plain["spec"]["ports"][0]


def test_notes_warn_that_nothing_scales_without_scraping(tmp_path: Path) -> None:
    on = "engine.autoscaling.enabled=true"
    with fake_kubernetes(tmp_path) as (_, config):
        assert "nothing to go by" in install(config, on).stdout
        assert "nothing to go by" not in install(
            config, on, "metrics.serviceMonitor.enabled=true"
        ).stdout  # fmt: skip


def test_model_can_be_an_image() -> None:
    image = "model.volume.image.reference=r.example/model:1"
    manifests = render(None, image, "model.readOnly=true", version="1.33")
    for component in ("api", "engine"):
        validate(workload(manifests, component), "1.33")
        (volume,) = (
            each for each in pod_of(manifests, component)["volumes"] if each["name"] == "models"
        )
        assert volume["image"] == {"reference": "r.example/model:1"}


@pytest.mark.parametrize("example", [None, CHART / "examples" / "inference-pool.yaml"])
def test_models_of_other_releases_are_served_behind_the_same_address(
    tmp_path: Path, example: Path | None
) -> None:
    sets = "api.modelRoutes.org/coder=http://coder-swell", "api.modelRoutes.b=https://b:8443/swell"
    manifests = render(example, *sets)
    routes = find(manifests, "ConfigMap", "demo-swell-model-routes")["data"]["models.yaml"]
    (tmp_path / "models.yaml").write_text(routes, encoding="utf-8")
    assert read_routes(tmp_path / "models.yaml") == {
        "org/coder": "http://coder-swell",
        "b": "https://b:8443/swell",
    }
    pod = pod_of(manifests, "engine" if example else "api")
    server = pod["containers"][-1]
    assert server["args"] == ["api-server"]
    env = {each["name"]: each.get("value") for each in server["env"]}
    (mount,) = [each for each in server["volumeMounts"] if each["name"] == "model-routes"]
    assert env["SWELL_MODEL_ROUTES"] == f"{mount['mountPath']}/models.yaml"
    (volume,) = [each for each in pod["volumes"] if each["name"] == "model-routes"]
    assert volume["configMap"] == {"name": "demo-swell-model-routes"}
