"""The examples of docs/recipes.md, followed exactly in a copy of the sources."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("engine", "coordinator", "server", "benchmarks", "scripts", "tests", "docs", "helm")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A code block of a recipe."""

    language: str
    text: str


def sections(page: str) -> dict[str, str]:
    """Return the text of each section of a page by its heading."""
    return {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}


RECIPES = {
    name: [Block(*block) for block in re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", text)]
    for name, text in sections(EXAMPLES).items()
}
FOLLOWED: set[str] = set()
"""Files that recipes wrote or changed."""


def follow(block: Block, folder: Path) -> None:
    """Do in a folder what a block says: its first line tells where its text goes."""
    first, _, text = block.text.partition("\n")
    if made := re.fullmatch(r"# new file (\S+)", first):
        FOLLOWED.add(made[1])
        target = folder / made[1]
        assert not target.exists()
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return
    changed = re.fullmatch(r"# in (\S+), (above|below|replace): (.+)", first)
    assert changed is not None, first
    path, how, anchor = changed.groups()
    FOLLOWED.add(path)
    page = (folder / path).read_text(encoding="utf-8")
    if how == "replace":
        assert page.count(anchor) == 1, f"{anchor} in {path}"
        page = page.replace(anchor, text.rstrip("\n"))
    else:
        lines = page.splitlines(keepends=True)
        [at] = [number for number, line in enumerate(lines) if line.strip() == anchor]
        lines.insert(at + (how == "below"), text)
        page = "".join(lines)
    (folder / path).write_text(page, encoding="utf-8")


def test_there_is_a_recipe_for_each_kind_of_part() -> None:
    kinds = "model family", "endpoint", "routing policy", "admission policy", "tool parser"
    assert {f"Add a{'n' * (kind[0] in 'ae')} {kind}" for kind in kinds} == RECIPES.keys()
    assert RECIPES.keys() == sections(CONTRIBUTING).keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_all_files_that_its_example_changes_or_tests(name: str) -> None:
    text = "\n".join(block.text for block in RECIPES[name])
    written = set(re.findall(r"(?m)^# new file (\S+)", text))
    used = set(re.findall(r"(?m)^# in ([^\s,]+)", text)) | set(re.findall(r"tests/\S+\.py", text))
    recipe = sections(CONTRIBUTING)[name]
    assert not {path for path in used - written if f"{Path(path).name}`" not in recipe}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, in which one recipe is followed after the other."""
    folder = tmp_path_factory.mktemp("sources")
    # With what has been compiled, which holds for copies too; but other tests' processes compile
    # meanwhile, and what they are still writing has another name a moment later.
    left_out = shutil.ignore_patterns("*.png", "*.pyc.*")
    for part in COPIED:
        shutil.copytree(ROOT / part, folder / part, ignore=left_out)
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / file, folder)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_ends_in_passing_tests(name: str, sources: Path) -> None:
    ran = 0
    for block in RECIPES[name]:
        if block.language != "sh":
            follow(block, sources)
            continue
        for line in block.text.splitlines():
            run(line, sources)
            ran += "pytest" in line
    assert ran


def test_recipes_output_is_formatted_by_make_format(sources: Path) -> None:
    modules = " ".join(path for path in FOLLOWED if path.endswith(".py"))
    for command in ("ruff format", "ruff check --fix", "ruff check"):
        run(f".venv/bin/{command} {modules}", sources)


def run(command: str, folder: Path) -> None:
    """Run a line of a recipe as a newcomer would, from the root of the sources."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if platform.machine() in ("x86_64", "AMD64"):
        # Of a processor without them: kernels of another folder would be compiled anew.
        environment["SWELL_PROCESSOR"] = "avx2"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
