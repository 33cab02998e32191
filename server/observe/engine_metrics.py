"""Metrics of the engines and the cluster, read from the newest cluster view at every scrape."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.shared.messages import (
    STEP_TOKENS_BOUNDS,
    ClusterView,
    EngineCounters,
    EngineEntry,
    EngineSetup,
    EngineStats,
    ProcessUse,
)
from server.router.generation_client import GenerationClient

_EngineValue = Callable[[EngineStats], float]
_Samples = Iterable[tuple[tuple[str, ...], float]]

_ENGINE_GAUGES: tuple[tuple[str, str, _EngineValue], ...] = (
    ("num_requests_running", "Sequences that run.", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences that wait for a slot.", lambda stats: stats.waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda stats: stats.kv_usage),
    (
        "queued_prefill_tokens",
        "Prompt tokens received and not yet computed.",
        lambda stats: stats.queued_prefill_tokens,
    ),
)

_PROCESS_GAUGES: tuple[tuple[str, str, Callable[[ProcessUse], float]], ...] = (
    ("resident_memory_bytes", "Resident memory.", lambda use: use.resident_bytes),
    ("open_fds", "Open file descriptors.", lambda use: use.open_fds),
    ("max_fds", "Maximum open file descriptors.", lambda use: use.max_fds),
    ("start_time_seconds", "Unix time at which the process began.", lambda use: use.started),
)


def _counters() -> Iterator[tuple[str, str, str]]:
    """Yield field, metric and help of every counter that an engine has."""
    for field in msgspec.inspect.type_info(EngineCounters).fields:  # type: ignore[attr-defined]
        described = field.type
        if isinstance(described, msgspec.inspect.Metadata) and described.extra_json_schema:
            schema = described.extra_json_schema
            yield field.name, schema["title"], schema["description"]


_ENGINE_COUNTERS = tuple(_counters())
_STEP_TOKENS_LABELS = [*map(floatToGoString, STEP_TOKENS_BOUNDS), "+Inf"]
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's words, by the level of sleep."""
_CACHE_CONFIG: dict[str, Callable[[EngineSetup], object]] = {
    "block_size": lambda setup: setup.block_size,
    "cache_dtype": lambda setup: setup.kv_cache_dtype,
    "enable_prefix_caching": lambda setup: setup.enable_prefix_caching,
    "gpu_memory_utilization": lambda setup: setup.gpu_memory_utilization,
    "kv_cache_memory_bytes": lambda setup: setup.kv_cache_memory_bytes,
    "kv_cache_size_tokens": lambda setup: setup.kv_tokens,
    "num_cpu_blocks": lambda setup: None,
    "num_gpu_blocks": lambda setup: setup.num_kv_blocks,
    "num_gpu_blocks_override": lambda setup: setup.num_kv_blocks_set,
}
"""vLLM's labels, as text like there; the cache is on one device."""


class Ages(NamedTuple):
    """Seconds since what is shown has arrived."""

    view: float | None
    """The coordinator's view."""
    stats: dict[int, float]
    """Stats of each engine, by rank."""


class EngineCollector(Collector):
    """What the newest cluster view says, of one rank or of all and the cluster."""

    def __init__(
        self,
        prefix: str,
        model_name: str,
        view: ClusterView | None,
        ages: Ages,
        rank: int | None,
    ) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._view = view
        self._ages = ages
        self._rank = rank

    def collect(self) -> Iterator[Metric]:
        view = self._view
        if view is None:
            return
        chosen = [entry for entry in view.engines if self._rank in (None, entry.rank)]
        reporting = [(entry, entry.stats) for entry in chosen if entry.stats is not None]
        for name, text, value in _ENGINE_GAUGES:
            samples = [(self._labels(entry), value(stats)) for entry, stats in reporting]
            yield self._gauge(name, text, ("model_name", "engine"), samples)
        for counter, name, text in _ENGINE_COUNTERS:
            samples = [
                (self._labels(entry), float(getattr(stats.counters, counter)))
                for entry, stats in reporting
            ]
            yield self._counter(name, text, ("model_name", "engine"), samples)
        yield self._waiting_by_reason(reporting)
        yield self._accepted_at(reporting)
        yield self._sleep_state(reporting)
        yield self._step_tokens(reporting)
        yield from self._experts(reporting)
        yield self._cache_config(chosen)
        yield from self._adapters(view, reporting)
        yield from self._membership(chosen)
        yield self._of_cluster("wave", "Number of the running period of the engines.", view.wave)
        text = "1 while the engines run, 0 while paused."
        yield self._of_cluster("engines_running", text, view.running)
        yield from self._processes(view)
        if self._rank is None:
            yield from self._cluster(view)

    def _of_cluster(self, name: str, text: str, number: float) -> Metric:
        sample = ((self._model_name,), float(number))
        return self._gauge(name, text, ("model_name",), [sample])

    def _processes(self, view: ClusterView) -> Iterator[Metric]:
        chosen = [
            (each, (self._model_name, each.name, each.host))
            for each in view.processes
            if self._rank is None or each.name == f"engine {self._rank}"
        ]
        labels = ("model_name", "process", "host")
        text = "1; the labels are the version of Swell and the protocol that a process speaks."
        builds = [((*values, each.version, str(each.protocol)), 1.0) for each, values in chosen]
        yield self._gauge("build_info", text, (*labels, "version", "protocol"), builds)
        uses = [(values, each.use) for each, values in chosen if each.use is not None]
        text = "Processor time that the process has taken."
        times = [(values, use.cpu_seconds) for values, use in uses]
        yield self._counter("process_cpu_seconds", text, labels, times)
        for name, text, value in _PROCESS_GAUGES:
            samples = [(values, value(use)) for values, use in uses]
            yield self._gauge(f"process_{name}", text, labels, samples)

    def _cluster(self, view: ClusterView) -> Iterator[Metric]:
        for name, text, number in (
            ("engines_ready", "Engines that take requests.", sum(e.ready for e in view.engines)),
            ("engines_expected", "Engines that there shall be.", view.expected),
            ("front_ends", "Front ends registered.", view.num_front_ends),
            ("coordinator_open_fds", "File descriptors of the coordinator.", view.descriptors[0]),
            ("coordinator_max_fds", "File descriptors that it may open.", view.descriptors[1]),
        ):
            yield self._of_cluster(name, text, number)
        if self._ages.view is not None:
            text = "Seconds since the last message of the coordinator; it sends at least every 3 s."
            samples = [((self._model_name,), self._ages.view)]
            yield self._gauge("coordinator_silence_seconds", text, ("model_name",), samples)
        missing = [
            ((self._model_name, str(each.rank), each.reason), each.age) for each in view.missing
        ]
        text = "Seconds for which an engine has been missing, by reason."
        labels = ("model_name", "engine", "reason")
        yield self._gauge("engine_missing_seconds", text, labels, missing)
        wakeups = [
            ((self._model_name, source), float(count))
            for source, count in view.wakeups_total.items()
        ]
        text = "How often paused engines were woken."
        yield self._counter("wave_wakeups", text, ("model_name", "source"), wakeups)

    def _waiting_by_reason(self, reporting: list[tuple[EngineEntry, EngineStats]]) -> Metric:
        text = "Waiting sequences, by what they wait for."
        samples = []
        for entry, stats in reporting:
            capacity = stats.waiting - stats.deferred
            samples += [
                ((*self._labels(entry), "capacity"), float(capacity)),
                ((*self._labels(entry), "deferred"), float(stats.deferred)),
            ]
        labels = ("model_name", "engine", "reason")
        return self._gauge("num_requests_waiting_by_reason", text, labels, samples)

    def _accepted_at(self, reporting: list[tuple[EngineEntry, EngineStats]]) -> Metric:
        text = "Accepted draft tokens, by their position in the draft, from 0."
        samples = [
            ((*self._labels(entry), str(place)), float(count))
            for entry, stats in reporting
            for place, count in enumerate(stats.counters.spec_accepted_at)
        ]
        labels = ("model_name", "engine", "position")
        return self._counter("spec_decode_num_accepted_tokens_per_pos", text, labels, samples)

    def _sleep_state(self, reporting: list[tuple[EngineEntry, EngineStats]]) -> Metric:
        samples = [
            ((*self._labels(entry), state), float(stats.sleep_level == level))
            for entry, stats in reporting
            for level, state in enumerate(_SLEEP_STATES)
        ]
        text = "1 for the state that the engine is in, 0 for the others."
        labels = ("model_name", "engine", "sleep_state")
        return self._gauge("engine_sleep_state", text, labels, samples)

    def _step_tokens(self, reporting: list[tuple[EngineEntry, EngineStats]]) -> Metric:
        family = HistogramMetricFamily(
            self._prefix + "iteration_tokens_total",
            "Tokens per step of the engine: computed prompt tokens and sampled tokens.",
            labels=("model_name", "engine"),
        )
        for entry, stats in reporting:
            counts = list(accumulate(stats.counters.step_tokens_buckets))
            if counts:
                buckets = list(zip(_STEP_TOKENS_LABELS, map(float, counts), strict=True))
                family.add_metric(self._labels(entry), buckets, stats.counters.step_tokens)
        return family

    def _experts(self, reporting: list[tuple[EngineEntry, EngineStats]]) -> Iterator[Metric]:
        """Yield how evenly engines share out the work of experts, where they measure it."""
        loads = [(self._labels(entry), stats.experts) for entry, stats in reporting]
        known = [(labels, load) for labels, load in loads if load is not None]
        if not known:
            return
        labels = ("model_name", "engine")
        text = "Expert tokens of the busiest process of a group, divided by the mean."
        samples = [(each, load.imbalance) for each, load in known if load.imbalance]
        yield self._gauge("expert_imbalance", text, labels, samples)
        text = "How often the experts of a layer were redistributed."
        moved = [(each, float(load.moved_layers)) for each, load in known]
        yield self._counter("expert_layers_moved", text, labels, moved)

    def _cache_config(self, chosen: list[EngineEntry]) -> Metric:
        text = "1 for each engine; the labels are its settings of the KV cache."
        setups = [(self._labels(entry), entry.setup) for entry in chosen if entry.setup]
        names = ("model_name", "engine", *_CACHE_CONFIG)
        samples = [
            (labels + tuple(str(value(setup)) for value in _CACHE_CONFIG.values()), 1.0)
            for labels, setup in setups
        ]
        return self._gauge("cache_config_info", text, names, samples)

    def _adapters(
        self, view: ClusterView, reporting: list[tuple[EngineEntry, EngineStats]]
    ) -> Iterator[Metric]:
        """Yield which adapters run and wait, as vLLM tells it, and which engines have which."""
        if view.adapters is None:
            return
        entries = view.adapters.sheet.entries
        names = {each.version: each.name for each in entries if each.version}

        def listed(versions: Iterable[str]) -> str:
            return ",".join(sorted({names.get(each, each) for each in versions}))

        loads = [(self._labels(entry), stats.adapters) for entry, stats in reporting]
        samples = [
            ((*labels, listed(load.running), listed(load.waiting)), time.time())
            for labels, load in loads
            if load is not None
        ]
        labels = ("model_name", "engine", "running_lora_adapters", "waiting_lora_adapters")
        text = "Unix time at which the adapters named by the labels ran and waited."
        yield self._gauge("lora_requests_info", text, labels, samples)
        loaded = [
            ((*self._labels(entry), names.get(version, version)), 1.0)
            for entry, _ in reporting
            for version in entry.adapters
        ]
        text = "1 for each adapter that an engine has in memory."
        yield self._gauge("lora_loaded", text, ("model_name", "engine", "lora_name"), loaded)

    def _membership(self, chosen: list[EngineEntry]) -> Iterator[Metric]:
        labels = ("model_name", "engine")
        up = [(self._labels(entry), float(entry.ready)) for entry in chosen]
        yield self._gauge("engine_up", "1 while the engine takes requests.", labels, up)
        starting = [
            (self._labels(entry), float(not entry.ready and not entry.draining)) for entry in chosen
        ]
        text = "1 while the engine has joined and still loads its model."
        yield self._gauge("engine_starting", text, labels, starting)
        halted = [(self._labels(entry), float(_is_halted(entry))) for entry in chosen]
        text = "1 while an operator has the engine paused or asleep."
        yield self._gauge("engine_halted", text, labels, halted)
        restarts = [(self._labels(entry), float(entry.restarts)) for entry in chosen]
        yield self._counter(
            "engine_restarts", "Starts of a rank after its first.", labels, restarts
        )
        age = self._ages.stats
        ages = [(self._labels(entry), age[entry.rank]) for entry in chosen if entry.rank in age]
        text = "Seconds since the newest stats of the engine arrived."
        yield self._gauge("stats_age_seconds", text, labels, ages)

    def _labels(self, entry: EngineEntry) -> tuple[str, str]:
        return (self._model_name, str(entry.rank))

    def _gauge(
        self, name: str, text: str, labels: tuple[str, ...], samples: _Samples
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._prefix + name, text, labels=labels)
        for values, number in samples:
            family.add_metric(values, number)
        return family

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...], samples: _Samples
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=labels)
        for values, number in samples:
            family.add_metric(values, number)
        return family


def _is_halted(entry: EngineEntry) -> bool:
    return entry.stats is not None and entry.stats.halted


def engine_load(client: GenerationClient) -> dict[str, float]:
    """Return how many sequences wait and run in all engines, and the mean KV cache usage."""
    view = client.view
    stats = [] if view is None else [entry.stats for entry in view.engines if entry.stats]
    return {
        "kv_cache_usage_perc": sum(each.kv_usage for each in stats) / max(1, len(stats)),
        "num_requests_waiting": sum(each.waiting for each in stats),
        "num_requests_running": sum(each.running for each in stats),
    }
