"""Every setting of an engine and of the cluster that it joins, each defined once.

A section is a frozen Struct; the annotation of a field carries its help text and bounds. From it
come the command-line flag, the `SWELL_*` variable, the YAML key and the table in
docs/settings.md (see `engine.shared.settings`). Names are those that users of such systems know.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

BUNDLED_MODEL = Path(__file__).parent.parent / "bundled_model"
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
        Meta(
            description="Type of weights and activations; auto takes the checkpoint's, or float32 "
            "for a small model on a processor that multiplies it faster."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["int8"] | None,
        Meta(
            description="int8 = weights and activations of linear layers are rounded to 8 bits "
            "(CPU only); default: computed as loaded."
        ),
    ] = None
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
    generation_config: Annotated[
        str,
        Meta(
            description="Where defaults for temperature, top_p and the like come from: auto = the "
            "model's generation_config.json, vllm or none = neutral ones, else a directory with "
            "such a file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        Meta(
            description="JSON object of such defaults that win over those of the file, e.g. "
            '`{"temperature": 0.2}`.'
        ),
    ] = "{}"
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
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of a CUDA device's memory for weights, activations and KV cache of "
            "one engine.",
        ),
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV blocks of prompts that begin alike.")
    ] = True


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Scheduling"""

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096, description="Maximum sequences that run at once in one engine.")
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
        Meta(ge=0, description="Maximum prompt tokens of one request in one step; 0 is no limit."),
    ] = 0
    max_tenant_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum prompt tokens of one tenant (API key) in one step while others "
            "use the engine: less keeps their tokens flowing, more computes long prompts faster; "
            "default: a quarter of --max-num-batched-tokens."
        ),
    ] = None
    async_scheduling: Annotated[
        bool, Meta(description="Plan the next step while the one before it runs.")
    ] = False
    speculative_ngram: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Speculative decoding: maximum draft tokens per step and sequence, taken "
            "from n-grams of the sequence itself and kept if the model draws them too; 0: none.",
        ),
    ] = 0
    prompt_lookup_min: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="Minimum length of the n-grams that drafts follow; default: 2."),
    ] = None
    prompt_lookup_max: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="Maximum length of the n-grams that are looked up; default: 4."),
    ] = None
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

    def __post_init__(self) -> None:
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is not None and longest is not None and shortest > longest:
            raise ValueError(f"prompt_lookup_min is {shortest}: more than prompt_lookup_max")

    @property
    def max_tenant_prefill(self) -> int:
        """Most prompt tokens of a tenant in a step while others use the engine."""
        return self.max_tenant_prefill_tokens or max(1, self.max_num_batched_tokens // 4)

    @property
    def steps_overlap(self) -> bool:
        """Whether a step is planned while the one before runs; drafts need its tokens first."""
        return self.async_scheduling and not self.speculative_ngram


class ExecutorConfig(Section, frozen=True, kw_only=True):
    """Execution"""

    executor: Annotated[
        Literal["model", "simulated"],
        Meta(description="simulated replaces the model by a cost model, for tests and benchmarks."),
    ] = "model"
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Compute threads per engine; default: cores / engines on this node, with "
            "one core left to front ends if the model is small, but while the LM head of a large "
            "batch computes."
        ),
    ] = None
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a step of up to 1,024 tokens may take (more in proportion, "
            "and five times as long for the first ones) before the engine counts as hung and ends.",
        ),
    ] = 60.0
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Compute each token in the same way whatever else is in the batch, so that "
            "a request gives the same tokens, bit for bit, alone, in any batch and after it was "
            "moved to another engine; CPU only, slower."
        ),
    ] = False
    enforce_eager: Annotated[
        bool, Meta(description="CUDA: launch every kernel of decode steps instead of graphs.")
    ] = False
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
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of engines on this node; default: all, or the one of "
            "--data-parallel-rank."
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Rank of this node's first engine; default: ranks are given by the "
            "coordinator."
        ),
    ] = None
    data_parallel_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Rank of this engine, default: given by the coordinator; for a front end, "
            "the engine that it serves under --data-parallel-lb external."
        ),
    ] = None
    data_parallel_rank_local: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of this engine among those of its node, which picks its CUDA "
            "devices; default: given by the node's supervisor; of an engine that is started alone, "
            "--data-parallel-rank modulo --data-parallel-size-local."
        ),
    ] = None
    data_parallel_lb: Annotated[
        Literal["internal", "hybrid", "external"],
        Meta(
            description="Which engines a front end balances over: internal = all of the cluster; "
            "hybrid = those of its own node; external = only the one of --data-parallel-rank, with "
            "a load balancer outside."
        ),
    ] = "internal"

    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Processes (on CUDA: devices) that compute each engine's model together, "
            "each with its part of every layer.",
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Each engine of a mixture-of-experts model holds its share of the experts; "
            "the engines then step together."
        ),
    ] = False
    regroup: Annotated[
        Literal["shrink", "wait"],
        Meta(
            description="When one of the engines that step together dies: shrink = the others load "
            "its experts and go on until it is back; wait = they wait for it."
        ),
    ] = "shrink"
    group_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that engines which step together wait for each other before they "
            "form their group anew.",
        ),
    ] = 30.0

    @property
    def engines_on_node(self) -> int:
        """How many engines this node runs."""
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def number_on_node(self) -> int:
        """Which of its node's engines this is, from 0; ranks may interleave between nodes."""
        if self.data_parallel_rank_local is not None:
            return self.data_parallel_rank_local
        return (self.data_parallel_rank or 0) % max(1, self.data_parallel_size_local or 1)

    def rank_on_node(self, number: int) -> int | None:
        """Return the rank of the node's engine `number`; None if the coordinator chooses it."""
        first = self.data_parallel_start_rank
        if first is None:
            first = self.data_parallel_rank
        return None if first is None else first + number


DEFAULT_COORDINATOR = "127.0.0.1:7550"


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Cluster"""

    coordinator: Annotated[
        str | None,
        Meta(
            description="Coordinator's HOST:PORT (or ipc://PATH); default: `swell serve` makes its "
            "own, all others look at 127.0.0.1:7550.",
        ),
    ] = None
    node: Annotated[str | None, Meta(description="Name of this node; default: its host name.")] = (
        None
    )
    advertise_host: Annotated[
        str | None,
        Meta(
            description="Name or address under which other nodes reach this one; default: the "
            "address of the interface that leads to the coordinator.",
        ),
    ] = None
    socket_dir: Annotated[
        str | None,
        Meta(
            description="Private directory in which a node makes a fresh one for its local "
            "sockets; default: the system's temporary directory."
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="File with the shared secret, 16 bytes or more, that encrypts and "
            "authenticates TCP links."
        ),
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

    @property
    def coordinator_address(self) -> str:
        """The coordinator's ZeroMQ address."""
        address = self.coordinator or DEFAULT_COORDINATOR
        return address if "://" in address else f"tcp://{address}"


class HealthConfig(Section, frozen=True, kw_only=True):
    """Health"""

    health_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(
            description="Port on which a lone engine or coordinator answers GET /health and "
            "/ready, on all interfaces; default: none."
        ),
    ] = None
    stall_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds without a turn of its loop after which it is not healthy."),
    ] = 60.0


class LogConfig(Section, frozen=True, kw_only=True):
    """Logging"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Minimum level of the log lines shown."),
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
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()


class EngineLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process at its start."""

    config: EngineConfig
    incarnation: int
    """Random number of this process, chosen by the supervisor so that it can report its death."""
