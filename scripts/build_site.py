"""Builds the documentation site (`make docs-site`); dead links are errors."""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

ROOT_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
"""Pages in the repository root, where code hosts expect them, and their names on the site."""


def main(target: Path) -> int:
    """Write the site to `target`; return the generator's exit code."""
    with tempfile.TemporaryDirectory(prefix="swell-site-") as folder:
        work = Path(folder)
        stage(work / "docs")
        shutil.copy(ROOT / "zensical.toml", work)
        generator = Path(sys.executable).with_name("zensical")
        done = subprocess.run(
            [generator, "build", "--strict", "--config-file", work / "zensical.toml"],
            capture_output=True,
            text=True,
            cwd=work,
        )
        if done.returncode:
            print(f"{done.stdout}\n{done.stderr.partition('Traceback')[0]}", file=sys.stderr)
            return done.returncode
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(work / "site", target)
    return 0


def stage(folder: Path) -> None:
    """Copy all pages of the site into one folder and adapt their links."""
    shutil.copytree(ROOT / "docs", folder)
    for source, name in ROOT_PAGES.items():
        page = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        (folder / name).write_text(page, encoding="utf-8")
    for path in folder.glob("*.md"):
        page = path.read_text(encoding="utf-8")
        for source, name in ROOT_PAGES.items():
            page = re.sub(rf"\]\((\.\./)?{re.escape(source)}", f"]({name}", page)
        path.write_text(page, encoding="utf-8")
    (folder / "modules.md").write_text(modules_page(), encoding="utf-8")


def modules_page() -> str:
    """Return a page that lists every module with the first line of its docstring."""
    lines = ["# Modules", "", "One line a module, from its docstring. `benchmarks`, `scripts` and"]
    lines += ["`tests` are not installed and not listed.", ""]
    for package in ("engine", "coordinator", "server", "swell"):
        for init in sorted((ROOT / package).rglob("__init__.py")):
            modules = [path for path in sorted(init.parent.glob("*.py")) if path != init]
            if modules:
                name = ".".join(init.parent.relative_to(ROOT).parts)
                lines += ["", f"## {name}", "", first_line(init), ""]
                lines += ["| module | what it is for |", "|---|---|"]
                lines += [f"| `{path.stem}` | {first_line(path)} |" for path in modules]
    return "\n".join(lines) + "\n"


@cache
def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, "" if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
