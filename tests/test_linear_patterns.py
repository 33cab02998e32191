"""No regular expression of the product backtracks over what clients or users' files say.

Patterns of clients are decided by the grammar library's automata (`engine.shared.matchers`); what
is left for `re` are patterns of our own, whose time has to grow no faster than their input.
"""

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - modules that are searched load it

import coordinator
import engine
import server
from tests.support.cpu_time import cpu_seconds, grows_no_faster_than_input

ROOT = Path(__file__).parents[1]
PACKAGES = (server, engine, coordinator)

_FUNCTIONS = {"compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall",
              "finditer"}  # fmt: skip
_HARMLESS = {
    "server/generate/structural_tags.py": "texts of the tokenizer's special tokens, escaped",
    "server/answer/quoted_lark.py": "classes, which are matched with single characters",
    "server/answer/tool_choice.py": "texts of the tokenizer's special tokens, escaped",
    "server/answer/python_call.py": "keywords of Python",
    "server/text/placeholders.py": "a class of characters for private use",
}
"""Files that build patterns at run time, and of what."""

_SIZE = 2**13
"""Repetitions of an attack; where time grows with its square they take a tenth of a second."""
_NEGLIGIBLE = 0.005
"""Seconds below which no growth is measured."""
_PER_CHARACTER = 1e-5
"""Maximum seconds for a character, several times what the slowest pattern takes on a slow processor
that others use: what takes as long for each character as for all others, takes a hundred times."""


def _sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules that import `re`, by their paths."""
    for package in PACKAGES:
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text()
            if "import re\n" in text:
                yield str(path.relative_to(ROOT)), ast.parse(text)


def _is_constant(node: ast.expr, constants: set[str]) -> bool:
    """Whether an expression is made of literals, constants of its module, and `re.escape`d ones."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(id):
            return id in constants
        case ast.JoinedStr(values):
            return all(_is_constant(each, constants) for each in values)
        case ast.FormattedValue(value):
            return _is_constant(value, constants)
        case ast.Call(func=ast.Attribute(attr="escape"), args=[only]):
            return _is_constant(only, constants)
    return False


def test_patterns_are_constants() -> None:
    found = []
    for name, tree in _sources():
        names = [
            target.id
            for each in tree.body
            for target in ast.walk(each)
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
        ]
        names += [
            alias.asname or alias.name
            for each in ast.walk(tree)
            if isinstance(each, ast.ImportFrom)
            for alias in each.names
        ]
        constants = {each for each in names if each.isupper()}
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("re"), attr=function), args=[pattern, *_]
                ) if function in _FUNCTIONS:
                    variables = {"quote"} if name.endswith("python_call.py") else set()
                    if not _is_constant(pattern, constants | variables) and name not in _HARMLESS:
                        found.append(f"{name}:{node.lineno}")
    assert not found, "patterns of clients are for engine.shared.matchers"


def _patterns() -> Iterator[tuple[str, re.Pattern[str] | re.Pattern[bytes]]]:
    """Yield all compiled patterns of modules, by name."""
    seen = set()
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__") or not _compiles(module.name):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                for each in _within(value):
                    if each.pattern not in seen:
                        seen.add(each.pattern)
                        yield f"{module.name}.{name}", each


def _within(value: object) -> Iterator[re.Pattern[str] | re.Pattern[bytes]]:
    match value:
        case re.Pattern():
            yield value
        case dict():
            yield from _within(list(value.values()))
        case tuple() | list():
            for each in value:
                yield from _within(each)


def _compiles(module: str) -> bool:
    """Whether a module compiles patterns; others need not be imported, with their torch."""
    path = ROOT / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return "re.compile(" in source.read_text()


def _attacks(pattern: str) -> Iterator[str]:
    """Yield short texts which, repeated, may be matched in many ways or begin what never ends."""
    letters = dict.fromkeys(re.sub(r"\\[A-Za-z]|[^ -~]", "", pattern))
    atoms = dict.fromkeys([*letters, *' \t\n{"\\/:a0A_-([<', "%json {", '%json {"":', "%json ",
                           '\\"', "a:", "a ", 'a"', "//", "/a", "(a)", "?a", "<|a|>"])  # fmt: skip
    yield from atoms


def _uses(name: str) -> set[str]:
    """Return the methods of a pattern that its module calls."""
    module, _, attribute = name.rpartition(".")
    path = ROOT / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return set(re.findall(rf"\b{attribute}\.(\w+)\(", source.read_text()))


def _match(
    pattern: re.Pattern[str] | re.Pattern[bytes], only_matched: bool, atom: str, size: int
) -> None:
    """Match the beginning of so many atoms, or also find all."""
    text = f"{atom * size}\0"
    subject: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
    pattern.match(subject)
    if not only_matched:
        for _ in pattern.finditer(subject):
            pass


@pytest.mark.parametrize(
    ("name", "pattern"), [pytest.param(*each, id=each[0]) for each in _patterns()]
)
def test_pattern_matching_takes_linear_time(
    name: str, pattern: re.Pattern[str] | re.Pattern[bytes]
) -> None:
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
    anchored = text.startswith("^") and not pattern.flags & re.MULTILINE
    only_matched = anchored or (len(_uses(name)) > 0 and _uses(name) <= {"match", "fullmatch"})
    for atom in _attacks(text):
        work = functools.partial(_match, pattern, only_matched, atom)
        for size in (2**5, 2**9, _SIZE):  # rising, so that what is exponential ends early
            whole = functools.partial(work, size)
            if cpu_seconds(whole) > _NEGLIGIBLE:
                half = functools.partial(work, size // 2)
                grows_no_faster_than_input(half, whole, _PER_CHARACTER * len(atom) * size)
