"""Source as trees."""

import ast
import gc
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module.

    Nothing is collected meanwhile: a task whose failure nobody asked for writes a traceback then,
    for which CPython 3.11 parses source, and within another parse that is a SystemError.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()
