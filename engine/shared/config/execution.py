"""Settings of an engine's steps: how they are planned and computed."""

from typing import Annotated, Literal

from msgspec import Meta

from engine.shared.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from engine.shared.cpu.lists import BadCpuList, CpuList, read_lists


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Scheduling"""

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096), "Maximum sequences that run at once in one engine."
    ] = 128
    max_num_batched_tokens: Annotated[PositiveInt, "Token budget of one step."] = 2048
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
        "engine. Lower values keep the others' tokens flowing, higher ones compute long "
        "prompts faster; default: a quarter of --max-num-batched-tokens.",
    ] = None
    max_slowdown: Annotated[
        float,
        Meta(ge=0),
        "Factor by which one request with several sequences, or one tenant, may lengthen steps "
        "while others decode; to stay below it, its sequences take turns. Lower values keep the "
        "others' tokens flowing, higher ones finish large requests sooner; 0: no limit.",
    ] = 1.25
    async_scheduling: Annotated[
        bool,
        "Plan the next step while the current one runs; engines that step together have to agree.",
    ] = False
    speculative_ngram: Annotated[
        int,
        Meta(ge=0, le=64),
        "Speculative decoding: maximum draft tokens per step and sequence, taken from n-grams of "
        "the sequence itself and kept if the model draws them too; 0: none.",
    ] = 0
    speculative_model: Annotated[
        str | None,
        "Speculative decoding: directory, hub id or GGUF file of a draft model, a smaller one with "
        "the same tokenizer, or of an EAGLE-3 head that was trained for the model. Its draft "
        "tokens are kept if the model draws them too.",
    ] = None
    speculative_method: Annotated[
        Literal["auto", "mtp"],
        "Speculative decoding; mtp: with the layer for multi-token prediction in the model's own "
        "checkpoint (DeepSeek V3, GLM-4.5); auto: as the other settings say.",
    ] = "auto"
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=1, le=64),
        "For --speculative-model and --speculative-method: maximum draft tokens per step and "
        "sequence.",
    ] = 4
    speculative_model_quantization: Annotated[
        Literal["int8", "int4", "stored"] | None,
        "Quantization of the draft model, which may be the served one once more; default: "
        "--quantization.",
    ] = None
    speculative_row_price: Annotated[
        Annotated[float, Meta(ge=0, le=10)] | None,
        "Speculative decoding: what one more token costs in a step, as a part of a step of one "
        "token. Drafts get shorter, or are not made, where fewer tokens are expected to be "
        "accepted than pay for that; 0: always draft as many tokens as may be; default: by "
        "device and processor, as the log of the start tells.",
    ] = None
    speculative_disable_by_batch_size: Annotated[
        PositiveInt | None,
        "Speculative decoding: draft nothing in steps that decode more sequences than this; "
        "default: no limit, only --speculative-row-price decides.",
    ] = None
    prompt_lookup_min: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "Minimum length of the n-grams that drafts follow; default: 2.",
    ] = None
    prompt_lookup_max: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "Maximum length of the n-grams that are looked up; default: 4.",
    ] = None
    admission_policy: Annotated[
        Literal["none", "balance", "cadence", "level"] | None,
        "When engines that step together compute prompts; none: whenever they fit; balance: "
        "not while any engine is full; cadence: in every N-th step; level: when all engines "
        "have about equal amounts, or waiting for that would cost more than it saves; "
        "default: level in a lockstep group, else none.",
    ] = None
    admission_cadence: Annotated[
        PositiveInt, "For cadence: compute prompts in every N-th step."
    ] = 2
    level_wait_weight: Annotated[
        PositiveInt,
        "For level: the cost of a request that waits for one step, in lost decode steps. "
        "Lower values raise throughput, higher ones shorten the time to the first token.",
    ] = 4
    level_hold_per_rank: Annotated[
        PositiveInt,
        "For level: prompts wait for at most this number of steps times the number of engines.",
    ] = 16

    def __post_init__(self) -> None:
        if self.speculative_ngram and self.speculative_model is not None:
            raise ValueError("speculative_ngram and speculative_model: give one of them")
        others = self.speculative_ngram or self.speculative_model is not None
        if others and self.speculative_method == "mtp":
            raise ValueError(
                "speculative_method mtp goes without speculative_ngram and speculative_model: "
                "give one of them"
            )
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is not None and longest is not None and shortest > longest:
            raise ValueError(f"prompt_lookup_min is {shortest}: more than prompt_lookup_max")
        if 0 < self.max_slowdown < 1:
            raise ValueError(f"max_slowdown is {self.max_slowdown}: it has to be 0 or at least 1")

    @property
    def max_tenant_prefill(self) -> int:
        """Maximum prompt tokens of one tenant per step while other tenants use the engine."""
        return self.max_tenant_prefill_tokens or max(1, self.max_num_batched_tokens // 4)

    @property
    def steps_overlap(self) -> bool:
        """Whether a step is planned while the one before runs; drafts need its tokens first."""
        return self.async_scheduling and not self.max_draft_tokens

    @property
    def drafts_with_model(self) -> bool:
        """Whether draft tokens come from weights beside the model's."""
        return self.speculative_model is not None or self.speculative_method == "mtp"

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens per step and sequence; 0: none are proposed."""
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
    threads: Annotated[
        PositiveInt | None,
        "Compute threads per engine; default: cores divided by the engines of this node, within "
        "the CPU quota of its control group. "
        "Engines of a small model leave one core to the front ends, except while the LM head "
        "of a large batch is computed.",
    ] = None
    cpu_bind: Annotated[
        str,
        "CPUs that engines run on; auto: an equal share of a NUMA node for each process that "
        "computes, where there are several nodes and the shares come out even, else none; none: "
        "any; or a list for each engine of this node, e.g. 0-15|16-31, or for each of its "
        "processes. A bound process computes with a thread for each core of its list.",
    ] = "auto"
    step_timeout: Annotated[
        PositiveFloat,
        "Seconds after which a step of up to 1,024 tokens counts as hung and the engine ends; "
        "larger steps get more in proportion, the first ones five times as long.",
    ] = 60.0
    batch_invariant: Annotated[
        bool | None,
        "Compute each token the same way whatever else is in the batch: a request gets the "
        "same tokens, bit for bit, alone, in any batch, and after a move to another engine. "
        "On CPUs, and on CUDA for models in 16 bits without experts. Default: where that costs "
        "little, which the log of the start and /status.json tell; elsewhere it is slower.",
    ] = None
    enforce_eager: Annotated[
        bool,
        "CUDA: launch each kernel of a decode step instead of replaying CUDA graphs. CPU: compute "
        "models in bfloat16 with torch's operators alone, without compiled kernels.",
    ] = False
    torch_profiler_dir: Annotated[
        str | None, "Directory for the traces of the start_profile and stop_profile calls."
    ] = None
    simulated_step_us: Annotated[
        NonNegativeInt, "Simulated executor: microseconds of every step."
    ] = 500
    simulated_token_us: Annotated[
        NonNegativeInt, "Simulated executor: microseconds per computed token."
    ] = 10

    def __post_init__(self) -> None:
        try:
            self.bound_to  # noqa: B018 - it is read for the check
        except BadCpuList as error:
            raise ValueError(
                f"--cpu-bind has to be auto, none or lists of CPUs as 0-3|4-7: {error}"
            ) from error

    @property
    def bound_to(self) -> tuple[CpuList, ...]:
        """The CPUs that `cpu_bind` lists; none for auto and none."""
        return () if self.cpu_bind in ("auto", "none") else read_lists(self.cpu_bind)
