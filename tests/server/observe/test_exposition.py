from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from engine.shared.messages import EngineSetup
from server.observe.engine_metrics import EngineCollector
from server.observe.metric_factory import text_of
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
