"""What was measured on each kind of processor: a Markdown file for each, newest comparison on top.

Rates of different processors do not compare, so each kind has a file of its own, named after it.
"""

import platform
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[1] / "results"
"""The folder of these files."""

FEATURES = (
    "amx_bf16",
    "amx_int8",
    "avx512_bf16",
    "avx512_vnni",
    "avx512f",
    "avx_vnni",
    "avx2",
    "sve",
    "bf16",
    "asimd",
)
"""What decides how fast matrices are multiplied, as Linux calls it on x86 and ARM."""

_KIND = (("cpu family", "family"), ("model", "model"), ("CPU part", "part"))
"""Numbers that tell processors apart whose names are alike, and what they are called here."""


class Processor(NamedTuple):
    """The processor of a machine."""

    name: str
    """With the numbers of its kind, where they are known."""
    features: tuple[str, ...]
    """Those of `FEATURES` that it has."""

    @property
    def summary(self) -> str:
        """What it is and multiplies fast."""
        return f"{self.name} ({', '.join(self.features) or 'none of the features looked for'})"

    @property
    def file_name(self) -> str:
        """The name of its file of results."""
        plain = re.sub(r"\((r|tm)\)", " ", self.name.lower())
        return "-".join(re.findall(r"[a-z0-9]+", plain)) + ".md"


def processor_of(cpuinfo: str) -> Processor:
    """Return the first processor of Linux's list; an empty list is one of another system."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    kind = [f"{shown} {fields[name]}" for name, shown in _KIND if name in fields]
    model = fields.get("model name") or platform.processor() or platform.machine()
    there = fields.get("flags", fields.get("Features", "")).split()
    found = tuple(feature for feature in FEATURES if feature in there)
    return Processor(", ".join([model, *kind]), found)


def commit() -> str:
    """Return the commit of the working tree, marked if other files than results differ from it."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", ":/", f":(exclude){RESULTS}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def put_on_top(folder: Path, processor: Processor, heading: str, entry: str) -> Path:
    """Write a comparison into its processor's file, above those that are there.

    An entry of the same heading is an earlier state of the same comparison, and goes.

    Args:
        folder: of the files.
        processor: what was measured on.
        heading: when and what was measured, on one line.
        entry: what came of it, in Markdown.

    Returns:
        The file.
    """
    path = folder / processor.file_name
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    title, *older = re.split(r"^## ", before, flags=re.MULTILINE)
    if not title.strip():
        title = (
            f"# {processor.name}\n\n"
            "What `benchmarks/side_by_side.py` measured on processors of this kind, newest first.\n"
        )
    kept = [each for each in older if each.partition("\n")[0] != heading]
    entries = [f"{heading}\n\n{entry.strip()}\n", *kept]
    parts = [each.strip() for each in (title, *(f"## {each}" for each in entries))]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path
