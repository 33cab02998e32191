import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.shared.config import ClusterConfig
from engine.shared.messages import (
    ClusterView,
    EngineCounters,
    EngineEntry,
    EngineSetup,
    EngineStats,
    ExpertLoad,
    MissingEngine,
    ProcessEntry,
    ProcessUse,
    RequestOutput,
    RequestTiming,
)
from server.config import FrontEndConfig, GuardConfig, HttpConfig
from server.observe.metric_factory import MetricFactory
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceMetrics
from server.router.request import EngineTimes
from tests.support.cpu_time import takes_less_than


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
        counters=EngineCounters(
            prefix_cache_hits=11,
            dummy_steps=3,
            grammar_requests=11,
            grammar_waits=2,
            spec_drafts=5,
            spec_draft_tokens=20,
            spec_accepted_tokens=13,
            spec_accepted_at=[8, 5],
            spec_skipped=6,
            sleeps=2,
            sleep_seconds=1.5,
            wake_ups=3,
            wake_up_seconds=0.25,
            step_tokens_buckets=[2, 1, *[0] * 10, 0, 1],
            step_tokens=20020,
        ),
        deferred=fields.pop("deferred", 0),
        sleep_level=fields.pop("sleep_level", 0),
        experts=fields.pop("experts", None),
    )
    return EngineEntry(
        rank=rank,
        incarnation=7,
        ready=True,
        host="here",
        restarts=fields.pop("restarts", 0),
        setup=fields.pop("setup", None),
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
    assert value(text, "prompt_tokens_total", engine="0") == 5
    by_source = "prompt_tokens_by_source_total"
    assert value(text, by_source, engine="0", source="local_cache_hit") == 5
    assert value(text, by_source, engine="0", source="local_compute") == 0
    assert value(text, "prompt_tokens_cached_total", engine="0") == 5
    assert value(text, "request_success_total", engine="0", finished_reason="stop") == 1
    assert value(text, "request_success_total", engine="0", finished_reason="length") == 1
    generated = value(text, "generation_tokens_total", engine="0")
    assert generated > 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert value(text, name + "_count", engine="0") == 2
        assert value(text, name + "_sum", engine="0") > 0
    assert value(text, "request_preprocess_time_seconds_count") == 2
    latency = "inter_token_latency_seconds"
    assert value(text, f"{latency}_count", engine="0") == generated - 2
    assert value(text, f"{latency}_bucket", engine="0", le="+Inf") == generated - 2
    path = "/v1/completions"
    assert value(text, "http_requests_total", endpoint=path, status="200") == 2
    assert value(text, "http_requests_total", endpoint=path, status="400") == 1


def test_unknown_paths_create_no_series(http: Any) -> None:
    for number in range(3):
        assert http.get(f"/scanned-{number}/.env").status_code == 404
        assert http.post(f"/v1/scanned-{number}", {}).status_code == 404
    assert "scanned" not in http.get("/metrics").text


def test_parsed_tool_call_answers_are_counted(http: Any) -> None:
    turns = [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"model": "tiny", "messages": turns, "max_tokens": 2}
    assert http.post("/v1/chat/completions", body | {"tools": [tool], "n": 2}).status_code == 200
    assert http.post("/v1/chat/completions", body).status_code == 200
    text = http.get("/metrics").text
    assert value(text, "tool_call_parser_invocations_total", parser="hermes") == 2


def test_tokens_are_counted_by_the_name_of_the_key(
    http_of: Any, config: Any, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("batch: of-batch\nchat: of-chat\n")
    guards = GuardConfig(api_key_file=str(file), open_metrics=True)
    http = http_of(msgspec.structs.replace(config, guards=guards))
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "user": "ann"}
    for key in ("of-batch", "of-batch", "of-chat", "of-nobody"):
        http.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    text = http.get("/metrics").text
    for key, requests in (("batch", 2), ("chat", 1)):
        assert value(text, "key_requests_total", key=key) == requests
        assert value(text, "key_prompt_tokens_total", key=key) == 3 * requests
        assert value(text, "key_generation_tokens_total", key=key) == 2 * requests
    assert text.count("swell_key_requests_total{") == 2


def test_requests_that_waited_in_their_engine_show_as_queue_time(http: Any, engines: Any) -> None:
    def script(stream: Any) -> list[RequestOutput]:
        first = RequestOutput(1, [70], timing=RequestTiming(4.0, 0.5), num_cached_tokens=2)
        last = RequestOutput(1, [71, 72], "length", timing=RequestTiming(4.0, 0.5, 0.25, 3))
        return [first, last]

    engines.script = script
    http.complete(prompt=[5, 6, 7], max_tokens=3)
    text = http.get("/metrics").text
    seconds = {"queue": 4.0, "prefill": 0.5, "decode": 0.25, "inference": 0.75}
    for phase, expected in seconds.items():
        assert value(text, f"request_{phase}_time_seconds_sum", engine="0") == expected
        assert value(text, f"request_{phase}_time_seconds_count", engine="0") == 1
    assert value(text, "request_prefill_kv_computed_tokens_sum", engine="0") == 1
    assert value(text, "request_num_preemptions_sum", engine="0") == 3
    assert value(text, "request_num_preemptions_bucket", engine="0", le="2.0") == 0
    assert value(text, "request_queue_time_seconds_bucket", engine="0", le="2.5") == 0
    assert value(text, "request_queue_time_seconds_bucket", engine="0", le="5.0") == 1


def test_request_without_tokens_has_no_engine_times(http: Any, engines: Any) -> None:
    engines.script = lambda stream: [RequestOutput(1, [], "error", error="out of luck")]
    http.post("/v1/completions", {"prompt": [5]})
    text = http.get("/metrics").text
    assert value(text, "request_queue_time_seconds_count", engine="0") == 0
    assert value(text, "request_success_total", engine="0", finished_reason="error") == 1
    assert value(text, "prompt_tokens_total", engine="0") == 0


def test_parameters_count_per_prompt_and_lengths_per_sequence(http: Any, engines: Any) -> None:
    lengths = iter((2, 5, 3))

    def script(stream: Any) -> list[RequestOutput]:
        return [RequestOutput(1, [70] * next(lengths), "length")]

    engines.script = script
    http.complete(prompt=[5, 6, 7], max_tokens=9, n=3)
    text = http.get("/metrics").text
    for name, total, count in (
        ("request_params_n", 3, 1),
        ("request_max_num_generation_tokens", 5, 1),
        ("request_params_max_tokens", 27, 3),
        ("request_prompt_tokens", 9, 3),
        ("request_generation_tokens", 10, 3),
    ):
        assert value(text, f"{name}_sum", engine="0") == total, name
        assert value(text, f"{name}_count", engine="0") == count, name
    assert value(text, "prompt_tokens_total", engine="0") == 9


def test_sequence_counts_for_its_current_engine(
    front_end_metrics: FrontEndMetrics, engines: Any
) -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    params = PromptParams(prompt_tokens=4, max_tokens=9, n=1, sequences=1)
    timer = front_end_metrics.sequence(0.0, params, times)
    timer.tokens(2)
    times.left(1.0)
    times.sent(5, 1.0)
    timer.tokens(3)
    timer.finished("length")
    text = front_end_metrics.render(engines).decode()
    assert value(text, "generation_tokens_total", engine="0") == 2
    assert value(text, "generation_tokens_total", engine="5") == 3
    assert value(text, "time_to_first_token_seconds_count", engine="0") == 1
    assert value(text, "e2e_request_latency_seconds_count", engine="0") == 0
    assert value(text, "request_success_total", engine="5", finished_reason="length") == 1
    assert value(text, "request_prompt_tokens_sum", engine="5") == 4


def test_times_to_first_token_are_summed_over_engines(front_end_metrics: FrontEndMetrics) -> None:
    for rank in (0, 3):
        times = EngineTimes()
        times.sent(rank, 0.0)
        params = PromptParams(prompt_tokens=4, max_tokens=9, n=1, sequences=1)
        front_end_metrics.sequence(0.0, params, times).tokens(1)
    assert front_end_metrics.first_token_times()[1] == 2


def test_engine_client_counters_are_exported(
    front_end_metrics: FrontEndMetrics, engines: Any
) -> None:
    front_end_metrics.count("routing_decisions", 1, "least_loaded")
    front_end_metrics.count("routing_decisions", 1, "least_loaded")
    front_end_metrics.count("requests_resumed")
    front_end_metrics.observe("wake_latency_seconds", 0.003)
    text = front_end_metrics.render(engines).decode()
    assert value(text, "routing_decisions_total", engine="1", reason="least_loaded") == 2
    assert value(text, "requests_resumed_total") == 1
    assert value(text, "wake_latency_seconds_bucket", le="0.005") == 1


def test_engines_that_measure_the_load_of_experts_show_it(http: Any, engines: Any) -> None:
    engines.view = view(engine(0))
    assert "swell_expert" not in http.get("/metrics").text
    engines.view = view(engine(0, experts=ExpertLoad()), engine(1, experts=ExpertLoad(1.25, 6)))
    text = http.get("/metrics").text
    assert value(text, "expert_imbalance", engine="1") == 1.25
    assert 'swell_expert_imbalance{engine="0"' not in text, "not known yet"
    assert value(text, "expert_layers_moved_total", engine="0") == 0
    assert value(text, "expert_layers_moved_total", engine="1") == 6


def test_every_process_reports_build_and_resource_usage(http: Any, engines: Any) -> None:
    use = ProcessUse(2.5, 3 << 20, 12, 1024, 1000.5)
    processes = [
        ProcessEntry("coordinator", "head", "0.1.0", 4, use),
        ProcessEntry("engine 0", "node", "0.1.0", 4, use),
        ProcessEntry("api 0", "head", "0.0.9", 3, None),
    ]
    engines.view = msgspec.structs.replace(view(engine(0)), processes=processes)
    text = http.get("/metrics").text
    older = {"process": "api 0", "host": "head", "version": "0.0.9", "protocol": "3"}
    assert value(text, "build_info", **older) == 1
    for process, host in (("coordinator", "head"), ("engine 0", "node")):
        labels = {"process": process, "host": host}
        assert value(text, "build_info", **labels, version="0.1.0", protocol="4") == 1
        assert value(text, "process_cpu_seconds_total", **labels) == 2.5
        assert value(text, "process_resident_memory_bytes", **labels) == 3 << 20
        assert value(text, "process_open_fds", **labels) == 12
        assert value(text, "process_max_fds", **labels) == 1024
        assert value(text, "process_start_time_seconds", **labels) == 1000.5
    assert 'process_open_fds{host="head",model_name="tiny",process="api 0"}' not in text
    of_engine = http.get("/metrics/engine/0").text
    assert value(of_engine, "process_open_fds", process="engine 0", host="node") == 12
    assert 'process="coordinator"' not in of_engine


def test_engine_metrics_equal_the_view(http: Any, engines: Any) -> None:
    engines.view = view(
        engine(0, running=3, sleep_level=2),
        engine(1, waiting=5, deferred=2, restarts=1),
        engine(2, stats=None),
    )
    engines.stats_age, engines.view_age = {0: 0.5}, 1.5
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.text
    assert value(text, "num_requests_running", engine="0") == 3
    assert value(text, "num_requests_waiting", engine="1") == 5
    by_reason = "num_requests_waiting_by_reason"
    assert value(text, by_reason, engine="1", reason="capacity") == 3
    assert value(text, by_reason, engine="1", reason="deferred") == 2
    assert value(text, "kv_cache_usage_perc", engine="0") == 0.25
    assert value(text, "prefix_cache_hits_total", engine="0") == 11
    assert value(text, "dummy_steps_total", engine="1") == 3
    assert value(text, "spec_decode_num_drafts_total", engine="1") == 5
    assert value(text, "spec_decode_num_draft_tokens_total", engine="1") == 20
    assert value(text, "spec_decode_num_accepted_tokens_total", engine="1") == 13
    assert value(text, "spec_decode_num_skipped_total", engine="1") == 6
    assert value(text, "engine_sleeps_total", engine="0") == 2
    assert value(text, "engine_sleep_seconds_total", engine="0") == 1.5
    assert value(text, "engine_wake_ups_total", engine="0") == 3
    assert value(text, "engine_wake_up_seconds_total", engine="0") == 0.25
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    counts = [value(text, per_position, engine="1", position=place) for place in ("0", "1")]
    assert counts == [8, 5]
    states = ("awake", "weights_offloaded", "discard_all")
    for number, expected in (("0", [0, 0, 1]), ("1", [1, 0, 0])):
        shown = [
            value(text, "engine_sleep_state", engine=number, sleep_state=each) for each in states
        ]
        assert shown == expected
    assert value(text, "structured_output_requests_total", engine="1") == 11
    assert value(text, "structured_output_waits_total", engine="1") == 2
    assert value(text, "iteration_tokens_total_count", engine="0") == 4
    assert value(text, "iteration_tokens_total_sum", engine="0") == 20020
    assert value(text, "iteration_tokens_total_bucket", engine="0", le="8.0") == 3
    assert value(text, "iteration_tokens_total_bucket", engine="0", le="16384.0") == 3
    assert value(text, "engine_up", engine="2") == 1
    assert value(text, "engine_restarts_total", engine="1") == 1
    assert value(text, "stats_age_seconds", engine="0") == 0.5
    assert value(text, "coordinator_silence_seconds") == 1.5
    assert (value(text, "wave"), value(text, "engines_running")) == (4, 1)
    assert value(text, "front_ends") == 2
    assert value(text, "wave_wakeups_total", source="front_end") == 6


def test_missing_and_starting_engines_are_counted_separately(http: Any, engines: Any) -> None:
    loading = msgspec.structs.replace(engine(1, stats=None), ready=False)
    ends = msgspec.structs.replace(engine(2, stats=None), ready=False, draining=True)
    lost = MissingEngine(3, "silent", 75.0)
    shown = view(engine(0), loading, ends)
    engines.view = msgspec.structs.replace(shown, expected=4, missing=[lost])
    text = http.get("/metrics").text
    assert value(text, "engines_expected") == 4
    assert value(text, "engine_missing_seconds", engine="3", reason="silent") == 75.0
    starting = [value(text, "engine_starting", engine=str(rank)) for rank in range(3)]
    assert starting == [0, 1, 0]
    assert [value(text, "engine_up", engine=str(rank)) for rank in range(3)] == [1, 0, 0]


def test_the_kv_cache_of_an_engine_is_described(http: Any, engines: Any) -> None:
    setup = EngineSetup(100, 16, 512, "f", 8, True, 0.9, None, 1 << 30, kv_cache_dtype="fp8")
    engines.view = view(engine(3, setup=setup), engine(4))
    text = http.get("/metrics").text
    labels = {
        "block_size": "16",
        "cache_dtype": "fp8",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.9",
        "kv_cache_memory_bytes": "1073741824",
        "kv_cache_size_tokens": "1600",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": "100",
        "num_gpu_blocks_override": "None",
    }
    assert value(text, "cache_config_info", engine="3", **labels) == 1


def test_token_capacity_of_grouped_cache_is_that_of_smallest_group(http: Any, engines: Any) -> None:
    setup = EngineSetup(300, 16, 512, "f", num_kv_blocks_set=100, num_cache_groups=3)
    engines.view = view(engine(3, setup=setup))
    labels = {
        "kv_cache_size_tokens": "1600",
        "num_gpu_blocks": "300",
        "num_gpu_blocks_override": "100",
    }
    text = http.get("/metrics").text
    (found,) = [dict(each) for name, each in samples(text) if name.endswith("cache_config_info")]
    assert found.items() >= labels.items()


def test_metrics_of_one_engine_can_be_read(http: Any, engines: Any) -> None:
    engines.view = view(engine(0, running=3), engine(1, running=4))
    text = http.get("/metrics/engine/1").text
    assert {dict(labels).get("engine") for _, labels in samples(text)} == {"1", None}
    assert {name for name, labels in samples(text) if "engine" not in dict(labels)} == {
        "swell_wave", "swell_engines_running"
    }  # fmt: skip
    assert value(text, "num_requests_running", engine="1") == 4
    assert http.get("/metrics/engine/2").status_code == 404
    error = http.get("/metrics/engine/one").json()["error"]
    assert error["param"] is not None


@pytest.mark.parametrize(
    ("prefix", "name"),
    [("vllm:", "vllm:requests_resumed_total"), ("", "requests_resumed_total")],
)
def test_metric_prefix_can_be_configured(engines: Any, prefix: str, name: str) -> None:
    config = FrontEndConfig(http=HttpConfig(metrics_prefix=prefix))
    text = FrontEndMetrics(config).render(engines).decode()
    assert re.search(rf"^{name}\{{", text, re.MULTILINE)


def test_invalid_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="metrics prefix"):
        FrontEndMetrics(FrontEndConfig(http=HttpConfig(metrics_prefix="1 ")))


_COUNTING_PROCESS = """
from engine.shared.messages import RequestTiming
from server.router.request import EngineTimes
from engine.shared.config import ModelConfig
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams

model = ModelConfig(model="org/m", served_model_name=("tiny",))
metrics = FrontEndMetrics(FrontEndConfig(model=model))
metrics.submitted(0.0)
times = EngineTimes()
times.sent(3, 1.0)
times.record_timing(RequestTiming(0.25, 0.5, 2.0), 2.0, last=True)
params = PromptParams(prompt_tokens=5, max_tokens=7, n=1, sequences=1)
timer = metrics.sequence(0.0, params, times)
timer.tokens(1)
timer.tokens(1)
timer.finished("stop")

class Client:
    view = None
    stats_age = {}
    view_age = None

print(metrics.render(Client()).decode())
"""


def test_one_scrape_sums_all_processes_of_the_node(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", _COUNTING_PROCESS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
        assert value(text, "prompt_tokens_total", engine="3") == 5 * count
        assert value(text, "inter_token_latency_seconds_count", engine="3") == count
        assert value(text, "request_queue_time_seconds_sum", engine="3") == 0.25 * count
        assert value(text, "request_success_total", engine="3", finished_reason="stop") == count


_RESTARTED_PROCESS = """
import sys
from engine.shared.config import ModelConfig
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics

class Client:
    view = None
    stats_age = {}
    view_age = None

model = ModelConfig(model="org/tiny", served_model_name=("tiny",))
metrics = FrontEndMetrics(FrontEndConfig(model=model), int(sys.argv[1]))
metrics.replaces({"died": int(sys.argv[2])})
print(metrics.render(Client()).decode())
"""


def test_every_restart_of_an_api_server_counts_though_some_never_served(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for place, restarts in ((1, 0), (0, 1), (0, 4), (0, 4)):
        program = [sys.executable, "-c", _RESTARTED_PROCESS, str(place), str(restarts)]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
        assert value(done.stdout, "api_server_restarts_total", reason="died") == restarts


def test_a_scrape_does_not_hold_the_event_loop(
    http: Any, engines: Any, front_end_metrics: FrontEndMetrics
) -> None:
    engines.view = view(*[engine(rank) for rank in range(64)])
    http.complete()
    takes_less_than(0.1, lambda: front_end_metrics.render(engines))


def many_engines(number: int, hosts: list[str], api_hosts: list[str]) -> ClusterView:
    """Return a view of API servers and of engines distributed over hosts."""
    engines = [
        msgspec.structs.replace(engine(rank), host=hosts[rank % len(hosts)])
        for rank in range(number)
    ]
    names = [ProcessEntry(f"api {i}", host, "1", 4, None) for i, host in enumerate(api_hosts)]
    names += [ProcessEntry(f"engine {e.rank}", e.host, "1", 4, None) for e in engines]
    return msgspec.structs.replace(view(*engines), processes=names)


def test_each_engine_is_exported_by_one_node(engines: Any) -> None:
    api_hosts = ["a", "b"]
    engines.view = many_engines(30, ["a", "b", "c"], api_hosts)
    shown = []
    for host in api_hosts:
        config = FrontEndConfig(
            http=HttpConfig(metrics_engines=29), cluster=ClusterConfig(node=host)
        )
        text = FrontEndMetrics(config).render(engines).decode()
        ranks = re.findall(r'engine_up\{engine="(\d+)"', text)
        assert len(ranks) > 9
        shown += ranks
        processes = re.findall(r'build_info\{.*?process="engine (\d+)"', text)
        assert processes == ranks
        ready = value(text, "engines_ready", model_name="swell-shakespeare")
        assert ready == 30, "numbers of the cluster are those of all"
    assert sorted(map(int, shown)) == list(range(30))


def test_all_engines_up_to_the_limit_are_exported(engines: Any) -> None:
    engines.view = many_engines(30, ["a", "b", "c"], ["a", "b"])
    text = FrontEndMetrics(FrontEndConfig(http=HttpConfig(metrics_engines=30))).render(engines)
    assert len(re.findall(rb"engine_up\{", text)) == 30


def test_sequences_of_engines_beyond_the_limit_share_series() -> None:
    metrics = SequenceMetrics(MetricFactory("swell_", "m", registry := CollectorRegistry()), 2)
    for rank in range(9):
        metrics.of_engine(rank).prompt(10, 0)
    metrics.flush()
    found = {
        sample.labels["engine"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "swell_prompt_tokens_total"
    }
    assert found == {"0": 10, "1": 10, "others": 70}
