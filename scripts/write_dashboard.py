"""Writes the Grafana dashboard, helm/swell/files/dashboard.json.

Every front end exports the series of all engines, so `max` reduces them to one per engine. Series
of the front ends themselves are summed.
"""

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "helm" / "swell" / "files" / "dashboard.json"

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24
_HEIGHT = 8


def engine(metric: str) -> str:
    """Return an expression with one series per engine."""
    return f"max by (engine) (swell_{metric}{{{_SELECT}}})"


def engine_rate(metric: str) -> str:
    """Return the rate of a counter, per engine."""
    return f"max by (engine) (rate(swell_{metric}{{{_SELECT}}}[$__rate_interval]))"


def engines_rate(metric: str) -> str:
    """Return the rate of a counter, summed over engines."""
    return f"sum({engine_rate(metric)})"


def process(metric: str) -> str:
    """Return one series per process; all front ends export the same values."""
    return f"max by (process, host) (swell_process_{metric}{{{_SELECT}}})"


def cluster(metric: str) -> str:
    """Return a single series; all front ends export the same value."""
    return f"max(swell_{metric}{{{_SELECT}}})"


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Return the rate of a front-end counter, summed over front ends."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(swell_{metric}{{{_SELECT}{more}}}[$__rate_interval]))"


def quantile(share: float, histogram: str) -> str:
    """Return a quantile of a histogram over all front ends."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le')})"


_PROCESS = "{{process}} {{host}}"
_SELECT = 'job=~"$job", model_name=~"$model"'


def panel(
    title: str,
    targets: dict[str, str],
    *,
    unit: str = "short",
    kind: str = "timeseries",
    width: int = 8,
    text: str = "",
    stacked: bool = False,
) -> dict[str, Any]:
    """Return one panel.

    Args:
        title: panel title.
        targets: PromQL expressions by legend.
        unit: Grafana unit id.
        kind: Grafana panel type.
        width: in columns; a row has 24.
        text: tooltip of the title.
        stacked: stack the series, as parts of a whole.
    """
    heatmap = kind == "heatmap"
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if stacked:
        custom = {"fillOpacity": 40, "showPoints": "never", "stacking": {"mode": "normal"}}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}}
    if heatmap:
        options = {
            "calculate": False,
            "yAxis": {"unit": unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "cellGap": 1,
        }
    if kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    return {
        "title": title,
        "description": text,
        "type": kind,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
                "format": "heatmap" if heatmap else "time_series",
            }
            for number, (legend, expression) in enumerate(targets.items())
        ],
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, **({} if heatmap else {"custom": custom})},
            "overrides": [],
        },
        "options": options,
        "gridPos": {"w": width, "h": 4 if kind == "stat" else _HEIGHT},
    }


def _quantiles(histogram: str) -> dict[str, str]:
    return {f"p{round(share * 100)}": quantile(share, histogram) for share in (0.5, 0.95, 0.99)}


_LOAD = f"({engine('num_requests_running')} + {engine('num_requests_waiting')})"

ROWS: dict[str, list[dict[str, Any]]] = {
    "Service": [
        panel("Engines ready", {"": cluster("engines_ready")}, kind="stat", width=4),
        panel("API-server processes", {"": cluster("front_ends")}, kind="stat", width=4),
        panel("Running", {"": f"sum({engine('num_requests_running')})"}, kind="stat", width=4),
        panel("Waiting", {"": f"sum({engine('num_requests_waiting')})"}, kind="stat", width=4),
        panel("Tokens/s", {"": rate("generation_tokens_total")}, kind="stat", width=4),
        panel(
            "TTFT p95",
            {"": quantile(0.95, "time_to_first_token_seconds")},
            kind="stat", width=4, unit="s",
        ),
        panel(
            "Answers by status",
            {"{{status}}": rate("http_requests_total", "status", ', endpoint=~"/v1/.*"')},
            unit="reqps", stacked=True,
        ),
        panel(
            "Tokens per second",
            {"generated": rate("generation_tokens_total"), "prompt": rate("prompt_tokens_total")},
        ),
        panel(
            "Ends by reason",
            {"{{finished_reason}}": rate("request_success_total", "finished_reason")},
            unit="reqps", stacked=True,
        ),
    ],
    "Latency": [
        panel(
            "Time to first token",
            {"{{le}}": rate("time_to_first_token_seconds_bucket", "le")},
            kind="heatmap", unit="s", width=12,
        ),
        panel(
            "Time between tokens",
            {"{{le}}": rate("inter_token_latency_seconds_bucket", "le")},
            kind="heatmap", unit="s", width=12,
        ),
        panel("Time to first token", _quantiles("time_to_first_token_seconds"), unit="s", width=6),
        panel("Time between tokens", _quantiles("inter_token_latency_seconds"), unit="s", width=6),
        panel(
            "Per token of a request",
            _quantiles("request_time_per_output_token_seconds"), unit="s", width=6,
        ),
        panel("Whole request", _quantiles("e2e_request_latency_seconds"), unit="s", width=6),
    ],
    "Queues": [
        panel(
            "Running", {"engine {{engine}}": engine("num_requests_running")}, stacked=True, width=6
        ),
        panel(
            "Waiting", {"engine {{engine}}": engine("num_requests_waiting")}, stacked=True, width=6
        ),
        panel(
            "Prompt tokens not yet computed",
            {"engine {{engine}}": engine("queued_prefill_tokens")}, stacked=True, width=6,
        ),
        panel(
            "Before an engine is chosen",
            _quantiles("request_preprocess_time_seconds"), unit="s", width=6,
            text="From a request's arrival to its being handed to an engine.",
        ),
    ],
    "Phases": [
        panel(
            "Waiting in the engine",
            _quantiles("request_queue_time_seconds"), unit="s", width=6,
            text="From a sequence's arrival in its engine to its first step.",
        ),
        panel(
            "Prefill", _quantiles("request_prefill_time_seconds"), unit="s", width=6,
            text="From a sequence's first step to its first token.",
        ),
        panel(
            "Decode", _quantiles("request_decode_time_seconds"), unit="s", width=6,
            text="From a sequence's first token to its last.",
        ),
        panel(
            "Where time goes",
            {
                phase: rate(f"request_{phase}_time_seconds_sum")
                for phase in ("queue", "prefill", "decode")
            },
            unit="s", stacked=True, width=6,
            text="Seconds of all sequences that ended, per second.",
        ),
    ],
    "Balance": [
        panel(
            "Imbalance",
            {
                "(max - min) / mean": f"(max({_LOAD}) - min({_LOAD})) / clamp_min(avg({_LOAD}), 1)",
                "max / mean": f"max({_LOAD}) / clamp_min(avg({_LOAD}), 1)",
            },
            text="Of running and waiting requests per engine.",
        ),
        panel(
            "Tokens drawn",
            {"engine {{engine}}": engine_rate("engine_generation_tokens_total")},
        ),
        panel(
            "Prompt tokens computed",
            {"engine {{engine}}": engine_rate("engine_prompt_tokens_total")},
        ),
        panel(
            "Routed", {"engine {{engine}}": rate("routing_decisions_total", "engine")},
            unit="reqps", width=8,
        ),
        panel(
            "Routed because of", {"{{reason}}": rate("routing_decisions_total", "reason")},
            unit="reqps", width=8,
        ),
        panel(
            "Cached prompt tokens as routed",
            {
                "expected": rate("routing_expected_cached_tokens_total"),
                "found": rate("routing_found_cached_tokens_total"),
            },
            text="With --routing-policy prefix-aware: what engines were expected to have, and had.",
        ),
        panel(
            "Tokens per step",
            {
                "engine {{engine}}": f"{engine_rate('iteration_tokens_total_sum')} / "
                f"{engine_rate('iteration_tokens_total_count')}"
            },
            text="Prompt tokens computed and tokens drawn, on average.",
        ),
    ],
    "Waves": [
        panel("Wave", {"wave": cluster("wave"), "running": cluster("engines_running")}),
        panel(
            "Wake-ups", {"by {{source}}": f"max by (source) (rate(swell_wave_wakeups_total"
                         f"{{{_SELECT}}}[$__rate_interval]))"}, unit="ops",
        ),
        panel("From a request to evidence that engines run", _quantiles("wake_latency_seconds"),
              unit="s"),
        panel(
            "Steps without work",
            {"engine {{engine}}": engine_rate("dummy_steps_total")}, unit="ops", width=24,
            text="Of engines that keep a lockstep group together.",
        ),
    ],
    "KV cache": [
        panel(
            "In use", {"engine {{engine}}": engine("kv_cache_usage_perc")}, unit="percentunit"
        ),
        panel(
            "Prompt tokens found in the prefix cache",
            {
                "engine {{engine}}": f"{engine_rate('prefix_cache_hits_total')} / "
                f"{engine_rate('prefix_cache_queries_total')}"
            },
            unit="percentunit",
        ),
        panel("Preemptions", {"engine {{engine}}": engine_rate("num_preemptions_total")},
              unit="ops"),
    ],
    "KV tiers and transfers": [
        panel(
            "Tokens read instead of computed",
            {"from tiers": engines_rate("kv_tier_hits_total"),
             "from other engines": engines_rate("kv_transfer_hits_total")},
            unit="ops",
        ),
        panel(
            "Bytes",
            {"written to tiers": engines_rate("kv_tier_stored_bytes_total"),
             "sent": engines_rate("kv_transfer_sent_bytes_total"),
             "received": engines_rate("kv_transfer_bytes_total")},
            unit="Bps",
        ),
        panel(
            "Failures",
            {"errors of tiers": engines_rate("kv_tier_errors_total"),
             "blocks not stored": engines_rate("kv_tier_dropped_blocks_total"),
             "incomplete transfers": engines_rate("kv_transfer_failures_total"),
             "copies without room or reader": engines_rate("kv_transfer_dropped_blocks_total")},
            unit="ops",
            text="Each costs computing, never a request.",
        ),
        panel(
            "Requests waiting for blocks of other engines",
            {"engine {{engine}}": engine_rate("kv_transfer_seconds_total")},
            text="Mean number.",
        ),
        panel(
            "Memory of copies for other engines",
            {"engine {{engine}}": engine("kv_transfer_offered_bytes")}, unit="bytes",
        ),
    ],
    "Faults": [
        panel("Engines up", {"engine {{engine}}": engine("engine_up")}, width=6),
        panel("Restarts", {"engine {{engine}}": engine("engine_restarts_total")}, width=6),
        panel("Age of stats", {"engine {{engine}}": engine("stats_age_seconds")}, unit="s",
              width=6),
        panel("Requests that went on elsewhere", {"": rate("requests_resumed_total")},
              unit="reqps", width=6),
    ],
    "Processes": [
        panel("Resident memory", {_PROCESS: process("resident_memory_bytes")}, unit="bytes",
              width=6),
        panel(
            "Processors in use",
            {_PROCESS: "max by (process, host) (rate("
             f"swell_process_cpu_seconds_total{{{_SELECT}}}[$__rate_interval]))"},
            width=6,
        ),
        panel(
            "File descriptors in use",
            {_PROCESS: f"{process('open_fds')} / ({process('max_fds')} > 0)"},
            unit="percentunit", width=6,
        ),
        panel(
            "Falling asleep and waking up",
            {
                f"{word} {{{{engine}}}}": f"{engine_rate(f'engine_{name}_seconds_total')} / "
                f"{engine_rate(f'engine_{name}s_total')}"
                for word, name in (("asleep", "sleep"), ("awake", "wake_up"))
            },
            unit="s", width=6,
            text="How long an engine took to give its memory back, and to have it back.",
        ),
    ],
}  # fmt: skip


def _placed() -> list[dict[str, Any]]:
    """Return all panels, laid out from left to right, with a row header before each group."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, members in ROWS.items():
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**row, "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1}})
        top, left, height = top + 1, 0, 0
        for member in members:
            size = member["gridPos"]
            if left + size["w"] > _WIDTH:
                top, left, height = top + height, 0, 0
            panels.append({**member, "gridPos": {**size, "x": left, "y": top}})
            left, height = left + size["w"], max(height, size["h"])
        top += height
    return [{**each, "id": number} for number, each in enumerate(panels, start=1)]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name}, "refresh": 2, "includeAll": True,
        "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def render() -> str:
    """Return the whole dashboard as JSON."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource",
              "query": "prometheus"}  # fmt: skip
    dashboard = {
        "uid": "swell",
        "title": "Swell",
        "tags": ["swell", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                source,
                _variable("job", "Job", "label_values(swell_front_ends, job)"),
                _variable("model", "Model", "label_values(swell_front_ends, model_name)"),
            ]
        },
        "panels": _placed(),
    }
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
