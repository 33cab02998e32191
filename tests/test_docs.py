"""Generated and hand-written pages agree with the code."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from engine.shared.version import SWELL_VERSION
from scripts import build_site
from scripts.write_docs import GENERATED
from tests.support.syntax import tree_of

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == GENERATED[path](), "run `make docs`"


@pytest.mark.slow
def test_the_site_builds_without_a_dead_link(tmp_path: Path) -> None:
    assert build_site.main(tmp_path / "site") == 0
    named = set(re.findall(r'"([\w-]+)\.md"', (ROOT / "zensical.toml").read_text()))
    written = {path.stem for path in (tmp_path / "site").glob("*.html")} - {"404"}
    assert written == named, "every page stands in the navigation of zensical.toml"


@pytest.mark.slow
def test_a_dead_link_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("docs", *build_site.ROOT_PAGES, "zensical.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for each in (tmp_path / "docs").glob("*.md"):
        each.write_text("# What is said\n")
    (tmp_path / "docs" / "batch.md").write_text("# Batches\n\n[nowhere](nowhere.md)\n")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    assert build_site.main(tmp_path / "site") != 0
    assert "page does not exist" in capfd.readouterr().err
    assert not (tmp_path / "site").exists()


MODULES = [
    path
    for name in ("engine", "coordinator", "server", "swell")
    for path in (ROOT / name).rglob("*.py")
]


def test_every_module_has_a_docstring() -> None:
    silent = []
    for path in MODULES:
        line = build_site.first_line(path)
        is_empty_package = path.name == "__init__.py" and not path.read_text().strip()
        if not is_empty_package and not (line.endswith((".", ":")) and len(line) > 12):
            silent.append(path)
    assert not silent


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_files_and_commands_in_pages_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "@@" not in text, page
        named = re.findall(
            r"`((?:engine|server|coordinator|tests|benchmarks|scripts|docs)/[\w/.]+)`", text
        )
        for module in re.findall(
            r"python3? -m ((?:benchmarks|scripts|tests|engine)[\w.]*\w)", text
        ):
            path = module.replace(".", "/")
            named.append(path if (ROOT / path).is_dir() else f"{path}.py")
        missing += [(page.name, name) for name in named if not (ROOT / name).exists()]
    assert not missing


EXACTLY = r"token\s+for\s+token|bit\s+for\s+bit|(?:very|same)\s+tokens|\bidentical\b"


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/reliability.md"])
def test_no_page_overstates_guarantees_of_moves(name: str) -> None:
    """Rounding may make what follows a move another text, but for `--batch-invariant`."""
    text = (ROOT / name).read_text(encoding="utf-8")
    told = re.split(r"\n\s*\n|\n(?=- )", text)
    exact = [each for each in told if re.search(EXACTLY, each, re.IGNORECASE)]
    assert exact
    assert [each for each in exact if "--batch-invariant" not in each] == []
    if name == "docs/reliability.md":
        promised = told[told.index("## Promises") + 1]
        assert "can differ from" in promised, "what holds by default stands first"


def test_the_version_is_the_same_everywhere() -> None:
    places = {
        "helm/swell/Chart.yaml": r'(?m)^(?:version|appVersion): "?([\d.]+)"?$',
        "docker/compose.yaml": r"TAG:-([\d.]+)}",
        "docker/compose.cuda.yaml": r"TAG:-([\d.]+)}",
        "docker/compose.vllm.yaml": r"TAG:-([\d.]+)}",
    }
    found = {
        path: set(re.findall(where, (ROOT / path).read_text())) for path, where in places.items()
    }
    assert found == {path: {SWELL_VERSION} for path in places}


def test_state_machines_on_the_page_exist() -> None:
    page = (ROOT / "docs" / "state-machines.md").read_text(encoding="utf-8")
    named = re.findall(r"(?m)^\| `([\w.]+)`", page)
    assert len(named) > 10
    missing = []
    for name in named:
        module, _, last = name.rpartition(".")
        path = ROOT.joinpath(*module.split("."))
        is_class = last[0].isupper()
        source = (
            path.with_suffix(".py") if is_class else ROOT.joinpath(*name.split("."), "__init__.py")
        )
        if not is_class and not source.exists():
            source = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if not source.exists() or (is_class and f"class {last}" not in source.read_text()):
            missing.append(name)
    assert not missing


def test_functions_in_the_architecture_page_exist() -> None:
    classes: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                functions = ast.FunctionDef | ast.AsyncFunctionDef
                names = {each.name for each in node.body if isinstance(each, functions)}
                classes.setdefault(node.name, set()).update(names)
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)", page))
    assert len(named) > 25
    assert sorted(f"{c}.{name}" for c, name in named if name not in classes.get(c, ())) == []
    ways = page[page.index("## Three call paths") : page.index("## Who knows what")]
    assert set(re.findall(r"`([A-Z]\w+)`", ways)) <= classes.keys()


def test_modules_on_the_request_path_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(
        r"`(?:server\.)?((?:http|access|api|answer|generate|router|text)(?:\.\w+)+)`"
        r"(?:: `([\w.]+)`)?",
        page,
    )
    assert len(named) > 15
    missing = []
    for module, function in named:
        path = ROOT.joinpath("server", *module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        name = function.rpartition(".")[2]
        if not path.exists() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            missing.append((module, function))
    assert missing == []
