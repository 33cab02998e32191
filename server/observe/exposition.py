"""Many series of few labels as Prometheus text; `generate_latest` checks label names each time."""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString


def text_of(families: Iterable[Metric]) -> bytes:
    """Return families of gauges, counters and histograms whose names are known to be valid."""
    lines = []
    escaped: dict[str, str] = {}
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        help_text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = []
            for label, value in sorted(sample.labels.items()):
                known = escaped.get(value)
                if known is None:
                    known = escaped[value] = (
                        value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
                    )
                labels.append(f'{label}="{known}"')
            number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            lines.append(f"{sample.name}{{{','.join(labels)}}} {number}\n")
    return "".join(lines).encode()
