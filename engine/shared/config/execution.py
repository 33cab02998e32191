"""Settings of the planning and execution of an engine's steps."""

from typing import Annotated, Literal

from msgspec import Meta

from engine.shared.config.section import NonNegativeInt, OneOf, PositiveFloat, PositiveInt, Section
from engine.shared.cpu.lists import BadCpuList, CpuList, read_lists

ADMISSION_POLICIES = {
    "none": "whenever prompts fit",
    "balance": "not while any engine is full",
    "cadence": "in every N-th step",
    "level": "once all ranks have similar prefill work, or waiting longer is not worth it",
}
"""Choices of `--admission-policy` and their help; `engine.scheduler.policies` builds them."""


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Scheduling"""

    max_num_seqs: Annotated[
        int,
        Meta(ge=1, le=4096),
        "Maximum sequences that run at once in one engine; default with CUDA devices: 256.",
    ] = 128
    max_num_batched_tokens: Annotated[
        PositiveInt,
        "Token budget of one step; default with CUDA devices: 8192; with "
        "--no-enable-chunked-prefill at least a given --max-model-len.",
    ] = 2048
    enable_chunked_prefill: Annotated[
        bool,
        "Prefill long prompts in several steps, batched with decodes. Without it each prompt is "
        "computed in one step, and --max-num-batched-tokens has to be at least --max-model-len.",
    ] = True
    max_num_encoder_tokens: Annotated[
        PositiveInt | None,
        "Image tokens that are encoded in one step, at least those of one image (or tile). Lower "
        "values delay other requests less, higher ones shorten the time to first token; default: "
        "a sixteenth of --max-num-batched-tokens.",
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        "Order of waiting requests; fcfs: as they arrive, whatever their priority; priority: "
        "lowest number first, and it may preempt others.",
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        NonNegativeInt, "Maximum prompt tokens of one request in one step; 0: no limit."
    ] = 0
    max_tenant_prefill_tokens: Annotated[
        PositiveInt | None,
        "Maximum prompt tokens of one tenant (API key) in one step while others use the "
        "engine. Lower values favour the others, higher ones compute long prompts faster; "
        "default: a quarter of --max-num-batched-tokens.",
    ] = None
    max_slowdown: Annotated[
        float,
        Meta(ge=0),
        "Largest factor by which one tenant, or one request with several sequences, may slow down "
        "others' decode steps; its own sequences are time-sliced to stay below it. Lower values "
        "favour the others, higher ones finish large requests sooner; 0: no limit.",
    ] = 1.25
    async_scheduling: Annotated[
        bool,
        "Plan the next step while the current one runs; lockstep engines must use the same value.",
    ] = False
    speculative_ngram: Annotated[
        int,
        Meta(ge=0, le=64),
        "Speculative decoding: maximum draft tokens per step and sequence, copied from earlier "
        "n-grams of the sequence. Outputs are unchanged; 0: off.",
    ] = 0
    speculative_model: Annotated[
        str | None,
        "Speculative decoding: directory, hub id or GGUF file of a smaller model with the same "
        "tokenizer, or of an EAGLE-3 head trained for the model. Outputs are unchanged.",
    ] = None
    speculative_method: Annotated[
        Literal["auto", "mtp"],
        "Speculative decoding; mtp: use the multi-token prediction layer of the model's checkpoint "
        "(DeepSeek V3, GLM-4.5); auto: as the other settings say.",
    ] = "auto"
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=1, le=64),
        "For --speculative-model and --speculative-method: maximum draft tokens per step and "
        "sequence.",
    ] = 4
    speculative_model_quantization: Annotated[
        Literal["int8", "int4", "stored"] | None,
        "Quantization of the draft model (self-speculation is allowed); default: --quantization.",
    ] = None
    speculative_row_price: Annotated[
        Annotated[float, Meta(ge=0, le=10)] | None,
        "Speculative decoding: relative cost of one extra token in a step; a lower value drafts "
        "more, 0 always drafts the maximum; default: by device and processor, logged at start.",
    ] = None
    speculative_disable_by_batch_size: Annotated[
        PositiveInt | None,
        "Speculative decoding: draft nothing in steps that decode more sequences than this; "
        "default: no limit, only --speculative-row-price decides.",
    ] = None
    prompt_lookup_min: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "Minimum n-gram length to match; default: 2.",
    ] = None
    prompt_lookup_max: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "Maximum n-gram length to match; default: 4.",
    ] = None
    admission_policy: Annotated[
        str | None,
        OneOf(tuple(ADMISSION_POLICIES), "swell.admission_policies"),
        "When lockstep engines prefill; "
        + "".join(f"{name}: {text}; " for name, text in ADMISSION_POLICIES.items())
        + "or the name of a plugin; default: level in a lockstep group, else none.",
    ] = None
    admission_cadence: Annotated[
        PositiveInt, "For cadence: compute prompts in every N-th step."
    ] = 2
    level_wait_weight: Annotated[
        PositiveInt,
        "For level: cost of delaying a request by one step, in decode steps. Lower values raise "
        "throughput, higher ones shorten the time to first token.",
    ] = 4
    level_hold_per_rank: Annotated[
        PositiveInt,
        "For level: a prompt waits at most this many steps times the number of engines.",
    ] = 16

    def __post_init__(self) -> None:
        if self.speculative_ngram and self.speculative_model is not None:
            raise ValueError("speculative_ngram and speculative_model: give one of them")
        others = self.speculative_ngram or self.speculative_model is not None
        if others and self.speculative_method == "mtp":
            raise ValueError(
                "speculative_method mtp cannot be combined with speculative_ngram or "
                "speculative_model: give one of them"
            )
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is not None and longest is not None and shortest > longest:
            raise ValueError(f"prompt_lookup_min is {shortest}: more than prompt_lookup_max")
        parts = ("long_prefill_token_threshold", "max_num_encoder_tokens")
        if not self.enable_chunked_prefill and (given := [n for n in parts if getattr(self, n)]):
            raise ValueError(f"{given[0]} divides prompts: it needs enable_chunked_prefill")
        if 0 < self.max_slowdown < 1:
            raise ValueError(f"max_slowdown is {self.max_slowdown}: it has to be 0 or at least 1")

    @property
    def encoder_budget(self) -> int:
        """Maximum image tokens encoded in one step."""
        if not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return self.max_num_encoder_tokens or self.max_num_batched_tokens // 16

    @property
    def steps_overlap(self) -> bool:
        """Whether steps are planned ahead; not with drafts, which need the last step's tokens."""
        return self.async_scheduling and not self.max_draft_tokens

    @property
    def drafts_with_model(self) -> bool:
        """Whether drafting needs weights besides the model's."""
        return self.speculative_model is not None or self.speculative_method == "mtp"

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens per step and sequence; 0: speculation is off."""
        if self.drafts_with_model:
            return self.num_speculative_tokens
        return self.speculative_ngram


class ExecutorConfig(Section, frozen=True, kw_only=True):
    """Execution"""

    executor: Annotated[
        Literal["model", "simulated"],
        "model: compute the model; simulated: only simulate how long it would take, for tests"
        " and benchmarks.",
    ] = "model"
    engine_backend: Annotated[
        str,
        OneOf(("swell", "vllm"), "swell.engine_backends"),
        "What engine processes host; vllm: vLLM's engine core, from the environment of "
        "--engine-python; or the name of a plugin.",
    ] = "swell"
    engine_python: Annotated[
        str | None,
        "Interpreter of engine processes, in whose environment vLLM and Swell's base dependencies "
        "are installed; default: this one.",
    ] = None
    engine_args: Annotated[
        str,
        "For vllm: object of further arguments of vLLM, in YAML or JSON, or a file with it.",
    ] = "{}"
    threads: Annotated[
        PositiveInt | None,
        "Compute threads per engine; default: the cores of this node (or its cgroup's CPU quota) "
        "divided by its engines. With small models, each engine leaves one core free for the API "
        "servers.",
    ] = None
    cpu_bind: Annotated[
        str,
        "CPUs that engines run on; auto: split each NUMA node evenly among compute processes, if "
        "the machine has several and they divide evenly, otherwise do not bind; none: do not "
        "bind; or one list per engine (or process) of this node, e.g. 0-15|16-31. A bound process "
        "uses one thread per core of its list.",
    ] = "auto"
    step_timeout: Annotated[
        PositiveFloat,
        "Seconds after which a step of up to 1,024 tokens counts as hung and the engine is "
        "replaced; larger steps get proportionally more, the first ones five times as long.",
    ] = 60.0
    batch_invariant: Annotated[
        bool | None,
        "Make outputs bitwise independent of the rest of the batch: a request gets the same tokens "
        "alone, in any batch, and after a move to another engine. On CPUs, and on CUDA for 16-bit "
        "models without experts. Default: on where it costs little (see the start log and "
        "/status.json); elsewhere it is slower.",
    ] = None
    enforce_eager: Annotated[
        bool,
        "CUDA: launch each kernel of a decode step instead of replaying CUDA graphs. CPU: compute "
        "models in bfloat16 with torch's operators alone, without compiled kernels.",
    ] = False
    torch_profiler_dir: Annotated[
        str | None, "Directory for the traces of the start_profile and stop_profile calls."
    ] = None
    worker_extensions: Annotated[
        tuple[str, ...],
        "Entry point(s) of the group swell.worker_extensions that /collective_rpc may call.",
    ] = ()
    simulated_step_us: Annotated[
        NonNegativeInt, "Simulated executor: microseconds of every step."
    ] = 500
    simulated_token_us: Annotated[
        NonNegativeInt, "Simulated executor: microseconds per computed token."
    ] = 10

    def __post_init__(self) -> None:
        try:
            self.bound_to  # noqa: B018 - validates the lists
        except BadCpuList as error:
            raise ValueError(
                f"--cpu-bind has to be auto, none or lists of CPUs as 0-3|4-7: {error}"
            ) from error

    @property
    def bound_to(self) -> tuple[CpuList, ...]:
        """The CPU lists in `cpu_bind`; empty for auto and none."""
        return () if self.cpu_bind in ("auto", "none") else read_lists(self.cpu_bind)
