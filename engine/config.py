"""Every setting of an engine and of the cluster that it joins, each defined once.

A section is a frozen Struct; the annotation of a field carries its help text and bounds. From it
come the command-line flag, the `SWELL_*` variable, the YAML key and the table in
docs/settings.md (see `engine.settings`). Names are those that users of such systems know.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

BUNDLED_MODEL = Path(__file__).parent / "bundled_model"
BUNDLED_MODEL_NAME = "swell-shakespeare"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all groups of settings; the docstring's first line is the group's title in --help."""


PositiveInt = Annotated[int, Meta(ge=1)]


class ModelConfig(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[
        str,
        Meta(
            description="Directory or hub id of a Hugging Face model; the bundled model if absent.",
        ),
    ] = str(BUNDLED_MODEL)
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="Name(s) that clients use for the model; default: its directory or id."),
    ] = ()
    revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a model from the hub.")
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Type of weights and activations; auto takes the checkpoint's."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="auto reads safetensors; dummy fills random weights from --seed."),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest sequence in tokens; default: what the model was made for."),
    ] = None
    seed: Annotated[int, Meta(description="Seed of dummy weights.")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs.")] = (
        "auto"
    )
    chat_template: Annotated[
        str | None, Meta(description="Jinja file that replaces the model's chat template.")
    ] = None


class CacheConfig(Section, frozen=True, kw_only=True):
    """KV cache"""

    block_size: Annotated[int, Meta(ge=1, le=256, description="Tokens per KV block.")] = 16
    num_kv_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Number of KV blocks; default: sized from memory."),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Memory for the KV cache of one engine; default: a share of free memory."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV blocks of prompts that begin alike.")
    ] = True


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Scheduling"""

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096, description="Most sequences that run at once in one engine.")
    ] = 128
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="Token budget of one step.")] = (
        2048
    )
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(
            description="fcfs = in order of arrival, the priority of a request is ignored; "
            "priority = the lowest number first, which may preempt higher ones."
        ),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0, description="Most prompt tokens of one request in one step; 0 is no limit."),
    ] = 0
    async_scheduling: Annotated[
        bool, Meta(description="Plan the next step while the one before it runs.")
    ] = False
    admission_policy: Annotated[
        Literal["none", "balance", "cadence", "level"] | None,
        Meta(
            description="When engines that step together prefill: none = whatever fits; balance = "
            "nobody admits while one is full; cadence = every N-th step; level = equal amounts on "
            "all, as long as waiting costs less than the stall; default: level for a lockstep "
            "group, else none."
        ),
    ] = None
    admission_cadence: Annotated[
        int, Meta(ge=1, description="cadence: steps from one prefill to the next.")
    ] = 2
    level_wait_weight: Annotated[
        int,
        Meta(
            ge=1,
            description="level: decode steps that one step of waiting is worth; less raises "
            "throughput, more lowers the time to the first token.",
        ),
    ] = 4
    level_hold_per_rank: Annotated[
        int,
        Meta(ge=1, description="level: a prefill waits at most this many steps per engine."),
    ] = 16


class ExecutorConfig(Section, frozen=True, kw_only=True):
    """Execution"""

    executor: Annotated[
        Literal["model", "simulated"],
        Meta(description="simulated replaces the model by a cost model, for tests and benchmarks."),
    ] = "model"
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Compute threads per engine; default: cores / engines on this node."),
    ] = None
    torch_profiler_dir: Annotated[
        str | None,
        Meta(description="Directory for the traces of the start_profile and stop_profile calls."),
    ] = None
    simulated_step_us: Annotated[
        int, Meta(ge=0, description="Simulated executor: fixed time of a step.")
    ] = 500
    simulated_token_us: Annotated[
        int, Meta(ge=0, description="Simulated executor: time per token computed.")
    ] = 10


class ParallelConfig(Section, frozen=True, kw_only=True):
    """Parallelism"""

    data_parallel_size: Annotated[int, Meta(ge=1, le=1024, description="Number of engines.")] = 2
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Number of engines on this node; default: all."),
    ] = None
    data_parallel_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Rank of this engine; default: given by the coordinator."),
    ] = None


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Cluster"""

    coordinator: Annotated[
        str,
        Meta(
            description="Coordinator's HOST:PORT (or ipc://PATH); `swell serve` makes its own.",
        ),
    ] = "127.0.0.1:7550"
    advertise_host: Annotated[
        str, Meta(description="Name or address under which other nodes reach this one.")
    ] = "127.0.0.1"
    socket_dir: Annotated[
        str | None,
        Meta(description="Private directory for local sockets; default: a new temporary one."),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Meta(description="File with the shared secret that encrypts and authenticates TCP links."),
    ] = None
    insecure_cluster: Annotated[
        bool, Meta(description="Allow plain TCP between nodes (trusted networks only).")
    ] = False
    heartbeat_interval: Annotated[
        float, Meta(gt=0, description="Seconds between heartbeats to the coordinator.")
    ] = 1.0
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that an engine gets to end its requests after SIGTERM."),
    ] = 30.0
    engine_timeout: Annotated[
        float, Meta(gt=0, description="Seconds without a heartbeat after which a member is gone.")
    ] = 5.0


class LogConfig(Section, frozen=True, kw_only=True):
    """Logging"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe level shown.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines for people, or one JSON object each.")
    ] = "text"


class EngineConfig(Section, frozen=True, kw_only=True):
    """All that one engine needs to know."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()


class EngineLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process at its start."""

    config: EngineConfig
    incarnation: int
    """Random number of this process, chosen by the supervisor so that it can report its death."""


def group_config(config: EngineConfig) -> dict[str, str]:
    """Settings that have to be equal on all engines of a cluster, by flag name."""
    return {
        "model": Path(config.model.model).name,
        "dtype": config.model.dtype,
        "max_model_len": str(config.model.max_model_len),
        "block_size": str(config.cache.block_size),
        "load_format": config.model.load_format,
        "seed": str(config.model.seed),
    }


def private_directory(configured: str | None) -> Path:
    """Return the directory for local sockets, made with mode 0700 if it is not there.

    Raises:
        PermissionError: the directory exists and others can enter it.
    """
    if configured is None:
        return Path(tempfile.mkdtemp(prefix="swell-"))
    path = Path(configured)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} must not be accessible to others: chmod 700 {path}")
    return path
