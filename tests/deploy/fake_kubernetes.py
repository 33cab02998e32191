"""A Kubernetes API server that only stores objects: enough for `helm install` and `helm upgrade`.

Patches are merged like JSON merge patches, whose rule for a field set to null, to take it out, is
also that of strategic merge patches. Workloads without `replicas` get 1, as from the real one.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Manifest = dict[str, Any]

_KINDS = {
    "v1": {"secrets": "Secret", "services": "Service", "serviceaccounts": "ServiceAccount",
           "configmaps": "ConfigMap", "pods": "Pod"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "scheduling.k8s.io/v1": {"priorityclasses": "PriorityClass"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject",
                         "triggerauthentications": "TriggerAuthentication"},
}  # fmt: skip


class FakeKubernetes:
    """Stores objects by path, and the number of replicas after every change."""

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.replicas_seen: dict[str, list[int]] = {}

    def get(self, path: str, selector: dict[str, str]) -> Manifest | None:
        """Return an object, a list of a collection's objects, or discovery information."""
        if found := _discovery(path):
            return found
        if path in self.objects:
            return self.objects[path]
        known = {name: (kind, at) for at, kinds in _KINDS.items() for name, kind in kinds.items()}
        kind, version = known.get(path.rsplit("/", 1)[-1], ("", ""))
        if not kind:
            return None
        items = [
            manifest
            for at, manifest in self.objects.items()
            if at.rsplit("/", 1)[0] == path
            and selector.items() <= manifest["metadata"].get("labels", {}).items()
        ]
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items}

    def put(self, path: str, manifest: Manifest) -> Manifest:
        """Store an object with the defaults of its kind."""
        if manifest.get("kind") in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            manifest["spec"].setdefault("replicas", 1)
            seen = self.replicas_seen.setdefault(manifest["metadata"]["name"], [])
            seen.append(manifest["spec"]["replicas"])
        self.objects[path] = manifest
        return manifest


def _discovery(path: str) -> Manifest | None:
    groups = [version.split("/") for version in _KINDS if "/" in version]
    match path:
        case "/version":
            return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        case "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        case "/apis":
            named = [
                (name, {"groupVersion": f"{name}/{version}", "version": version})
                for name, version in groups
            ]
            return {
                "kind": "APIGroupList",
                "groups": [
                    {"name": name, "versions": [version], "preferredVersion": version}
                    for name, version in named
                ],
            }
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in _KINDS:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    return {
        "kind": "APIResourceList",
        "groupVersion": version,
        "resources": [
            {
                "name": name,
                "kind": kind,
                "namespaced": kind != "PriorityClass",
                "singularName": "",
                "verbs": verbs,
            }
            for name, kind in _KINDS[version].items()
        ],
    }


def merged(old: Any, patch: Any) -> Any:
    """Return a JSON value with a merge patch applied."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new


@contextmanager
def fake_kubernetes(directory: Path) -> Iterator[tuple[FakeKubernetes, Path]]:
    """Serve a fake API server on loopback; yield it and its kubeconfig."""
    cluster = FakeKubernetes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two packets

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, found: Manifest | None) -> None:
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure",
                       "reason": "NotFound", "code": 404}  # fmt: skip
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> Manifest:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            read: Manifest = json.loads(text or "{}")
            return read

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            chosen = parse_qs(url.query).get("labelSelector", [""])[0]
            selector = dict(part.split("=", 1) for part in chosen.split(",") if part)
            self._answer(cluster.get(url.path, selector))

        def do_POST(self) -> None:
            body = self._body()
            path = f"{urlsplit(self.path).path}/{body['metadata']['name']}"
            self._answer(cluster.put(path, body))

        def do_PUT(self) -> None:
            self._answer(cluster.put(urlsplit(self.path).path, self._body()))

        def do_PATCH(self) -> None:
            path = urlsplit(self.path).path
            self._answer(cluster.put(path, merged(cluster.objects[path], self._body())))

        def do_DELETE(self) -> None:
            self._body()  # unread data would be parsed as the next request
            self._answer(cluster.objects.pop(urlsplit(self.path).path, None))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    config = directory / "kubeconfig.json"
    config.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {
            "server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "users": [{"name": "fake", "user": {}}],
    }), encoding="utf-8")  # fmt: skip
    try:
        yield cluster, config
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
