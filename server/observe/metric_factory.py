"""Makes Prometheus metrics with the served model's name as first label, looked up once."""

from prometheus_client import CollectorRegistry, Counter, Histogram

COUNT_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
)  # fmt: skip


class LabelledCounter:
    """A counter with labels beside the model's name; children are kept."""

    def __init__(self, counter: Counter, model_name: str) -> None:
        self._counter = counter
        self._model_name = model_name
        self._children: dict[tuple[str | int, ...], Counter] = {}

    def child(self, *values: str | int) -> Counter:
        """Return the counter of one combination of labels."""
        known = self._children.get(values)
        if known is None:
            known = self._counter.labels(self._model_name, *map(str, values))
            self._children[values] = known
        return known


class LabelledHistogram:
    """A histogram by engine; callers keep the children that they ask for."""

    def __init__(self, histogram: Histogram, model_name: str) -> None:
        self._histogram = histogram
        self._model_name = model_name

    def of_engine(self, rank: int) -> Histogram:
        """Return the histogram of one engine."""
        return self._histogram.labels(self._model_name, str(rank))


class MetricFactory:
    """Registers metrics whose names begin with one prefix."""

    def __init__(self, prefix: str, model_name: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._registry = registry

    def counter(self, name: str, text: str) -> Counter:
        """Return a counter; its name gets `_total`."""
        return Counter(self._prefix + name, text, ["model_name"], registry=self._registry).labels(
            self._model_name
        )

    def by_label(self, name: str, text: str, *labels: str) -> LabelledCounter:
        """Return a counter with more labels; its name gets `_total`."""
        counter = Counter(
            self._prefix + name, text, ["model_name", *labels], registry=self._registry
        )
        return LabelledCounter(counter, self._model_name)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """Return a histogram with these upper bounds."""
        return Histogram(
            self._prefix + name, text, ["model_name"], buckets=buckets, registry=self._registry
        ).labels(self._model_name)

    def by_engine(self, name: str, text: str, buckets: tuple[float, ...]) -> LabelledHistogram:
        """Return a histogram with the engine as second label."""
        labels = ["model_name", "engine"]
        histogram = Histogram(
            self._prefix + name, text, labels, buckets=buckets, registry=self._registry
        )
        return LabelledHistogram(histogram, self._model_name)
