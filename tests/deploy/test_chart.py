"""The Helm chart: rendered over a matrix of values, validated, and held to rules of operation."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.fake_kubernetes import fake_kubernetes
from tests.deploy.kubernetes_schemas import validate
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm" / "swell"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VALUES = [CHART / "values.yaml", *EXAMPLES]
KUBERNETES = ("1.27", "1.37")
"""The oldest Kubernetes version that the chart supports, and the newest with a schema."""
CUSTOM = {
    "ServiceMonitor", "PrometheusRule", "HTTPRoute", "ScaledObject", "TriggerAuthentication",
    "InferencePool", "LeaderWorkerSet", "PodMonitor", "BackendTLSPolicy",
}  # fmt: skip
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Pod", "Job")

ROLE = "SWELL_NODE_RANK"
"""An environment variable set only in containers that run just an engine's workers."""

Manifest = dict[str, Any]


def helm(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    own = ROOT / ".venv" / "helm" / "node_modules" / ".bin" / "helm"
    binary = str(own) if own.is_file() else shutil.which("helm")
    if binary is None:
        pytest.skip("helm is not installed: `make test-deploy` installs it")
    return subprocess.run(
        [binary, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def render(values: Path | None = None, *settings: str, version: str = "1.30") -> list[Manifest]:
    """Return the manifests of the chart with a values file and --set arguments."""
    # Do not cache files outside the chart: tests overwrite them.
    is_fixed = values is None or CHART in values.parents
    text = (_template if is_fixed else _template.__wrapped__)(values, settings, version)
    return read(text)


@cache
def _template(values: Path | None, settings: tuple[str, ...], version: str) -> str:
    chosen = [] if values is None else ["-f", str(values)]
    sets = [part for setting in settings for part in ("--set", setting)]
    done = helm(
        "template", "demo", str(CHART), "--namespace", "llm", "--kube-version", f"{version}.0",
        "--set", "clusterKey.value=secret", *chosen, *sets,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(text: str) -> list[Manifest]:
    """Parse the manifests in helm's output."""
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield (name, pod specification) of everything that runs pods."""
    for manifest in manifests:
        if manifest["kind"] in WORKLOADS:
            for template in templates(manifest) or [manifest]:
                yield manifest["metadata"]["name"], template["spec"]


def templates(manifest: Manifest) -> list[Manifest]:
    """Return the templates of a workload's pods, of several if they differ."""
    spec = manifest["spec"]
    group = spec.get("leaderWorkerTemplate", {})
    found = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [template for template in found if template]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def environment(manifest: Manifest, container: int = 0) -> dict[str, Any]:
    """Return the environment of a workload's container, in the leader pod if there is one."""
    entries = templates(manifest)[0]["spec"]["containers"][container]["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("values", paths, ids=lambda path: path.stem)


# -- is it valid? ----------------------------------------------------------------------------------


@named(VALUES)
def test_helm_lint_passes(values: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
@named(VALUES)
def test_every_manifest_is_valid_for_every_version(values: Path, version: str) -> None:
    manifests = render(values, version=version)
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    for manifest in manifests:
        if manifest["kind"] in CUSTOM:
            continue
        validate(manifest, version)


def test_route_and_monitor_lead_to_the_service_of_api_servers() -> None:
    manifests = render(CHART / "examples" / "gateway.yaml")
    route = find(manifests, "HTTPRoute", "demo-swell")["spec"]
    service = find(manifests, "Service", "demo-swell")
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend == {"name": "demo-swell", "port": service["spec"]["ports"][0]["port"]}
    monitor = find(manifests, "ServiceMonitor", "demo-swell")["spec"]
    labels = monitor["selector"]["matchLabels"]
    chosen = [
        manifest["metadata"]["name"]
        for manifest in manifests
        if manifest["kind"] == "Service"
        and labels.items() <= manifest["metadata"]["labels"].items()
    ]
    assert chosen == ["demo-swell"], "engines have no metrics of their own"


def test_dashboard_and_alerts_equal_those_of_compose() -> None:
    manifests = render(CHART / "examples" / "gateway.yaml")
    rules = find(manifests, "PrometheusRule", "demo-swell")["spec"]
    text = (CHART / "files" / "alerts.yaml").read_text()
    own = 'namespace="llm", service="demo-swell"'
    groups = text[text.index("groups:") :].replace('job=~".+"', own)
    assert rules == yaml.safe_load(groups)
    published = "metrics.prometheusRule.runbookUrl=https://docs.example/runbook.html"
    moved = find(
        render(CHART / "examples" / "gateway.yaml", published), "PrometheusRule", "demo-swell"
    )
    assert "https://docs.example/runbook.html#swellnoengine" in str(moved)
    assert "docs/runbook.md" not in str(moved)
    dashboard = find(manifests, "ConfigMap", "demo-swell-dashboard")
    assert dashboard["data"]["swell.json"] == (
        CHART / "files" / "dashboard.json"
    ).read_text().strip("\n")
    compose = (ROOT / "docker" / "compose.yaml").read_text()
    assert "../helm/swell/files/alerts.yaml:" in compose
    assert "../helm/swell/files/dashboard.json:" in compose


# -- is it fit to run? -----------------------------------------------------------------------------


@named(VALUES)
def test_containers_run_with_least_privileges(values: Path) -> None:
    for name, pod in pods(render(values)):
        security = pod["securityContext"]
        assert security["runAsNonRoot"], name
        assert security["runAsUser"] >= 10000, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, "variables of Services look like settings"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"], name
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name


@named(VALUES)
def test_containers_have_requests_limits_and_a_fixed_version(values: Path) -> None:
    for name, pod in pods(render(values)):
        for container in pod["containers"]:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), name
            assert {"cpu", "memory"} <= resources["limits"].keys(), name
            _, _, tag = container["image"].rpartition(":")
            assert tag not in ("", "latest"), name
            assert "/" not in tag, name


@named(VALUES)
def test_serving_containers_are_probed_on_their_ports(values: Path) -> None:
    for name, pod in pods(render(values)):
        if name.endswith("-test") or "-fetch-" in name:
            continue
        for container in pod["containers"]:
            if ROLE in {each["name"] for each in container["env"]}:
                continue  # worker pods have no probes, their leader does
            ports = {port["name"] for port in container["ports"]}
            for probe, path in (("livenessProbe", "/health"), ("readinessProbe", "/ready")):
                assert container[probe]["httpGet"]["path"] == path, name
                assert container[probe]["httpGet"]["port"] in ports, name
                assert container[probe]["timeoutSeconds"] >= 5, "load is no reason to be left out"
            assert container["startupProbe"]["failureThreshold"] >= 1, name


@named(VALUES)
def test_grace_period_of_pods_covers_draining(values: Path) -> None:
    manifests = render(values)
    for manifest in manifests:
        if manifest["kind"] not in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            continue
        spec = templates(manifest)[0]["spec"]
        for number, container in enumerate(spec["containers"]):
            variables = environment(manifest, number)
            needed = float(variables.get("SWELL_DRAIN_TIMEOUT", 0))
            if "SWELL_SHUTDOWN_TIMEOUT" in variables:
                hook = container["lifecycle"]["preStop"]["exec"]["command"]
                assert hook[0] == "sleep"
                needed = float(variables["SWELL_SHUTDOWN_TIMEOUT"]) + float(hook[1])
            assert spec["terminationGracePeriodSeconds"] > needed


@named(VALUES)
def test_selectors_match_their_pods(values: Path) -> None:
    manifests = render(values)
    labels = {
        manifest["metadata"]["name"]: template["metadata"]["labels"]
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet")
        for template in templates(manifest)
    }
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Deployment" | "StatefulSet":
                wanted = spec["selector"]["matchLabels"]
            case "Service":
                wanted = spec["selector"]
            case "PodDisruptionBudget":
                wanted = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                wanted = spec["podSelector"]["matchLabels"]
            case _:
                continue
        found = [has for has in labels.values() if wanted.items() <= has.items()]
        groups = {has.get("engine_group") for has in found}
        assert len({has["app.kubernetes.io/component"] for has in found}) == 1
        assert len(found) == (1 if manifest["kind"] in WORKLOADS else len(groups))


@named(VALUES)
def test_mounts_have_volumes_and_no_variable_contains_a_secret(values: Path) -> None:
    for name, pod in pods(render(values)):
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        mounts = [mount for each in pod["containers"] for mount in each.get("volumeMounts", ())]
        assert {mount["name"] for mount in mounts} == volumes, name
        for container in pod["containers"]:
            for entry in container["env"]:
                if entry["name"].endswith(("_KEY", "_KEYS", "_TOKEN")):
                    assert "secretKeyRef" in entry["valueFrom"], name


def test_more_than_one_replica_is_protected_and_spread() -> None:
    manifests = render()
    budgets = {m["metadata"]["name"] for m in manifests if m["kind"] == "PodDisruptionBudget"}
    assert budgets == {"demo-swell-api", "demo-swell-engine"}
    for _, pod in pods(manifests):
        if "topologySpreadConstraints" in pod:
            (constraint,) = pod["topologySpreadConstraints"]
            assert constraint["topologyKey"] == "kubernetes.io/hostname"


def test_old_pods_do_not_block_new_ones_on_their_node() -> None:
    spread = {
        name: pod["topologySpreadConstraints"][0]
        for name, pod in pods(render())
        if "topologySpreadConstraints" in pod
    }
    assert spread["demo-swell-api"]["matchLabelKeys"] == ["pod-template-hash"]
    assert "matchLabelKeys" not in spread["demo-swell-engine"]


def test_service_excludes_coordinator_on_dead_node() -> None:
    service = find(render(), "Service", "demo-swell-coordinator")["spec"]
    assert "publishNotReadyAddresses" not in service
    assert service["ports"]


def test_network_policies_allow_only_required_traffic() -> None:
    manifests = render(CHART / "examples" / "gateway.yaml")
    policies = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"}
    assert policies.keys() == {f"demo-swell-{part}" for part in ("api", "coordinator", "engine")}
    own, outside = policies["demo-swell-api"]["ingress"]
    assert "ports" not in own
    assert len(outside["from"]) == 2
    assert outside["ports"] == [{"protocol": "TCP", "port": 8000}]
    (registration,) = policies["demo-swell-coordinator"]["ingress"]
    assert [port["port"] for port in registration["ports"]] == [7550, 7551, 7552, 7553]
    closed = render(None, "networkPolicy.enabled=false")
    assert not [m for m in closed if m["kind"] == "NetworkPolicy"]


# -- does a value do what it says? -----------------------------------------------------------------


def differing(before: list[Manifest], after: list[Manifest]) -> dict[str, tuple[Any, Any]]:
    """Return the leaves that differ, by path, as (before, after)."""

    def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, child in value.items():
                yield from leaves(child, f"{path}.{key}")
        elif isinstance(value, list):
            for number, child in enumerate(value):
                # Environment variables are identified by name, not by position.
                known = child.get("name", number) if isinstance(child, dict) else number
                yield from leaves(child, f"{path}[{known}]")
        else:
            yield path, value

    def flat(manifests: list[Manifest]) -> dict[str, Any]:
        return {
            path: leaf
            for m in manifests
            for path, leaf in leaves(m, f"{m['kind']}/{m['metadata']['name']}")
        }

    old, new = flat(before), flat(after)
    return {
        path: (old.get(path), new.get(path))
        for path in old.keys() | new.keys()
        if old.get(path) != new.get(path)
    }


def test_api_pods_are_replaced_one_at_a_time_after_their_streams() -> None:
    def down(*sets: str) -> Any:
        scaler = find(render(None, "api.autoscaling.enabled=true", *sets),
                      "HorizontalPodAutoscaler", "demo-swell-api")  # fmt: skip
        validate(scaler, "1.37")
        return scaler["spec"]["behavior"]["scaleDown"]

    grace = dict(pods(render()))["demo-swell-api"]["terminationGracePeriodSeconds"]
    assert down()["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": grace}]
    longer = down("api.shutdownSeconds=300")["policies"][0]["periodSeconds"]
    assert longer == grace + 240
    own = "api.autoscaling.behavior.scaleDown.selectPolicy=Disabled"
    assert down(own) == {"selectPolicy": "Disabled"}


def scaled_object(*settings: str) -> Manifest:
    manifests = render(CHART / "examples" / "autoscaling.yaml", *settings)
    spec: Manifest = find(manifests, "ScaledObject", "demo-swell-engine")["spec"]
    return spec


def test_api_pods_hold_requests_if_engines_scale_to_zero() -> None:
    held = "SWELL_COLD_START_TIMEOUT"
    for least, expected in ((0, "120"), (1, None)):
        sets = f"engine.autoscaling.minReplicas={least}", "engine.autoscaling.coldStartSeconds=120"
        manifests = render(CHART / "examples" / "autoscaling.yaml", *sets)
        deployed = find(manifests, "Deployment", "demo-swell-api")
        assert environment(deployed).get(held) == expected
        assert (scaled_object(*sets).get("cooldownPeriod") is not None) == (least == 0)


def test_target_utilization_can_be_set_on_command_line() -> None:
    """`--set` passes fractions as strings."""
    for share, threshold in (("0.75", "75"), ("4", "400"), ("4.0", "400"), ("0.29", "29")):
        (trigger,) = scaled_object(f"engine.autoscaling.targetUtilization={share}")["triggers"]
        # KEDA 2.14 to 2.17 truncate the threshold to an integer on fallback, and 0 times the
        # running replicas would give the minimum.
        assert trigger["metadata"]["threshold"] == threshold
    for share in ("4.5", "much", "-1", ".5e3"):
        sets = (
            "clusterKey.value=secret", "engine.autoscaling.enabled=true",
            f"engine.autoscaling.targetUtilization={share}",
        )  # fmt: skip
        flags = [part for each in sets for part in ("--set", each)]
        done = helm("template", "demo", str(CHART), "--kube-version", "1.30.0", *flags)
        assert "targetUtilization" in done.stderr, share


def prometheus_answer(tmp_path: Path, query: str, series: dict[str, float], expected: str) -> None:
    """Let Prometheus evaluate a query over constant series, and compare."""
    test = {
        "evaluation_interval": "30s",
        "tests": [{
            "interval": "30s",
            "input_series": [{"series": k, "values": f"{v}x10"} for k, v in series.items()],
            "promql_expr_test": [{
                "expr": query, "eval_time": "4m",
                "exp_samples": [{"labels": "{}", "value": float(expected)}] if expected else [],
            }],
        }],
    }  # fmt: skip
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    file = tmp_path / "query.yaml"
    file.write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("running", "cache", "load"), [(64, 0.3, "400"), (16, 0.75, "300")], ids=["slots", "caches"]
)
def test_full_slots_or_caches_without_queue_do_not_count_as_idle(
    tmp_path: Path, running: int, cache: float, load: str
) -> None:
    query = scaled_object("engine.env.SWELL_MAX_NUM_SEQS=64")["triggers"][0]["metadata"]["query"]
    prometheus_answer(tmp_path, query, load_of_four(running, 0, cache), load)


def load_of_four(running: int, waiting: int, cache: float) -> dict[str, float]:
    """Return the series of four engines of this release and of another one."""
    values = {"num_requests_running": running, "num_requests_waiting": waiting,
              "kv_cache_usage_perc": cache}  # fmt: skip
    return {
        f'swell_{name}{{namespace="llm", service="{service}", pod="{pod}", engine="{rank}"}}': value
        for name, value in values.items()
        for service in ("demo-swell", "other-swell")
        for pod in ("a", "b")  # each API server exports all engines
        for rank in range(4)
    }


def test_missing_metrics_do_not_count_as_zero(tmp_path: Path) -> None:
    scaled = scaled_object()
    metadata = scaled["triggers"][0]["metadata"]
    some = load_of_four(1, 0, 0.5)
    for missing in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        left = {name: value for name, value in some.items() if missing not in name}
        prometheus_answer(tmp_path, metadata["query"], left, "")
    assert metadata["ignoreNullValues"] == "false"
    assert scaled["fallback"]["behavior"] == "currentReplicas"
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]


@pytest.mark.parametrize("secret", ["prometheus-token", ""])
def test_keda_accepts_the_objects(secret: str) -> None:
    import jsonschema

    schemas = json.loads(Path(__file__).with_name("keda.schema.json").read_text(encoding="utf-8"))
    example = CHART / "examples" / "autoscaling.yaml"
    found = render(example, f"engine.autoscaling.authentication.secret={secret}")
    kinds = {"ScaledObject", "TriggerAuthentication"} if secret else {"ScaledObject"}
    chosen = [each for each in found if each["apiVersion"].startswith("keda.sh/")]
    assert {each["kind"] for each in chosen} == kinds
    for each in chosen:
        jsonschema.validate(each, schemas[each["kind"]])
    assert scaled_object()["scaleTargetRef"]["kind"] == "StatefulSet"


def test_engines_are_replaced_one_at_a_time_as_they_drain() -> None:
    down = scaled_object("engine.drainSeconds=300")["advanced"]["horizontalPodAutoscalerConfig"][
        "behavior"
    ]["scaleDown"]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]
    longest = scaled_object("engine.drainSeconds=7200")
    assert "'periodSeconds': 1800" in str(longest), "the API refuses more"


def test_prometheus_credentials_come_from_a_secret() -> None:
    manifests = render(CHART / "examples" / "autoscaling.yaml")
    (trigger,) = find(manifests, "ScaledObject", "demo-swell-engine")["spec"]["triggers"]
    assert trigger["metadata"]["authModes"] == "bearer"
    assert trigger["authenticationRef"] == {"name": "demo-swell-engine"}
    given = find(manifests, "TriggerAuthentication", "demo-swell-engine")["spec"]
    assert given["secretTargetRef"] == [
        {"parameter": "bearerToken", "name": "prometheus-token", "key": "token"}
    ]
    own = "engine.autoscaling.authentication.ref"
    (trigger,) = scaled_object(f"{own}.name=mine", f"{own}.kind=ClusterTriggerAuthentication")[
        "triggers"
    ]
    assert trigger["authenticationRef"] == {"name": "mine", "kind": "ClusterTriggerAuthentication"}
    (trigger,) = scaled_object("engine.autoscaling.authentication.secret=")["triggers"]
    assert "authenticationRef" not in trigger


def install(config: Path, *sets: str) -> "subprocess.CompletedProcess[str]":
    """Install or upgrade the release `demo` in a cluster."""
    chosen = [part for each in sets for part in ("--set", each)]
    return helm(
        "upgrade", "--install", "demo", str(CHART), "--namespace", "llm",
        "--kubeconfig", str(config), "--disable-openapi-validation", *chosen,
    )  # fmt: skip


def test_toggling_autoscaling_ends_no_running_replica(tmp_path: Path) -> None:
    with fake_kubernetes(tmp_path) as (cluster, config):

        def release(*sets: str) -> None:
            done = install(config, *sets)
            assert done.returncode == 0, done.stdout + done.stderr

        many = ("engine.replicas=64", "api.replicas=6", "engine.autoscaling.maxReplicas=64")
        on = ("engine.autoscaling.enabled=true", "api.autoscaling.enabled=true")
        release(*many)
        release(*many, *on)
        release(*many, *on, "engine.env.SWELL_SEED=1")
        assert set(cluster.replicas_seen["demo-swell-engine"]) == {64}
        assert set(cluster.replicas_seen["demo-swell-api"]) == {6}
        path = "/apis/apps/v1/namespaces/llm/statefulsets/demo-swell-engine"
        cluster.objects[path]["spec"]["replicas"] = 40  # the autoscaler's doing
        release(*many, *on, "engine.env.SWELL_SEED=2")
        assert cluster.objects[path]["spec"]["replicas"] == 40
        scaler = "/apis/keda.sh/v1alpha1/namespaces/llm/scaledobjects/demo-swell-engine"
        assert cluster.objects[scaler]["spec"]["fallback"]["replicas"] == 40
        off = ("engine.replicas=8", "api.replicas=6")
        refused = install(config, *off)
        assert "--set engine.replicas=40" in refused.stderr
        refused = install(config, "engine.replicas=40", "api.replicas=2")
        assert "--set api.replicas=6" in refused.stderr
        release("engine.replicas=40", "api.replicas=6")
        assert cluster.objects[path]["spec"]["replicas"] == 40
        assert scaler not in cluster.objects
        release(*off)
        assert cluster.objects[path]["spec"]["replicas"] == 8, "without an autoscaler as one says"


def test_engines_that_share_experts_know_their_number() -> None:
    manifests = render(CHART / "examples" / "expert-parallel.yaml")
    variables = environment(find(manifests, "StatefulSet", "demo-swell-engine"))
    assert variables["SWELL_ENABLE_EXPERT_PARALLEL"] == "true"
    assert variables["SWELL_DATA_PARALLEL_SIZE"] == "8"
    assert "pod-index" in variables["SWELL_DATA_PARALLEL_RANK"]["fieldRef"]["fieldPath"]


def test_every_variable_that_the_chart_sets_is_a_setting() -> None:
    known = (ROOT / "docs" / "settings.md").read_text()
    for values in VALUES:
        for manifest in render(values):
            if manifest["kind"] not in ("Deployment", "StatefulSet"):
                continue
            for number, _ in enumerate(manifest["spec"]["template"]["spec"]["containers"]):
                for name in environment(manifest, number):
                    assert f"`{name}`" in known or name == "HF_TOKEN", name


def test_keys_are_kept_in_secrets_and_reach_the_processes_as_files() -> None:
    manifests = render(None, "apiKeys.value=alpha", "adminKey.value=root")
    data = find(manifests, "Secret", "demo-swell")["data"]
    assert {name: base64.b64decode(value) for name, value in data.items()} == {
        "cluster-key": b"secret", "api-keys": b"alpha", "admin-key": b"root"
    }  # fmt: skip
    variables = environment(find(manifests, "Deployment", "demo-swell-api"))
    assert variables["SWELL_API_KEY_FILE"] == "/run/secrets/swell-api/api-keys"
    assert variables["SWELL_ADMIN_KEY_FILE"] == "/run/secrets/swell-api/admin-key"
    existing = render(CHART / "examples" / "gpu-64.yaml")
    assert not [m for m in existing if m["kind"] == "Secret"]


def test_second_cluster_key_reaches_all_processes() -> None:
    manifests = render(None, "clusterKey.acceptedValue=other")
    data = find(manifests, "Secret", "demo-swell")["data"]
    assert base64.b64decode(data["accepted-cluster-key"]) == b"other"
    assert "accepted-cluster-key" not in find(render(), "Secret", "demo-swell")["data"]
    for manifest in manifests:
        if manifest["kind"] not in ("Deployment", "StatefulSet"):
            continue
        (volume,) = (
            volume["projected"]["sources"]
            for volume in manifest["spec"]["template"]["spec"]["volumes"]
            if volume["name"] == "cluster-key"
        )
        first, second = (each["secret"] for each in volume)
        assert not first.get("optional")
        assert second["optional"], "pods start without it"
        variables = environment(manifest)
        for secret, name in ((first, "CLUSTER_KEY"), (second, "ACCEPTED_CLUSTER_KEY")):
            (item,) = secret["items"]
            assert variables[f"SWELL_{name}_FILE"] == f"/run/secrets/swell/{item['path']}"


def test_a_generated_cluster_key_is_long_and_random() -> None:
    keys = set()
    for _ in range(2):
        done = helm("template", "demo", str(CHART), "--kube-version", "1.30.0",
                    "-s", "templates/secret.yaml")  # fmt: skip
        keys.add(yaml.safe_load(done.stdout)["data"]["cluster-key"])
    assert len(keys) == 2
    assert all(len(base64.b64decode(key)) == 48 for key in keys)


def test_service_monitor_has_metrics_key_if_needed() -> None:
    on = ("metrics.serviceMonitor.enabled=true", "apiKeys.value=alpha")
    manifests = render(None, *on)
    (endpoint,) = find(manifests, "ServiceMonitor", "demo-swell")["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials == {"name": "demo-swell", "key": "metrics-key"}
    key = base64.b64decode(find(manifests, "Secret", "demo-swell")["data"]["metrics-key"])
    assert len(key) == 48
    api = find(manifests, "Deployment", "demo-swell-api")
    assert environment(api)["SWELL_METRICS_KEY_FILE"] == "/run/secrets/swell-api/metrics-key"
    (volume,) = (
        volume
        for volume in api["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "api-keys"
    )
    paths = {
        item["path"] for each in volume["projected"]["sources"] for item in each["secret"]["items"]
    }
    assert paths == {"api-keys", "metrics-key"}
    (open_endpoint,) = find(render(None, on[0]), "ServiceMonitor", "demo-swell")["spec"][
        "endpoints"
    ]
    assert "authorization" not in open_endpoint


def test_compose_publishes_only_the_api() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            variable = "BIND" if name == "api" else f"{name.upper()}_BIND"
            assert port.startswith(f"${{{variable}:-127.0.0.1}}:"), (name, port)
    assert "admin}" not in str(compose["services"]["grafana"])


def test_compose_alertmanager_sends_to_configured_webhook(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    (script,) = compose["services"]["alertmanager"]["command"]
    script = script.replace("$$", "$").replace("/run/swell", str(tmp_path))
    script = script.partition("exec")[0] + "true"
    for url in ("", "https://hooks.example/a?b='$c'"):
        done = subprocess.run(
            ["sh", "-c", script], env={"PATH": "/usr/bin:/bin", "ALERT_WEBHOOK": url},
            timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0
        config = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())
        (receiver,) = config["receivers"]
        assert config["route"]["receiver"] == receiver["name"]
        file = [{"url_file": f"{tmp_path}/url"}] if url else None
        assert receiver.get("webhook_configs") == file
        assert (tmp_path / "url").read_text() == url
    prometheus = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    (managers,) = prometheus["alerting"]["alertmanagers"]
    assert managers["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_api_without_keys_accepts_published_host_names() -> None:
    def hosts(*settings: str) -> Any:
        [api] = [
            each
            for each in render(None, *settings)
            if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-api")
        ]
        return environment(api).get("SWELL_ALLOWED_HOSTS")

    assert hosts() == "*.llm"
    assert hosts("apiKeys.value=secret") is None
    assert hosts("api.tls.secret=certificate") is None
    published = (
        "api.allowedHosts={a.example}",
        "api.ingress.enabled=true",
        "api.ingress.hosts={b.example}",
        "api.route.enabled=true",
        "api.route.hostnames={c.example}",
        "api.route.parentRefs[0].name=gateway",
    )
    pools = render(CHART / "examples" / "inference-pool.yaml", "apiKeys.existingSecret=")
    [engines] = [each for each in pools if each["kind"] == "StatefulSet"]
    known = [environment(engines, number).get("SWELL_ALLOWED_HOSTS") for number in range(2)]
    assert [each.split(",")[0] for each in known if each] == ["*"]
    any_name = ("api.route.enabled=true", "api.route.parentRefs[0].name=gateway")
    assert hosts(*any_name) == "*.llm,*"
    assert hosts(*published) == "*.llm,a.example,b.example,c.example"
