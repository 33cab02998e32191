"""Figures of the house: how long files and functions are, how much a class holds, who imports whom.

    python -m scripts.house_figures               the table, the largest of each kind, circles
    python -m scripts.house_figures --class Name  what a class holds, by name

Attributes are what methods set on `self` and what the body of a class declares, properties not
included; methods include properties.
"""

import argparse
import ast
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "coordinator", "benchmarks", "tests", "scripts")
INSTALLED = ("server", "engine", "coordinator")
MAX_ATTRIBUTES, MAX_METHODS = 15, 20
MAX_DATA_METHODS = 6
"""Fewer, and no constructor: what a class holds is a record."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sized(NamedTuple):
    """Something with a length in lines."""

    lines: int
    name: str


class ClassFigures(NamedTuple):
    """What one class holds."""

    name: str
    attributes: list[str]
    methods: list[str]
    is_data: bool
    """Fields only, as messages, settings and bodies of requests are."""
    docstring: str

    @property
    def is_large(self) -> bool:
        """Whether it needs a reason in its docstring."""
        if self.is_data:
            return False
        return len(self.attributes) > MAX_ATTRIBUTES or len(self.methods) > MAX_METHODS

    def __str__(self) -> str:
        return f"{self.name} {len(self.attributes)}/{len(self.methods)}"


def sources(package: str) -> list[Path]:
    """Return the modules of a package."""
    return sorted((ROOT / package).rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[Sized]:
    """Return all functions with their lines, from the `def` on."""
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            assert node.end_lineno is not None
            yield Sized(node.end_lineno - node.lineno + 1, node.name)


def classes(tree: ast.AST) -> Iterator[ClassFigures]:
    """Return what all classes hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, _Function)]
            names = [method.name for method in methods]
            is_data = "__init__" not in names and len(names) < MAX_DATA_METHODS
            attributes = sorted(_attributes(node, set(names)))
            docstring = ast.get_docstring(node) or ""
            yield ClassFigures(node.name, attributes, names, is_data, docstring)


def _attributes(of: ast.ClassDef, methods: set[str]) -> set[str]:
    declared = {
        each.target.id
        for each in of.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        node.attr
        for node in ast.walk(of)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return (declared | assigned) - methods


def circles() -> set[str]:
    """Return the installed modules that are in a circle of imports, or lead into one."""
    paths = [path for package in INSTALLED for path in sources(package)]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    uses = {name: set(_imports(path)) & names.keys() for name, path in names.items()}
    left = set(uses)
    while free := {name for name in left if not uses[name] & left}:
        left -= free
    return left


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def spread(values: Sequence[int]) -> str:
    """Return median, 90th percentile and maximum."""
    if not values:
        return "-"
    ordered = sorted(values)
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    return f"{statistics.median(ordered):.0f} / {p90} / {ordered[-1]}"


def print_figures(largest: int) -> None:
    """Print the table and the largest of each kind."""
    print("| | files | lines | lines/file med / p90 / max | functions | lines med / p90 / max |")
    print("|---|---|---|---|---|---|")
    every: list[Sized] = []
    held: list[ClassFigures] = []
    product_lines = 0
    for package in PACKAGES:
        lengths, found = [], []
        for path in sources(package):
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            lengths.append(text.count("\n"))
            found += list(functions(tree))
            if package in INSTALLED:
                held += classes(tree)
        every += found if package in INSTALLED else []
        product_lines += sum(lengths) if package in INSTALLED else 0
        long = spread([each.lines for each in found])
        files = f"{len(lengths)} | {sum(lengths):,} | {spread(lengths)}"
        print(f"| {package} | {files} | {len(found):,} | {long} |")
    longest = sorted(every, reverse=True)[:largest]
    widest = sorted(held, key=lambda each: len(each.attributes) + len(each.methods), reverse=True)
    print(f"\nproduct lines: {product_lines:,}")
    print("longest functions:", ", ".join(f"{each.name} {each.lines}" for each in longest))
    print("largest classes, attributes/methods:", ", ".join(map(str, widest[:largest])))
    large = ", ".join(str(each) for each in widest if each.is_large)
    print(f"above {MAX_ATTRIBUTES} attributes or {MAX_METHODS} methods:", large or "none")
    print("in circles of imports, or leading into them:", ", ".join(sorted(circles())) or "none")


def print_class(name: str) -> None:
    """Print what a class holds."""
    for package in INSTALLED:
        for path in sources(package):
            for each in classes(ast.parse(path.read_text(encoding="utf-8"))):
                if each.name == name:
                    print(f"{path.relative_to(ROOT)}: {each}")
                    print("  attributes:", ", ".join(each.attributes))
                    print("  methods:", ", ".join(each.methods))


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--class", dest="class_name", help="a class to look at")
    parser.add_argument("--largest", type=int, default=12, help="how many of the largest to show")
    options = parser.parse_args()
    if options.class_name is not None:
        print_class(options.class_name)
    else:
        print_figures(options.largest)


if __name__ == "__main__":
    main()
