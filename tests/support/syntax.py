"""Syntax trees of source files."""

import ast
import gc
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module.

    Garbage collection is disabled meanwhile: collecting a task with an unread exception prints a
    traceback, for which CPython 3.11 parses source, and within another parse that is a SystemError.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()
