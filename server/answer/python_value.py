"""Literals of Python that models write where JSON is expected."""

import ast
import warnings

MAX_CHARACTERS = 1 << 16
"""Parsing takes some hundred times a text's size in memory."""

_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def parsed(text: str) -> ast.expr | None:
    """Return the expression that a text spells, None if it spells none or is too long."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts that models write
            return ast.parse(text, mode="eval").body
    except _ERRORS:
        return None


def literal(node: ast.expr) -> object:
    """Return a literal's value; names of JSON's constants count as them.

    Raises:
        ValueError: it is no literal.
    """
    try:
        return _value(node)
    except _ERRORS as error:
        raise ValueError("not a literal") from error


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    value: object = ast.literal_eval(node)
    return value
