import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import ClusterView, EngineEntry, EngineStats
from server.config import FrontEndConfig, HttpConfig, ModelConfig
from server.observe.metrics import FrontEndMetrics


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    labels = {"model_name": "tiny", **labels}
    return samples(text)["swell_" + name, tuple(sorted(labels.items()))]


def engine(rank: int, **fields: Any) -> EngineEntry:
    stats = EngineStats(
        rank=rank,
        incarnation=7,
        version=1,
        wave=0,
        step=5,
        waiting=fields.pop("waiting", 0),
        running=fields.pop("running", 0),
        kv_usage=0.25,
        queued_prefill_tokens=0,
        prefix_cache_hits_total=11,
        dummy_steps_total=3,
        grammar_requests_total=11,
        grammar_waits_total=2,
        spec_drafts_total=5,
        spec_draft_tokens_total=20,
        spec_accepted_tokens_total=13,
    )
    return EngineEntry(
        rank=rank,
        incarnation=7,
        ready=True,
        host="here",
        restarts=fields.pop("restarts", 0),
        setup=None,
        stats=fields.pop("stats", stats),
    )


def view(*engines: EngineEntry) -> ClusterView:
    return ClusterView(
        epoch=1,
        version=1,
        wave=4,
        running=True,
        engines=list(engines),
        num_front_ends=2,
        wakeups_total={"front_end": 6},
    )


def test_requests_are_counted_and_timed(http: Any) -> None:
    http.complete(prompt=[5, 6, 7], max_tokens=100)
    http.complete(prompt=[5, 6], max_tokens=2)
    http.post("/v1/completions", {"prompt": ""})
    text = http.get("/metrics").text
    assert value(text, "prompt_tokens_total") == 5
    assert value(text, "request_success_total", finished_reason="stop") == 1
    assert value(text, "request_success_total", finished_reason="length") == 1
    generated = value(text, "generation_tokens_total")
    assert generated > 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert value(text, name + "_count") == 2
        assert value(text, name + "_sum") > 0
    assert value(text, "request_queue_time_seconds_count") == 2
    assert value(text, "inter_token_latency_seconds_count") == generated - 2
    assert value(text, "inter_token_latency_seconds_bucket", le="+Inf") == generated - 2
    path = "/v1/completions"
    assert value(text, "http_requests_total", endpoint=path, status="200") == 2
    assert value(text, "http_requests_total", endpoint=path, status="400") == 1


def test_what_the_engine_client_counts_is_shown(
    front_end_metrics: FrontEndMetrics, engines: Any
) -> None:
    front_end_metrics.routing_decision(1, "least_loaded")
    front_end_metrics.routing_decision(1, "least_loaded")
    front_end_metrics.request_resumed()
    front_end_metrics.observe_wake(0.003)
    text = front_end_metrics.render(engines).decode()
    assert value(text, "routing_decisions_total", engine="1", reason="least_loaded") == 2
    assert value(text, "requests_resumed_total") == 1
    assert value(text, "wake_latency_seconds_bucket", le="0.005") == 1


def test_engines_are_shown_as_the_view_has_them(http: Any, engines: Any) -> None:
    engines.view = view(
        engine(0, running=3), engine(1, waiting=2, restarts=1), engine(2, stats=None)
    )
    engines.stats_age = {0: 0.5}
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.text
    assert value(text, "num_requests_running", engine="0") == 3
    assert value(text, "num_requests_waiting", engine="1") == 2
    assert value(text, "kv_cache_usage_perc", engine="0") == 0.25
    assert value(text, "prefix_cache_hits_total", engine="0") == 11
    assert value(text, "dummy_steps_total", engine="1") == 3
    assert value(text, "spec_decode_num_drafts_total", engine="1") == 5
    assert value(text, "spec_decode_num_draft_tokens_total", engine="1") == 20
    assert value(text, "spec_decode_num_accepted_tokens_total", engine="1") == 13
    assert value(text, "structured_output_requests_total", engine="1") == 11
    assert value(text, "structured_output_waits_total", engine="1") == 2
    assert value(text, "engine_up", engine="2") == 1
    assert value(text, "engine_restarts_total", engine="1") == 1
    assert value(text, "stats_age_seconds", engine="0") == 0.5
    assert (value(text, "wave"), value(text, "engines_running")) == (4, 1)
    assert value(text, "front_ends") == 2
    assert value(text, "wave_wakeups_total", source="front_end") == 6


def test_one_engine_can_be_read_alone(http: Any, engines: Any) -> None:
    engines.view = view(engine(0, running=3), engine(1, running=4))
    text = http.get("/metrics/engine/1").text
    assert {dict(labels)["engine"] for _, labels in samples(text)} == {"1"}
    assert value(text, "num_requests_running", engine="1") == 4
    assert http.get("/metrics/engine/2").status_code == 404
    error = http.get("/metrics/engine/one").json()["error"]
    assert error["param"] is not None


@pytest.mark.parametrize(
    ("prefix", "name"), [("vllm:", "vllm:prompt_tokens_total"), ("", "prompt_tokens_total")]
)
def test_the_prefix_can_be_chosen(engines: Any, prefix: str, name: str) -> None:
    config = FrontEndConfig(http=HttpConfig(metrics_prefix=prefix))
    text = FrontEndMetrics(config).render(engines).decode()
    assert re.search(rf"^{name}\{{", text, re.MULTILINE)


def test_an_impossible_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="metrics prefix"):
        FrontEndMetrics(FrontEndConfig(http=HttpConfig(metrics_prefix="1 ")))


_COUNTING_PROCESS = """
from server.config import FrontEndConfig, ModelConfig
from server.observe.metrics import FrontEndMetrics

model = ModelConfig(model="org/m", served_model_name=("tiny",))
metrics = FrontEndMetrics(FrontEndConfig(model=model))
metrics.submitted(0.0, [5])
timer = metrics.sequence(0.0)
timer.tokens(1)
timer.tokens(1)
timer.finished("stop")

class Client:
    view = None
    stats_age = {}

print(metrics.render(Client()).decode())
"""


def test_one_scrape_sums_all_processes_of_the_node(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in (1, 2, 3):
        done = subprocess.run(
            [sys.executable, "-c", _COUNTING_PROCESS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
        assert value(text, "prompt_tokens_total") == 5 * count
        assert value(text, "inter_token_latency_seconds_count") == count
        assert value(text, "request_success_total", finished_reason="stop") == count


def test_a_scrape_is_fast(http: Any, engines: Any, front_end_metrics: FrontEndMetrics) -> None:
    engines.view = view(*[engine(rank) for rank in range(64)])
    http.complete()
    durations = []
    for _ in range(5):
        started = time.perf_counter()
        front_end_metrics.render(engines)
        durations.append(time.perf_counter() - started)
    assert min(durations) < 0.02


def test_names_label_the_model(engines: Any) -> None:
    config = FrontEndConfig(model=ModelConfig(model="org/name"))
    assert 'model_name="org/name"' in FrontEndMetrics(config).render(engines).decode()
