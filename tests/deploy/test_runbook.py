"""The commands, settings and metrics named in the runbook exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from engine.shared.messages.coordination import AbsenceReason
from tests.deploy.fake_kubernetes import fake_kubernetes
from tests.deploy.test_chart import CHART, ROOT, helm, read

pytestmark = pytest.mark.deploy

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
PAGES = ("deploy.md", "deploy-reference.md", "runbook.md")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)|^    (.+)$", re.MULTILINE)
OTHERS = ("kubectl", "helm", "curl", "cosign", "docker", "python", "logs", "up", "set", "from")
"""Programs and subcommands whose flags are not Swell's."""


def snippets(text: str) -> list[str]:
    """Return the code on a page: between backticks or indented."""
    text = re.sub(r"\\\n\s*", "", text)
    return [" ".join((inline or block).split()) for inline, block in CODE.findall(text)]


def commands(program: str) -> list[list[str]]:
    """Return the runbook's command lines of a program, split into words."""
    text = RUNBOOK.replace("| tail", "").replace(" &", "")
    return [shlex.split(each) for each in snippets(text) if each.split()[0] == program]


def rendered(*sets: str) -> list[dict[str, Any]]:
    """Return the manifests of the runbook's example release, with all keys set."""
    chosen = [part for each in ("clusterKey.value=k", "apiKeys.value=a", *sets)
              for part in ("--set", each)]  # fmt: skip
    done = helm("template", "swell", str(CHART), "--namespace", "llm", "--kube-version", "1.30.0",
                *chosen)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_every_swell_flag_is_a_setting(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = {
        flag
        for each in snippets(text)
        if not any(re.search(rf"\b{other}\b", each) for other in OTHERS)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", each)
        if not flag.endswith("-")
    }
    assert len(named) > 5
    of_clients = {"--url"}  # of `swell scale` and `swell status`
    assert not {flag for flag in named - of_clients if f"`{flag}`" not in SETTINGS}


@pytest.mark.parametrize("page", PAGES)
def test_every_value_that_a_page_names_is_one_of_the_charts(page: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = set(re.findall(rf"\b((?:{'|'.join(values)})\.[a-z]\w*(?:\.\w+)*)\b", " ".join(
        each for each in snippets(text) if ".py" not in each and "/" not in each.split("=")[0]
    )))  # fmt: skip
    assert len(paths) > 4
    for path in paths - {"engine.probe"}:
        at: Any = values
        for part in path.split("."):
            if at in ({}, None) or path.startswith("previous.model."):
                break
            assert part in at, path
            at = at[part]


def test_objects_in_kubectl_commands_are_in_the_chart() -> None:
    manifests = rendered("engine.updateStrategy.type=OnDelete")
    components = {
        manifest["metadata"]["labels"].get("app.kubernetes.io/component") for manifest in manifests
    }
    names = {f"{m['kind'].lower()}/{m['metadata']['name']}" for m in manifests}
    asked = commands("kubectl")
    assert len(asked) > 8
    for words in asked:
        for word in words:
            if match := re.fullmatch(r"app\.kubernetes\.io/component=(\w+)", word):
                assert match[1] in components, words
            if re.fullmatch(r"(service|deployment|statefulset|job)/\S+", word):
                assert word in names, words
        if "-n" in words:
            assert words[words.index("-n") + 1] == "llm"


def kubectl_lines() -> list[list[str]]:
    """Return the arguments of `kubectl` on both pages, without pipes and comments."""
    found = set()
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for each in snippets(text):
            line = re.sub(r"\$\(.*?\)", "VALUE", each).partition(" | ")[0].removesuffix(" &")
            if line.startswith("kubectl ") and line.count(" ") > 1:  # not a bare command name
                found.add(tuple(shlex.split(line, comments=True)[1:]))
    return [list(words) for words in sorted(found)]


def test_kubectl_parses_every_command() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    lines = kubectl_lines()
    assert len(lines) > 20
    for words in lines:
        done = subprocess.run(
            ["kubectl", "--kubeconfig", "/dev/null", "--server", "http://127.0.0.1:1", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60, check=False, env={**os.environ, "NO_PROXY": "*"},
        )  # fmt: skip
        assert re.search(r"127\.0\.0\.1:1\b.*refused", done.stdout), (words, done.stdout)


def test_kubectl_commands_use_namespace_of_release() -> None:
    of_the_cluster = {"create namespace", "drain NODE", "get nodes", "taint nodes"}
    for words in kubectl_lines():
        assert words[:2] == ["-n", "llm"] or " ".join(words[:2]) in of_the_cluster, words


def helm_lines(page: str) -> list[list[str]]:
    """Return the arguments of `helm` on a page, without comments and mere mentions of commands."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [shlex.split(each, comments=True) for each in snippets(text)]
    return [words[1:] for words in lines if words[:1] == ["helm"] and len(words) > 2]


def test_helm_runs_commands_of_both_pages(tmp_path: Path) -> None:
    (tmp_path / "helm").symlink_to(ROOT / "helm")
    for name in ("values.yaml", "my-values.yaml"):
        (tmp_path / name).write_text("model: {name: A}\n", encoding="utf-8")
    typed = []
    with fake_kubernetes(tmp_path) as (cluster, config):
        for words in (words for page in PAGES for words in helm_lines(page)):
            assert words[:2] == ["-n", "llm"], words
            if words[2] == "test" or any(word.startswith("oci://") for word in words):
                continue  # needs a running pod, or the chart in a registry
            # Would fetch schemas from the server; test_chart.py validates them.
            blind = ["--disable-openapi-validation"] if words[2] != "rollback" else []
            numbered = [each.replace("=N", "=3") for each in words]
            done = helm(*numbered, "--kubeconfig", str(config), *blind, cwd=tmp_path)
            assert done.returncode == 0, (words, done.stderr)
            typed.append(words[2])
            for path, manifest in cluster.objects.items():
                if "/deployments/" in path:  # all pods become ready at once
                    manifest["status"] = {"availableReplicas": 2}
    assert set(typed) == {"install", "upgrade", "rollback"}
    assert len(typed) > 5


def test_values_in_helm_commands_are_accepted() -> None:
    settings = re.findall(r"--set ([\w.]+)=N\b", RUNBOOK)
    assert "engine.replicas" in settings
    for path in settings:
        rendered(f"{path}=3")


def test_quoted_log_messages_exist_in_sources() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("coordinator", "engine", "server")
        for path in (ROOT / folder).glob("**/*.py")
    )
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text(encoding="utf-8"))
    titles = {panel["title"] for panel in dashboard["panels"]}
    quoted = re.findall(r'(?<![\w:=])"(?!Authorization)([^"\n`]+)"', RUNBOOK)
    assert len(quoted) > 5
    for said in quoted:
        assert said in sources or said in titles, said


def test_every_reason_for_which_an_engine_is_missing_has_a_row() -> None:
    section = RUNBOOK.split("## SwellEngineMissing")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(get_args(AbsenceReason))
