"""Access log lines per response and log lines per engine."""

import logging
from typing import Any

import msgspec
import pytest

from engine.shared.messages import ClusterView, EngineCounters, EngineEntry, EngineStats
from server.config import FrontEndConfig
from server.observe.stats_log import StatsLog


class TestAccessLog:
    @pytest.fixture
    def config(self, config: FrontEndConfig) -> FrontEndConfig:
        http = msgspec.structs.replace(config.http, access_log=True)
        return msgspec.structs.replace(config, http=http)

    def test_every_answer_is_logged_with_its_request(self, http: Any, caplog: Any) -> None:
        caplog.set_level(logging.INFO, "server.observe.access_log")
        headers = {"X-Request-Id": "abc", "Authorization": "Bearer secret"}
        http.post("/v1/completions?token=secret", {"prompt": "x"}, headers=headers)
        http.post("/v1/completions", {"prompt": ""}, headers=headers)
        http.get("/nowhere%0Aforged%20line")
        for probe in ("/health", "/ready", "/metrics"):
            assert http.get(probe).status_code == 200
        done, refused, missing = caplog.records
        assert (done.method, done.path, done.status) == ("POST", "/v1/completions", 200)
        assert (done.request_id, refused.request_id) == ("abc", "abc")
        assert done.getMessage().endswith("ms request abc")
        assert (refused.status, missing.status) == (400, 404)
        assert "\n" not in missing.getMessage()
        assert "secret" not in caplog.text

    def test_failed_probe_is_logged(self, http: Any, engines: Any, caplog: Any) -> None:
        caplog.set_level(logging.INFO, "server.observe.access_log")
        engines.ready = False
        assert http.get("/ready").status_code == 503
        (failed,) = caplog.records
        assert (failed.path, failed.status) == ("/ready", 503)


def test_no_access_log_by_default(http: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    http.get("/health")
    assert not [record for record in caplog.records if record.name == "server.observe.access_log"]


def stats(tokens: int, *, incarnation: int = 1, running: int = 0, hits: int = 0) -> EngineStats:
    return EngineStats(
        rank=0, incarnation=incarnation, version=tokens, wave=0, step=0, waiting=0,
        running=running, kv_usage=0.25, queued_prefill_tokens=0,
        counters=EngineCounters(
            prefix_cache_queries=2 * hits, prefix_cache_hits=hits,
            prompt_tokens=3 * tokens, generation_tokens=tokens,
        ),
    )  # fmt: skip


def view(each: EngineStats | None) -> ClusterView:
    return ClusterView(1, 1, 0, True, [EngineEntry(0, 1, True, "node", 0, None, each)], 1)


def test_busy_engines_have_a_line_with_their_rates() -> None:
    log = StatsLog()
    assert log.lines(None, 0.0) == []
    assert log.lines(view(None), 0.0) == []
    assert log.lines(view(stats(100)), 10.0) == []
    (line,) = log.lines(view(stats(200, running=4, hits=50)), 20.0)
    assert (line.generated_tokens_per_s, line.prompt_tokens_per_s) == (10.0, 30.0)
    assert str(line) == (
        "engine 0: 30.0 prompt tok/s, 10.0 generated tok/s, 4 running, 0 waiting, "
        "KV cache 25.0 %, prefix cache hits 50.0 %"
    )


def test_drafts_are_logged_if_there_are_any() -> None:
    log = StatsLog()
    log.lines(view(stats(100)), 10.0)
    drafting = msgspec.structs.replace(
        stats(200), counters=EngineCounters(spec_draft_tokens=40, spec_accepted_tokens=30)
    )
    (line,) = log.lines(view(drafting), 20.0)
    assert str(line).endswith("prefix cache hits 0.0 %, draft tokens accepted 75.0 %")


def test_idle_and_restarted_engines_log_no_rates() -> None:
    log = StatsLog()
    log.lines(view(stats(200)), 10.0)
    assert log.lines(view(stats(200)), 20.0) == []
    assert log.lines(view(stats(5, incarnation=2)), 30.0) == []
    assert log.lines(view(stats(15, incarnation=2)), 40.0)[0].generated_tokens_per_s == 1.0
