"""Rewrites a Lark grammar of a text to match that text within a JSON string.

The input of a custom tool is a parameter of a function, so models write it as a JSON string with
quotes, backslashes and control characters escaped. Each terminal is rewritten to match the escaped
text; rules are unchanged.

A regex whose text may need escapes becomes a rule, because the library decides the end of a
terminal by one byte: after a backslash it cannot tell whether another character of `.*` follows
or an escaped line end.
"""

import functools
import json
import re

# Possessive and with optional ends, so that unterminated text is scanned once.
_STRING = r'"(?:\\.|[^"\\\n])*+"?'
_TERMINAL = re.compile(
    rf"(?P<range>{_STRING}\s*+\.\.\s*+{_STRING})|(?P<string>{_STRING})(?P<fold>i?)"
    r"|(?P<comment>//[^\n]*)"
    r"|/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\])*+\]?|[^/\\\n\[])++)(?P<close>/?)(?P<flags>[a-z]*)"
    r"|%import\s++common\.(?P<common>\w+)"
    r"|(?P<other>%\w*|<[^>\n]*+>?|@\w*)"
    r"|(?P<terminal>\b_?[A-Z][A-Z0-9_]*\b)"
)
_ATOM = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\]|\.|\\[dDsSwW])"
    r"|(?P<group>\((?:\?:|(?!\?)))"
    r"|(?P<operator>[)|*+?]|\{\d+(?:,\d*)?\})"
    r"|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[nrtfv]|[^\w\s]))"
    r"|(?P<literal>[^\\\[\]^$(){}])",
    re.DOTALL,
)
MAX_SIZE = 8 * 1024
"""Maximum characters of a grammar: each may become a class compiled on the event loop."""
_SPECIAL = ['"', "\\", *map(chr, range(32))]
"""Characters that must be escaped in JSON strings."""
_PLAIN = r'[^"\\\x00-\x1f]'

_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+", "FLOAT": r"[0-9]+\.[0-9]*", "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "WORD": "[a-zA-Z]+",
    "NUMBER": r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip
"""Terminals of Lark's common library."""


class NotQuotable(ValueError):
    """The grammar contains something not enforceable in a JSON string; the message names it."""


def quoted_lark(grammar: str) -> str:
    """Return the grammar of JSON strings, without quotes, whose value matches `grammar`.

    Raises:
        NotQuotable: it has a directive, a special token or an assertion, or is too long.
    """
    if len(grammar) > MAX_SIZE:
        raise NotQuotable(f"a tool's grammar has at most {MAX_SIZE} characters")
    return _TERMINAL.sub(_terminal, grammar)


def _terminal(found: "re.Match[str]") -> str:
    if found["range"]:
        first, last = (json.loads(text) for text in re.findall(_STRING, found["range"]))
        return _quoted_regex(f"[{re.escape(first)}-{re.escape(last)}]", "")
    if found["string"]:
        try:
            text = json.loads(found["string"])
        except ValueError as error:
            raise NotQuotable(f"{found['string']} is no string that JSON knows") from error
        return json.dumps(_escaped(text), ensure_ascii=False) + found["fold"]
    if found["regex"]:
        if not found["close"]:
            raise NotQuotable(f"/{found['regex'][:80]} is never closed")
        return _quoted_regex(found["regex"], found["flags"])
    if found["common"]:
        if found["common"] not in _COMMON:
            raise NotQuotable(f"common.{found['common']} is not known")
        rule = _quoted_regex(_COMMON[found["common"]], "")
        return f"{_rule_name(found['common'])}: {rule}"
    if found["terminal"]:
        return _rule_name(found["terminal"])
    if found["other"]:
        raise NotQuotable(f"{found['other']} cannot be enforced in a tool's input")
    return ""  # a comment


def _rule_name(terminal: str) -> str:
    return f"terminal_{terminal.lower()}"


def _quoted_regex(regex: str, flags: str) -> str:
    if set(flags) - {"i", "s"}:
        raise NotQuotable(f"the flags {flags} of /{regex}/ cannot be enforced")
    atoms, position = [], 0
    while position < len(regex):
        atom = _ATOM.match(regex, position)
        if atom is None:
            raise NotQuotable(f"/{regex}/ cannot be enforced from {regex[position:]!r} on")
        position = atom.end()
        atoms.append(atom)
    if not any(_specials(atom, flags) for atom in atoms):
        return f"/{regex}/{flags}"
    closing = len(atoms)
    while closing and atoms[closing - 1].group() == ")":
        closing -= 1
    pieces = []
    for index, atom in enumerate(atoms):
        # Greedy, in one piece, if nothing follows that could match part of the repetition.
        is_last = index + 2 >= closing
        repeated = is_last and index + 1 < len(atoms) and atoms[index + 1].group() in ("*", "+")
        pieces.append(_as_rule(atom, flags, repeated=repeated))
    return f"({' '.join(pieces)})"


def _as_rule(atom: "re.Match[str]", flags: str, *, repeated: bool) -> str:
    """Return a regex atom as part of a rule; a repeated class is matched greedily."""
    fold = "i" if "i" in flags else ""
    if atom["group"]:
        return "("
    if atom["operator"]:
        return atom.group()
    specials = _specials(atom, flags)
    if not atom["class"]:
        return specials[0] if specials else f"/{atom.group()}/{fold}"
    many = "+" if repeated else ""
    plain = f"/[{_class(atom, flags)}&&{_PLAIN}]{many}/{fold}"
    return f"({' | '.join([plain, *specials])})"


def _specials(atom: "re.Match[str]", flags: str) -> list[str]:
    """Return the characters in Lark syntax that an atom matches and that JSON escapes."""
    if atom["group"] or atom["operator"]:
        return []
    return _specials_of(_class(atom, flags))


@functools.lru_cache(maxsize=256)
def _specials_of(character: str) -> list[str]:
    """Return the escaped characters that a one-character regex matches."""
    try:
        matches = re.compile(character).fullmatch
    except re.error as error:
        raise NotQuotable(f"{character!r} cannot be enforced: {error}") from error
    return [json.dumps(_escaped(each)) for each in _SPECIAL if matches(each)]


def _class(atom: "re.Match[str]", flags: str) -> str:
    """Return an equivalent character class; the dot becomes one too."""
    if atom.group() != ".":
        return atom.group()
    return r"[\s\S]" if "s" in flags else r"[^\n]"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
