"""The page of the documentation with what `benchmarks.gpu_check` found."""

from typing import Any

PAGE_HEAD = """# GPU check

`python -m benchmarks.gpu_check` runs what needs a GPU in one command of less than eight minutes:
the CUDA tests, comparisons of tokens, decode steps against the bandwidth of a copy, prefills
against the rate of a matrix product, the start of a stack, a served load, and vLLM's own figures
where it is installed. `--device cpu --small` runs all parts in miniature.
"""


def page(report: dict[str, Any]) -> str:
    """Return the page of the documentation for a report."""
    lines = [PAGE_HEAD, "| part | what | result |", "|---|---|---|"]
    for part, found in report.items():
        lines += [f"| {part} | {what} | {value} |" for what, value in _flat(found)]
    return "\n".join(lines) + "\n"


def _flat(found: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(found, dict):
        return [
            row
            for key, value in found.items()
            for row in _flat(value, f"{name} {key}".strip().replace("_", " "))
        ]
    if isinstance(found, list):
        return []
    text = f"{found:.4g}" if isinstance(found, float) else " ".join(str(found).split())
    return [(name, text.replace("|", "/"))]
