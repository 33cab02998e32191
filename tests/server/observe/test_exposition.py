from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine.shared.messages import EngineSetup
from server.observe.engine_metrics import EngineCollector
from server.observe.metric_factory import open_metrics, text_of
from tests.server.observe.test_metrics import engine, view


def test_engine_series_are_formatted_like_the_library() -> None:
    setup = EngineSetup(100, 16, 512, "f", 8, True, 0.9, None, 1 << 30)
    shown = view(engine(0, running=3, setup=setup), engine(1, stats=None), engine(12, waiting=2))
    collector: Collector = EngineCollector(
        "x:", 'a "model"\\of\nmine', shown, None, {0: 0.5}, None, shows_cluster=True
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    assert text_of(collector.collect()) == generate_latest(registry)


def test_text_format_converts_to_open_metrics() -> None:
    registry = CollectorRegistry()
    counter = Counter("x:seen", 'A "help"\n\\ text.', ("a",), registry=registry)
    counter.labels('say "_created 1"\nor # TYPE x_total counter').inc(2)
    times = Histogram("x:seconds", "Times.", ("a",), buckets=(1, 2.5), registry=registry)
    for label in "bc":
        times.labels(label).observe(2)
    setup = EngineSetup(100, 16, 512, "f", 8, True, 0.9, None, 1 << 30)
    shown = view(engine(0, running=3, setup=setup), engine(1, stats=None))
    engines = list(
        EngineCollector("x:", "m", shown, None, {0: 0.5}, None, shows_cluster=True).collect()
    )
    text = open_metrics(generate_latest(registry) + text_of(engines)).decode()
    found = {each.name: each for each in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert found.keys() == {"x:seen", "x:seconds", *(each.name for each in engines)}
    for expected in (*registry.collect(), *engines):
        parsed = found[expected.name]
        assert (parsed.type, parsed.documentation) == (expected.type, expected.documentation)
        samples = [(each.name, each.labels, each.value) for each in parsed.samples]
        assert samples == [
            (each.name, each.labels, each.value)
            for each in expected.samples
            if not each.name.endswith("_created")
        ]
