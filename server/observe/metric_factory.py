"""Creates and formats Prometheus metrics whose first label is the served model's name."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

COUNT_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
)  # fmt: skip

M = TypeVar("M", Counter, Histogram)


class Labelled(Generic[M]):
    """A metric whose first label is the model's name; caches its children."""

    def __init__(self, metric: M, model_name: str, labels: tuple[str, ...]) -> None:
        """Without other labels its only child exists, at 0, from the start."""
        self._metric: M = metric
        self._model_name = model_name
        self._children: dict[tuple[str | int, ...], M] = {}
        if not labels:
            self.child()

    def child(self, *values: str | int) -> M:
        """Return the child metric for these values of the other labels."""
        known = self._children.get(values)
        if known is None:
            known = self._metric.labels(self._model_name, *map(str, values))
            self._children[values] = known
        return known


class MetricFactory:
    """Registers metrics with a common name prefix."""

    def __init__(self, prefix: str, model_name: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        """Return a counter; `_total` is appended to its name. Without labels it starts at 0."""
        names = ("model_name", *labels)
        counter = Counter(self._prefix + name, text, names, registry=self._registry)
        return Labelled(counter, self._model_name, labels)

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Labelled[Histogram]:
        """Return a histogram with these upper bounds; without labels it starts at 0."""
        histogram = Histogram(
            self._prefix + name,
            text,
            ("model_name", *labels),
            buckets=buckets,
            registry=self._registry,
        )
        return Labelled(histogram, self._model_name, labels)


def text_of(families: Iterable[Metric]) -> bytes:
    """Format gauges, counters and histograms as text; their names must be valid.

    Faster than `generate_latest` for many series, since it does not check label names each time.
    """
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
