"""The chart's values for other clusters: each does what it says, for each component."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.upstreams.routes import read_routes
from tests.deploy.kubernetes_schemas import validate
from tests.deploy.test_chart import (
    CHART,
    EXAMPLES,
    Manifest,
    environment,
    find,
    helm,
    pods,
    render,
)

pytestmark = pytest.mark.deploy

KINDS = {"api": "Deployment", "coordinator": "Deployment", "engine": "StatefulSet"}
COMPONENTS = pytest.mark.parametrize("component", KINDS)


def with_values(tmp_path: Path, values: dict[str, Any]) -> list[Manifest]:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return render(file)


def refused(*settings: str) -> str:
    """Return why the chart is not rendered."""
    sets = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", "demo", str(CHART), "--kube-version", "1.30.0", *sets)
    assert done.returncode != 0
    return done.stderr


def workload(manifests: list[Manifest], component: str) -> Manifest:
    return find(manifests, KINDS[component], f"demo-swell-{component}")


def pod_of(manifests: list[Manifest], component: str) -> Manifest:
    spec: Manifest = workload(manifests, component)["spec"]["template"]["spec"]
    return spec


def test_an_engine_uses_all_the_gpus_that_it_reserves() -> None:
    engine = workload(render(None, "engine.gpus=4"), "engine")
    limits = engine["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 4
    assert environment(engine)["SWELL_TENSOR_PARALLEL_SIZE"] == "4"
    one = workload(render(None, "engine.gpus=1"), "engine")
    assert "SWELL_TENSOR_PARALLEL_SIZE" not in environment(one)
    for name in ("SWELL_TENSOR_PARALLEL_SIZE", "SWELL_DATA_PARALLEL_SIZE_LOCAL"):
        assert name in refused("engine.gpus=4", f"engine.env.{name}=2")


def test_the_gpus_of_an_engine_are_divided_among_its_stages() -> None:
    stages = "engine.env.SWELL_PIPELINE_PARALLEL_SIZE"
    both = environment(workload(render(None, "engine.gpus=8", f"{stages}=2"), "engine"))
    assert both["SWELL_TENSOR_PARALLEL_SIZE"] == "4"
    alone = environment(workload(render(None, "engine.gpus=2", f"{stages}=2"), "engine"))
    assert "SWELL_TENSOR_PARALLEL_SIZE" not in alone
    assert "SWELL_PIPELINE_PARALLEL_SIZE" in refused("engine.gpus=4", f"{stages}=3")


def test_large_numbers_of_a_values_file_reach_the_processes_as_they_stand(tmp_path: Path) -> None:
    numbers = {"SWELL_KV_CACHE_MEMORY_BYTES": 40_000_000_000, "SWELL_GPU_MEMORY_UTILIZATION": 0.85}
    manifests = with_values(tmp_path, {"engine": {"env": numbers}})
    variables = environment(workload(manifests, "engine"))
    assert variables["SWELL_KV_CACHE_MEMORY_BYTES"] == "40000000000"
    assert variables["SWELL_GPU_MEMORY_UTILIZATION"] == "0.85"


@pytest.mark.parametrize("example", ["ingress-tls", "gateway"])
def test_what_operators_read_is_not_published(example: str) -> None:
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


def test_numbers_of_users_can_be_left_to_the_cluster(tmp_path: Path) -> None:
    none = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for name, pod in pods(with_values(tmp_path, {"podSecurityContext": none})):
        assert not none.keys() & pod["securityContext"].keys(), name
        assert pod["securityContext"]["runAsNonRoot"], name


@COMPONENTS
def test_a_component_has_security_contexts_of_its_own(tmp_path: Path, component: str) -> None:
    values = {
        component: {
            "podSecurityContext": {"runAsUser": 20000},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        }
    }
    manifests = with_values(tmp_path, values)
    for each in KINDS:
        pod = pod_of(manifests, each)
        assert pod["securityContext"]["runAsUser"] == (20000 if each == component else 10001)
        capabilities = pod["containers"][0]["securityContext"]["capabilities"]
        added = {"add": ["IPC_LOCK"]} if each == component else {}
        assert capabilities == {"drop": ["ALL"], **added}


def test_api_pods_do_not_mount_a_directory_of_the_engines_nodes() -> None:
    host_path = "model.volume.hostPath.path=/srv/models"
    assert "api.modelVolume" in refused(host_path)
    manifests = render(None, host_path, "api.modelVolume.configMap.name=tokenizer")
    mounted = {
        component: [v for v in pod_of(manifests, component)["volumes"] if v["name"] == "models"]
        for component in KINDS
    }
    assert mounted == {
        "api": [{"name": "models", "configMap": {"name": "tokenizer"}}],
        "coordinator": [],
        "engine": [{"name": "models", "hostPath": {"path": "/srv/models"}}],
    }


@COMPONENTS
def test_an_image_is_fixed_by_its_digest(component: str) -> None:
    digest = f"sha256:{'ab' * 32}"
    manifests = render(None, f"{component}.digest={digest}", "image.registry=r.example")
    image = pod_of(manifests, component)["containers"][0]["image"]
    assert image.startswith("r.example/swell-")
    assert image.endswith(f"@{digest}")
    assert "digest" in refused(f"{component}.digest=0.1.0")


def test_the_service_takes_what_clusters_want_of_it() -> None:
    fields = (
        "ipFamilyPolicy=PreferDualStack", "externalTrafficPolicy=Local",
        "loadBalancerSourceRanges[0]=10.0.0.0/8", "loadBalancerClass=example.com/inside",
    )  # fmt: skip
    sets = [f"api.service.spec.{each}" for each in fields]
    service = find(render(None, *sets, "api.service.type=LoadBalancer"), "Service", "demo-swell")
    validate(service, "1.30")
    assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert service["spec"].keys() > {"type", "ports", "selector", "loadBalancerClass"}
    assert "selector" in refused("api.service.spec.selector.app=other")


def test_all_pods_pull_with_the_secrets() -> None:
    for name, pod in pods(render(None, "image.pullSecrets[0].name=pull")):
        assert pod["imagePullSecrets"] == [{"name": "pull"}], name


def test_directories_in_memory_have_the_sizes_that_were_chosen() -> None:
    manifests = render(None, "engine.shmSize=16Gi", "engine.tmpSize=2Gi", "api.tmpSize=1Gi")
    sizes = {
        (component, volume["name"]): volume["emptyDir"]["sizeLimit"]
        for component in KINDS
        for volume in pod_of(manifests, component)["volumes"]
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    }
    assert sizes == {
        ("api", "tmp"): "1Gi", ("coordinator", "tmp"): "256Mi",
        ("engine", "tmp"): "2Gi", ("engine", "shm"): "16Gi",
    }  # fmt: skip


def test_pods_that_never_were_well_do_not_block_the_drain_of_a_node() -> None:
    manifests = render()
    budgets = [m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"]
    assert {budget["unhealthyPodEvictionPolicy"] for budget in budgets} == {"AlwaysAllow"}


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda v: v.stem if v else "defaults")
def test_every_priority_class_of_the_examples_is_created(values: Path | None) -> None:
    manifests = render(values)
    made = {m["metadata"]["name"] for m in manifests if m["kind"] == "PriorityClass"}
    used = {pod["priorityClassName"] for _, pod in pods(manifests) if "priorityClassName" in pod}
    assert used == made


def test_a_coordinator_leaves_a_lost_node_within_seconds_and_finds_room() -> None:
    manifests = render()
    pod = pod_of(manifests, "coordinator")
    waits = {
        each["key"]: each["tolerationSeconds"]
        for each in pod["tolerations"]
        if each["effect"] == "NoExecute"
    }
    assert waits == {"node.kubernetes.io/not-ready": 10, "node.kubernetes.io/unreachable": 10}
    classes = [m for m in manifests if m["kind"] == "PriorityClass"]
    assert [m["metadata"]["name"] for m in classes] == [pod["priorityClassName"]]
    other = render(
        None, "coordinator.priorityClassName=ours", "coordinator.priorityClass.create=false"
    )
    assert pod_of(other, "coordinator")["priorityClassName"] == "ours"
    assert not [m for m in other if m["kind"] == "PriorityClass"]


def test_engines_are_replaced_as_the_update_strategy_says() -> None:
    chosen = "engine.updateStrategy"
    for sets, expected in (
        ((), {"type": "RollingUpdate"}),
        ((f"{chosen}.type=OnDelete",), {"type": "OnDelete"}),
        (
            (f"{chosen}.maxUnavailable=25%", f"{chosen}.partition=60"),
            {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": "25%", "partition": 60},
            },
        ),
    ):
        engine = workload(render(None, *sets), "engine")
        assert engine["spec"]["updateStrategy"] == expected
        validate(engine, "1.30")
    assert "updateStrategy" in refused(f"{chosen}.type=Recreate")


def test_models_that_load_slowly_do_not_fail_a_rollout() -> None:
    manifests = render(None, "engine.startupSeconds=3600", "api.startupSeconds=300")
    probe = pod_of(manifests, "engine")["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    assert workload(manifests, "api")["spec"]["progressDeadlineSeconds"] > 3600
    assert pod_of(manifests, "api")["containers"][0]["startupProbe"]["failureThreshold"] == 300


@COMPONENTS
def test_a_component_takes_what_charts_usually_take(tmp_path: Path, component: str) -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    manifests = with_values(tmp_path, {component: {
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "certs", "configMap": {"name": "certs"}}],
        "extraVolumeMounts": [{"name": "certs", "mountPath": "/etc/ssl/certs"}],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "sidecars": [{"name": "logs", "image": "logs:1"}],
        "labels": {"team": "llm"}, "annotations": {"owner": "llm"},
        "podLabels": {"cost": "7"}, "podAnnotations": {"inject": "no"},
        "topologySpreadConstraints": [spread],
        "affinity": {"nodeAffinity": {}},
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
    }})  # fmt: skip
    for each in KINDS:
        validate(workload(manifests, each), "1.30")
        changed = each == component
        whole = workload(manifests, each)
        pod = pod_of(manifests, each)
        own = pod["containers"][0]
        assert ({"name": "NCCL_DEBUG", "value": "INFO"} in own["env"]) is changed
        assert (own.get("envFrom") == [{"configMapRef": {"name": "proxy"}}]) is changed
        assert ("certs" in {volume["name"] for volume in pod["volumes"]}) is changed
        assert ("certs" in {mount["name"] for mount in own["volumeMounts"]}) is changed
        assert [c["name"] for c in pod.get("initContainers", ())] == ["fetch"] * changed
        assert [c["name"] for c in pod["containers"]] == [each, "logs"][: 1 + changed]
        assert (whole["metadata"]["labels"].get("team") == "llm") is changed
        assert (whole["metadata"].get("annotations", {}).get("owner") == "llm") is changed
        inside = whole["spec"]["template"]["metadata"]
        assert (inside["labels"].get("cost") == "7") is changed
        assert (inside.get("annotations") == {"inject": "no"}) is changed
        assert (pod["topologySpreadConstraints"] == [spread]) is changed
        assert (pod.get("affinity") == {"nodeAffinity": {}}) is changed
        assert (pod.get("nodeSelector") == {"pool": "a"}) is changed
        assert ({"key": "pool", "operator": "Exists"} in pod.get("tolerations", ())) is changed


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
    # A kubelet has no certificate to show.
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
    # What the reference picker asks for, which sends no key.
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
def test_the_inference_extension_takes_the_pool(mode: str) -> None:
    import jsonschema

    file = Path(__file__).with_name("inferencepool.schema.json")
    example = CHART / "examples" / "inference-pool.yaml"
    for sets in ((), ("inferencePool.name=p",), ("model.group=next", "engine.gpus=1")):
        picker = f"inferencePool.endpointPicker.failureMode={mode}"
        pools = [m for m in render(example, picker, *sets) if m["kind"] == "InferencePool"]
        assert len(pools) == 1
        jsonschema.validate(pools[0], json.loads(file.read_text(encoding="utf-8")))


def test_a_pool_that_cannot_work_is_refused_with_the_reason() -> None:
    assert "endpointPicker.name" in refused("inferencePool.enabled=true")
    assert "previous.model" not in refused("inferencePool.enabled=true")
    picked = "inferencePool.endpointPicker.name=epp"
    enabled = ("inferencePool.enabled=true", picked)
    assert "ranksFromOrdinals" in refused(*enabled, "engine.ranksFromOrdinals=false")
    replaced = ("model.group=b", "previous.model.group=a", "previous.model.name=A")
    assert "second release" in refused(*enabled, *replaced)
    assert "failureMode" in refused(*enabled, "inferencePool.endpointPicker.failureMode=Fail")


def test_a_picker_of_its_own_chart_makes_the_pool() -> None:
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


def test_a_hub_model_is_fetched_before_anything_is_changed() -> None:
    manifests = render(None, *HUB_MODEL, "model.prefetch.enabled=true")
    job = find(manifests, "Job", "demo-swell-fetch")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    spec = job["spec"]["template"]["spec"]
    assert "serviceAccountName" not in spec, "there is none before the release"
    (container,) = spec["containers"]
    assert container["args"] == ["fetch"]
    env = environment(job)
    assert (env["SWELL_MODEL"], env["SWELL_REVISION"]) == ("org/name", "main")
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    models = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    assert models in spec["volumes"]
    assert models in pod_of(manifests, "engine")["volumes"]
    assert "hub id" in refused("model.prefetch.enabled=true", "model.name=/models/own")
    assert "claim" in refused("model.prefetch.enabled=true", "model.name=org/name")


def test_nobody_asks_the_hub_where_all_is_in_the_volume() -> None:
    manifests = render(None, *HUB_MODEL, "model.offline=true")
    for component in ("api", "engine"):
        assert environment(workload(manifests, component))["HF_HUB_OFFLINE"] == "1"


def test_each_engine_may_have_a_volume_of_its_own() -> None:
    claim = "engine.modelClaim.resources.requests.storage=200Gi"
    engine = workload(render(None, claim, "engine.modelClaim.accessModes[0]=A"), "engine")["spec"]
    (template,) = engine["volumeClaimTemplates"]
    assert template["metadata"]["name"] == "models"
    assert template["spec"]["resources"]["requests"]["storage"] == "200Gi"
    assert "models" not in [each["name"] for each in engine["template"]["spec"]["volumes"]]


def test_a_model_may_come_as_an_image() -> None:
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


def test_an_address_that_is_no_server_is_refused() -> None:
    assert "modelRoutes" in refused("api.modelRoutes.b=coder-swell:80")
