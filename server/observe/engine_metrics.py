"""Metrics of engines and cluster, computed from the newest cluster view at every scrape."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate

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
_Sample = tuple[float, *tuple[str, ...]]
_Samples = Iterable[_Sample]

_ENGINE_GAUGES: tuple[tuple[str, str, _EngineValue], ...] = (
    ("num_requests_running", "Running sequences.", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences waiting for a slot.", lambda stats: stats.waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda stats: stats.kv_usage),
    (
        "queued_prefill_tokens",
        "Prompt tokens received and not yet computed.",
        lambda stats: stats.queued_prefill_tokens,
    ),
    (
        "kv_transfer_offered_bytes",
        "Bytes of copies of KV blocks waiting to be read.",
        lambda stats: stats.counters.kv_transfer_offered_bytes,
    ),
)

_PROCESS_GAUGES: tuple[tuple[str, str, Callable[[ProcessUse], float]], ...] = (
    ("resident_memory_bytes", "Resident memory.", lambda use: use.resident_bytes),
    ("open_fds", "Open file descriptors.", lambda use: use.open_fds),
    ("max_fds", "Maximum open file descriptors.", lambda use: use.max_fds),
    ("start_time_seconds", "Unix time at which the process started.", lambda use: use.started),
)

_MEMBER_GAUGES: tuple[tuple[str, str, Callable[[EngineEntry], bool]], ...] = (
    ("engine_up", "1 while the engine takes requests.", lambda entry: entry.ready),
    (
        "engine_starting",
        "1 while the engine has joined and still loads its model.",
        lambda entry: not entry.ready and not entry.draining,
    ),
    (
        "engine_halted",
        "1 while an operator has the engine paused or asleep.",
        lambda entry: entry.stats is not None and entry.stats.halted,
    ),
)


def _counters() -> Iterator[tuple[str, str, str]]:
    for field in msgspec.inspect.type_info(EngineCounters).fields:  # type: ignore[attr-defined]
        described = field.type
        if isinstance(described, msgspec.inspect.Metadata) and described.extra_json_schema:
            schema = described.extra_json_schema
            yield field.name, schema["title"], schema["description"]


_ENGINE_COUNTERS = tuple(_counters())
_STEP_TOKENS_LABELS = [*map(floatToGoString, STEP_TOKENS_BOUNDS), "+Inf"]
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's state names, by sleep level."""
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
"""vLLM's labels; values are text as in vLLM."""


@dataclass(eq=False)
class EngineCollector(Collector):
    """Metrics of some or all engines, and optionally of the cluster, from a cluster view.

    A sample is a number followed by the values of all labels but the first, the model's name.
    """

    prefix: str
    model_name: str
    view: ClusterView | None
    view_age: float | None
    """Seconds since its arrival."""
    stats_age: dict[int, float]
    """Seconds since the arrival of each engine's stats, by rank."""
    ranks: frozenset[int] | None
    """The engines shown; None: all."""
    _: KW_ONLY
    shows_cluster: bool

    def collect(self) -> Iterator[Metric]:
        view = self.view
        if view is None:
            return
        ranks = self.ranks
        chosen = [each for each in view.engines if ranks is None or each.rank in ranks]
        yield from self._reported(
            [(str(each.rank), each.stats) for each in chosen if each.stats is not None]
        )
        settings: list[_Sample] = []
        for each in chosen:
            if each.setup is not None:
                values = [str(of(each.setup)) for of in _CACHE_CONFIG.values()]
                labels = tuple([str(each.rank), *values])
                settings.append((1.0, *labels))
        text = "1 for each engine; the labels are its settings of the KV cache."
        yield self._gauge("cache_config_info", text, settings, "engine", *_CACHE_CONFIG)
        yield from self._adapters(view, chosen)
        yield from self._membership(chosen)
        yield self._gauge("wave", "Number of the running period of the engines.", [(view.wave,)])
        text = "1 while the engines run, 0 while paused."
        yield self._gauge("engines_running", text, [(view.running,)])
        yield from self._processes(view)
        if self.shows_cluster:
            yield from self._cluster(view)

    def _reported(self, engines: list[tuple[str, EngineStats]]) -> Iterator[Metric]:
        for name, text, value in _ENGINE_GAUGES:
            yield self._gauge(name, text, [(value(each), rank) for rank, each in engines], "engine")
        for counter, name, text in _ENGINE_COUNTERS:
            counts = [(getattr(each.counters, counter), rank) for rank, each in engines]
            yield self._counter(name, text, counts, "engine")
        waiting = [
            sample
            for rank, each in engines
            for sample in (
                (each.waiting - each.deferred, rank, "capacity"),
                (each.deferred, rank, "deferred"),
            )
        ]
        text = "Waiting sequences, by what they wait for."
        yield self._gauge("num_requests_waiting_by_reason", text, waiting, "engine", "reason")
        accepted = [
            (count, rank, str(position))
            for rank, each in engines
            for position, count in enumerate(each.counters.spec_accepted_at)
        ]
        text = "Accepted draft tokens, by their position in the draft, from 0."
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counter(name, text, accepted, "engine", "position")
        states = [
            (each.sleep_level == level, rank, state)
            for rank, each in engines
            for level, state in enumerate(_SLEEP_STATES)
        ]
        text = "1 for the state that the engine is in, 0 for the others."
        yield self._gauge("engine_sleep_state", text, states, "engine", "sleep_state")
        yield self._step_tokens(engines)
        loads = [(rank, each.experts) for rank, each in engines if each.experts is not None]
        if loads:
            text = "Expert tokens of the busiest process of a group, divided by the mean."
            uneven = [(load.imbalance, rank) for rank, load in loads if load.imbalance]
            yield self._gauge("expert_imbalance", text, uneven, "engine")
            text = "How often the experts of a layer were redistributed."
            moved = [(load.moved_layers, rank) for rank, load in loads]
            yield self._counter("expert_layers_moved", text, moved, "engine")

    def _step_tokens(self, engines: list[tuple[str, EngineStats]]) -> Metric:
        family = HistogramMetricFamily(
            self.prefix + "iteration_tokens_total",
            "Tokens per step of the engine: computed prompt tokens and sampled tokens.",
            labels=("model_name", "engine"),
        )
        for rank, stats in engines:
            counts = list(accumulate(stats.counters.step_tokens_buckets))
            if counts:
                buckets = list(zip(_STEP_TOKENS_LABELS, map(float, counts), strict=True))
                labels = (self.model_name, rank)
                family.add_metric(labels, buckets, stats.counters.step_tokens)
        return family

    def _processes(self, view: ClusterView) -> Iterator[Metric]:
        chosen = view.processes
        if self.ranks is not None:
            names = {f"engine {rank}" for rank in self.ranks}
            chosen = [
                each
                for each in chosen
                if each.name in names
                or (self.shows_cluster and not each.name.startswith("engine "))
            ]
        labels = ("process", "host")
        text = "1; the labels are the version of Swell and the protocol of a process."
        builds = [(1, each.name, each.host, each.version, str(each.protocol)) for each in chosen]
        yield self._gauge("build_info", text, builds, *labels, "version", "protocol")
        uses = [(each.use, each.name, each.host) for each in chosen if each.use is not None]
        text = "Processor time used by the process."
        times = [(use.cpu_seconds, name, host) for use, name, host in uses]
        yield self._counter("process_cpu_seconds", text, times, *labels)
        for name, text, value in _PROCESS_GAUGES:
            samples = [(value(use), process, host) for use, process, host in uses]
            yield self._gauge(f"process_{name}", text, samples, *labels)

    def _cluster(self, view: ClusterView) -> Iterator[Metric]:
        for name, text, number in (
            ("engines_ready", "Engines that take requests.", sum(e.ready for e in view.engines)),
            ("engines_expected", "Expected number of engines.", view.expected),
            ("front_ends", "Front ends registered.", view.num_front_ends),
            ("coordinator_open_fds", "Open descriptors of the coordinator.", view.descriptors[0]),
            ("coordinator_max_fds", "The coordinator's descriptor limit.", view.descriptors[1]),
        ):
            yield self._gauge(name, text, [(number,)])
        if self.view_age is not None:
            text = "Seconds since the last message of the coordinator; it sends at least every 3 s."
            yield self._gauge("coordinator_silence_seconds", text, [(self.view_age,)])
        missing = [(each.age, str(each.rank), each.reason) for each in view.missing]
        text = "Seconds for which an engine has been missing, by reason."
        yield self._gauge("engine_missing_seconds", text, missing, "engine", "reason")
        wakeups = [(count, source) for source, count in view.wakeups_total.items()]
        yield self._counter(
            "wave_wakeups", "How often paused engines were woken.", wakeups, "source"
        )

    def _adapters(self, view: ClusterView, chosen: list[EngineEntry]) -> Iterator[Metric]:
        """Yield running and waiting adapters as in vLLM, and the loaded adapters of each engine."""
        if view.adapters is None:
            return
        entries = view.adapters.table.entries
        names = {each.version: each.name for each in entries if each.version}

        def listed(versions: Iterable[str]) -> str:
            return ",".join(sorted({names.get(each, each) for each in versions}))

        reporting = [(str(each.rank), each, each.stats) for each in chosen if each.stats]
        samples = [
            (time.time(), rank, listed(stats.adapters.running), listed(stats.adapters.waiting))
            for rank, _, stats in reporting
            if stats.adapters is not None
        ]
        labels = ("engine", "running_lora_adapters", "waiting_lora_adapters")
        text = "Unix time at which the adapters named by the labels ran and waited."
        yield self._gauge("lora_requests_info", text, samples, *labels)
        loaded = [
            (1, rank, names.get(version, version))
            for rank, entry, _ in reporting
            for version in entry.adapters
        ]
        text = "1 for each adapter that an engine has in memory."
        yield self._gauge("lora_loaded", text, loaded, "engine", "lora_name")

    def _membership(self, chosen: list[EngineEntry]) -> Iterator[Metric]:
        for name, text, value in _MEMBER_GAUGES:
            samples = [(value(each), str(each.rank)) for each in chosen]
            yield self._gauge(name, text, samples, "engine")
        restarts = [(each.restarts, str(each.rank)) for each in chosen]
        yield self._counter(
            "engine_restarts", "Starts of a rank after its first.", restarts, "engine"
        )
        age = self.stats_age
        ages = [(age[each.rank], str(each.rank)) for each in chosen if each.rank in age]
        text = "Seconds since the newest stats of the engine arrived."
        yield self._gauge("stats_age_seconds", text, ages, "engine")

    def _gauge(self, name: str, text: str, samples: _Samples, *labels: str) -> Metric:
        names = ("model_name", *labels)
        return self._filled(GaugeMetricFamily(self.prefix + name, text, labels=names), samples)

    def _counter(self, name: str, text: str, samples: _Samples, *labels: str) -> Metric:
        names = ("model_name", *labels)
        return self._filled(CounterMetricFamily(self.prefix + name, text, labels=names), samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
        for number, *values in samples:
            family.add_metric((self.model_name, *values), float(number))
        return family


def shown_on(host: str, view: ClusterView) -> frozenset[int]:
    """Return the engines shown by a node's API servers, so that each is shown on one node.

    These are the node's own, and a share of those on nodes without API servers.
    """
    serving = {host} | {each.host for each in view.processes if each.name.startswith("api ")}
    nodes = sorted(serving)
    return frozenset(
        each.rank
        for each in view.engines
        if (each.host if each.host in serving else nodes[each.rank % len(nodes)]) == host
    )


def engine_load(client: GenerationClient) -> dict[str, float]:
    """Return the waiting and running sequences of all engines, and the mean KV cache usage."""
    view = client.view
    stats = [] if view is None else [entry.stats for entry in view.engines if entry.stats]
    return {
        "kv_cache_usage_perc": sum(each.kv_usage for each in stats) / max(1, len(stats)),
        "num_requests_waiting": sum(each.waiting for each in stats),
        "num_requests_running": sum(each.running for each in stats),
    }
