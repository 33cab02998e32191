"""A vLLM engine core that runs in this process."""

import dataclasses
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import vllm
from msgspec.structs import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from engine.batch.executor import CannotDo
from engine.core.adapter_manager import AdapterManager
from engine.core.events import (
    AdaptersSettled,
    CoreEvent,
    FrontEndJoined,
    FrontEndLeft,
    Rejoined,
)
from engine.core.extensions import Extensions, Worker
from engine.core.front_ends import CoreStep, FrontEnds, UrgentStats
from engine.core.halting import FLEET, Halting
from engine.core.steps import StepFailed
from engine.core.utilities import execute_operation
from engine.core.wave_clock import WaveClock
from engine.scheduler.refusal import refusal
from engine.shared.config import EngineConfig
from engine.shared.cpu.lists import lists_text
from engine.shared.cpu.machine import cpu_quota
from engine.shared.image_window import IMAGE_WINDOW_BYTES
from engine.shared.messages import (
    ASLEEP_TAGS,
    AbortRequests,
    AdapterLoadResult,
    AdapterTable,
    AddRequest,
    ApplyAdapterTable,
    EngineCounters,
    EngineSetup,
    EngineStats,
    FleetOrder,
    PauseMode,
    RequestOutput,
    SleepMode,
    StartDpWave,
    UtilityCall,
    WeightsSource,
)
from engine.shared.model_files import model_directory
from engine.shared.pooling import read_pooling
from engine.vllm.adapters import VllmAdapters, adapter_paths
from engine.vllm.arguments import engine_arguments
from engine.vllm.grammars import follow_grammar
from engine.vllm.images import ImagePreparation
from engine.vllm.outputs import Sequence
from engine.vllm.pooling import pooling_arguments
from engine.vllm.requests import (
    Continuation,
    UnsupportedParameter,
    core_request,
    resume,
)

logger = logging.getLogger(__name__)

UTILITIES = (
    "collective_rpc", "info", "is_sleeping", "list_loras", "pause", "reset_prefix_cache", "resume",
    "sleep", "start_profile", "stop_profile", "wake_up",
)  # fmt: skip
TESTED = ("0.32.",)
"""Prefixes of the vLLM versions covered by the tests."""
PENALTIES = "engine.vllm.penalties:PenaltiesProcessor"


class VllmCore:
    """A `HostedEngine` that runs requests with vLLM's scheduler and executor."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        incarnation: int,
        clock: WaveClock,
        on_failure: Callable[[str], None],
        weight_version: str = "",
        on_adapters: Callable[[AdapterTable, list[AdapterLoadResult]], None] = lambda *_: None,
        on_adapter_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the model.

        Args:
            on_failure: called from another thread when a worker dies.
            on_adapters: called with the states of the engine's adapters.
            on_adapter_read: called from another thread; an `AdaptersSettled` event must follow.

        Raises:
            BadPlugin: one of --worker-extensions cannot be loaded.
            ValueError: vLLM or this engine does not support the settings.
        """
        if not vllm.__version__.startswith(TESTED):
            logger.warning(
                "vLLM %s is untested; tested versions: %s",
                vllm.__version__,
                ", ".join(f"{each}x" for each in TESTED),
            )
        known = frozenset(field.name for field in dataclasses.fields(EngineArgs))
        arguments = engine_arguments(config, known)
        if current_platform.is_cpu():
            for variable, value in _thread_settings(config).items():
                os.environ.setdefault(variable, value)
            _compute_whole_prompts(arguments)
        self._pooling = read_pooling(model_directory(config.model, weights=False), config.model)
        if self._pooling is not None:
            arguments = pooling_arguments(self._pooling) | arguments
        self._config = EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        model = self._config.model_config
        if self._pooling is None and model.runner_type != "generate":
            raise ValueError(f"{config.model.model} is a pooling model: set --runner pooling")
        self._continuation = self._choose_continuation()
        self._generation = model.try_get_generation_config()
        self._tokenizer = cached_tokenizer_from_config(model)
        _choose_grammar_backend(self._config.structured_outputs_config, self._tokenizer)
        self._core = EngineCore(
            self._config,
            Executor.get_class(self._config),
            log_stats=True,
            executor_fail_callback=lambda: on_failure("a process of vLLM's executor has exited"),
        )
        # Otherwise unseeded sequences sample identically on all freshly started engines.
        self._core.model_executor.collective_rpc(_seed_draws, args=(config.model.seed, rank))
        images = ImagePreparation(self._config) if model.supports_multimodal_inputs else None
        self._images = images if images is not None and images.takes_images else None
        self.vocab_size: int = model.get_vocab_size()
        self.halting = Halting()
        self.weights = WeightsSource(config.model.model, config.model.revision, weight_version)
        self.weight_updates = 0
        self.setup = self._setup(config)
        self._rank, self._incarnation, self._clock = rank, incarnation, clock
        self._front_ends = FrontEnds()
        self._counters = EngineCounters()
        self._sequences: dict[int, Sequence] = {}
        self._paths = adapter_paths(config.lora.max_lora_rank)
        self._paths.on_settled = on_adapter_read
        self._loaded = VllmAdapters(self._core, self._paths, self._sequences)
        self.adapters = AdapterManager(
            config.lora,
            self._paths if config.lora.enable_lora else None,
            self._loaded,
            self._loaded.is_used,
            on_adapters,
        )
        worker = Worker(rank, incarnation, self._core.model_executor)
        self.extensions = Extensions(config.executor.worker_extensions, worker)
        self._profiler_dir = config.executor.torch_profiler_dir
        self._held: deque[Any] = deque()
        """vLLM requests that wait for an exclusive request to end, or to run exclusively."""
        self._admits = True
        """False while paused with `wait`: no waiting request starts."""
        self._exclusive_request = self._exclusive_steps = 0
        self._uncomputed = 0
        """Tokens to prefill of sequences that have not produced output here."""
        self._num_steps = self._version = 0

    def _choose_continuation(self) -> Continuation:
        """Return how sequences from other engines continue; may add a logits processor."""
        if self._config.use_v2_model_runner:
            return Continuation.RESUMED
        # Pooling and drafts exclude logits processors.
        if self._pooling is not None or self._config.speculative_config is not None:
            return Continuation.UNCOUNTED
        model = self._config.model_config
        model.logits_processors = [*(model.logits_processors or ()), PENALTIES]
        return Continuation.COUNTED

    def _setup(self, config: EngineConfig) -> EngineSetup:
        cache, model = self._config.cache_config, self._config.model_config
        name = f"vllm {vllm.__version__} {model.model} {model.revision} {model.dtype}"
        return EngineSetup(
            cache.num_gpu_blocks or 0,
            cache.block_size,
            model.max_model_len,
            f"vllm-{hashlib.sha256(name.encode()).hexdigest()[:12]}",
            self._config.scheduler_config.max_num_seqs,
            bool(cache.enable_prefix_caching),
            cache.gpu_memory_utilization,
            cache.num_gpu_blocks_override,
            cache.kv_cache_memory_bytes,
            kv_cache_dtype=str(cache.cache_dtype),
            utilities=UTILITIES,
            images=self._images is not None,
            image_window=IMAGE_WINDOW_BYTES,
            whole_images=True,
        )

    def shutdown(self) -> None:
        """Stop vLLM's processes and release all memory."""
        if self._images is not None:
            self._images.close()
        self._paths.shutdown()
        self._core.shutdown()

    # -- state -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there are requests to compute or outputs to send."""
        if (
            self._front_ends.has_messages
            or self._core.batch_queue
            or self._core.scheduler.has_requests()
        ):
            return True
        waits = bool(self._held) or (self._images is not None and self._images.is_busy)
        return waits and self._admits and not self.halting.is_halted

    @property
    def has_requests(self) -> bool:
        """Whether there are outputs to send or, unless the engine is halted, requests."""
        waits = bool(self._sequences) and not self.halting.is_halted
        return self._front_ends.has_messages or waits

    @property
    def has_front_ends(self) -> bool:
        """Whether any front end is connected."""
        return self._front_ends.any_present

    @property
    def next_tokens(self) -> int:
        """Upper bound on the tokens of the next step."""
        limit: int = self._config.scheduler_config.max_num_batched_tokens
        return min(len(self._sequences) + self._uncomputed, limit)

    def stats(self) -> EngineStats:
        """Return the current load and counters, with a higher version than all earlier stats."""
        self._version += 1
        running = len(self._core.scheduler.running)
        return EngineStats(
            self._rank,
            self._incarnation,
            self._version,
            self._clock.wave,
            self._num_steps,
            max(0, len(self._sequences) - running),
            running,
            self._core.scheduler.get_kv_cache_usage(),
            self._uncomputed,
            self._front_ends.received(),
            self._counters.snapshot(),
            halted=self._is_halted,
            exclusive_request=self._exclusive_request,
            hands_over=self.halting.hands_over,
            adapters=self._loaded.in_use() if self._config.lora_config is not None else None,
            sleep_level=self.halting.sleep_level,
            weight_version=self.weights.version,
        )

    # -- events ----------------------------------------------------------------------------------

    def handle(self, event: CoreEvent) -> None:
        """Handle an event; an invalid message is reported to its sender only."""
        match event:
            case AddRequest():
                self._add(event)
            case AbortRequests():
                self._abort([each for each in event.ids if each in self._sequences])
            case UtilityCall(_, front_end) if front_end != FLEET and (
                not self._front_ends.is_present(front_end)
            ):
                pass
            case UtilityCall() | FleetOrder():
                self._front_ends.results += execute_operation(self, event, self._rank)
                self._follow_halting()
            case FrontEndJoined(index, incarnation):
                if self._front_ends.joined(index, incarnation):
                    self._drop(index)
            case FrontEndLeft(index):
                if self._front_ends.left(index):
                    self._drop(index)
            case StartDpWave():
                self._clock.start_ordered(event)
            case Rejoined(wave):
                self._clock.welcomed(wave)
            case ApplyAdapterTable(_, table):
                self.adapters.take(table)
            case AdaptersSettled():
                self.adapters.settled()

    def _add(self, message: AddRequest) -> None:
        if not self._front_ends.is_present(message.front_end):
            logger.warning("%s dropped: its front end is not connected", message.request_id)
            return
        restored = self._front_ends.restored(message)
        if restored is None:
            logger.warning("request %s: its images were lost", message.request_id)
            return
        self._front_ends.count_request(restored)
        if message.id in self._sequences:
            return
        output = self._queue(restored)
        if output is not None:
            self._front_ends.address(message.front_end).append(output)

    def _queue(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request in vLLM; return its final output if it cannot run."""
        max_model_len = self.setup.max_model_len
        reason = refusal(
            message,
            max_model_len=max_model_len,
            vocab_size=self.vocab_size,
            pools=self._pooling is not None,
            in_one_step=True,
        )
        if reason is not None:
            return RequestOutput(message.id, [], "error", error=reason)
        if message.pooling is None and (
            len(message.output_token_ids) >= message.sampling.max_tokens
            or message.num_tokens >= max_model_len
        ):
            return RequestOutput(message.id, [], "length")
        try:
            request = core_request(
                message,
                self._generation,
                self._eos(),
                self._continuation,
                self._loaded,
                self._pooling,
            )
            self._verify(request)
            if message.encoder_inputs and self._images is None:
                raise UnsupportedParameter("messages", "this engine takes no images")
        except Exception as error:
            return _failed(message, error)
        self._sequences[message.id] = Sequence(message, time.monotonic())
        self._uncomputed += message.num_tokens
        if message.exclusive_steps or self._exclusive_request or self._held:
            self._held.append(request)
        else:
            self._start(message, request)
        return None

    def _verify(self, request: Any) -> None:
        if request.pooling_params is not None:
            request.pooling_params.verify(self._config.model_config)
            return
        request.sampling_params.verify(
            self._config.model_config,
            self._config.speculative_config,
            self._config.structured_outputs_config,
            self._tokenizer,
        )

    def _start(self, message: AddRequest, request: Any) -> None:
        """Start preparing the images of a request or, without images, queue it in vLLM."""
        if message.encoder_inputs and self._images is not None:
            self._images.start(message, request)
            # vLLM keeps its own copies.
            self._sequences[message.id].message = replace(message, encoder_inputs=[])
        else:
            self._enter(message, lambda: request)

    def _enter(self, message: AddRequest, prepared: Callable[[], Any]) -> None:
        try:
            request, _ = self._core.preprocess_add_request(prepared())
            if self._continuation is Continuation.RESUMED:
                resume(request, message.output_token_ids)
            follow_grammar(request, message.sampling, message.output_token_ids, self._tokenizer)
        except Exception as error:
            self._forget(message.id)
            self._front_ends.address(message.front_end).append(_failed(message, error))
            return
        self._counters.grammar_requests += message.sampling.grammar is not None
        self._core.add_request(request)

    def _eos(self) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.eos_token_id

    def _drop(self, front_end: int) -> None:
        ids = [i for i, each in self._sequences.items() if each.message.front_end == front_end]
        self._abort(ids)

    def _abort(self, ids: list[int]) -> None:
        names = {str(each) for each in ids}
        self._held = deque(each for each in self._held if each.request_id not in names)
        self._core.abort_requests(list(names))
        for each in ids:
            self._forget(each)

    def _forget(self, request_id: int) -> None:
        if self._images is not None:
            self._images.forget(request_id)
        sequence = self._sequences.pop(request_id)
        if sequence.first is None:
            self._uncomputed -= sequence.message.num_tokens

    # -- operator commands -----------------------------------------------------------------------

    def start_profile(self) -> str:
        """Start vLLM's profile of the steps; return the directory of its traces."""
        return self._profile(is_start=True)

    def stop_profile(self) -> str:
        """End the profile; return the directory of its traces."""
        return self._profile(is_start=False)

    def _profile(self, *, is_start: bool) -> str:
        if self._profiler_dir is None:
            raise CannotDo("start the engines with --torch-profiler-dir")
        self._core.profile(is_start)
        return self._profiler_dir

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; always returns 0 because vLLM does not report the block count.

        Raises:
            CannotDo: requests are running.
        """
        if not self._core.reset_prefix_cache():
            raise CannotDo(
                "vLLM resets its prefix cache only while it computes nothing: pause it first"
            )
        return 0

    @property
    def is_paused(self) -> bool:
        """Whether a pause is complete: nothing runs until `resume`."""
        runs_any = self._core.scheduler.get_num_unfinished_requests() > 0
        return self.halting.is_paused or not (self._admits or runs_any)

    @property
    def _is_halted(self) -> bool:
        """Whether no waiting request starts."""
        return self.halting.is_halted or not self._admits

    def pause(self, mode: PauseMode) -> None:
        """Stop launching steps or, with `wait`, let running requests end and start no others."""
        if mode == "wait":
            self._admits = False
            return
        self._end_all(mode)
        self.halting.pause(hand_over=mode == "move")

    def resume(self) -> None:
        """End a pause; idempotent."""
        self._admits = True
        self.halting.resume()

    def _end_all(self, mode: PauseMode | SleepMode) -> None:
        if mode == "abort":
            for each in list(self._sequences.values()):
                answer = RequestOutput(each.message.id, [], "abort")
                self._front_ends.address(each.message.front_end).append(answer)
            self._abort(list(self._sequences))

    def sleep(self, level: int, mode: SleepMode = "keep") -> None:
        """Release the memory; waiting requests are recomputed after `wake_up`.

        Raises:
            CannotDo: vLLM was started without `enable_sleep_mode`.
            StepFailed: a step in flight failed.
        """
        if level and not self._config.model_config.enable_sleep_mode:
            raise CannotDo("start the engines with --engine-args 'enable_sleep_mode: true'")
        started_at = time.monotonic()
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._advance()
        self._end_all(mode)
        self.halting.sleep(level, hand_over=mode == "move")
        if level:
            self._core.sleep(level, mode="keep")
            self._counters.count_sleep(time.monotonic() - started_at)

    def wake_up(self, tags: set[str] | None = None) -> None:
        """Restore the memory of the tags, by default all; the sleep ends with the last of them."""
        requested = set(ASLEEP_TAGS) if tags is None else tags
        if restored := self.halting.asleep & requested:
            started_at = time.monotonic()
            self._core.wake_up(sorted(restored))
            self._counters.count_wake_up(time.monotonic() - started_at)
        self.halting.wake_up(requested)

    def _follow_halting(self) -> None:
        state = PauseState.UNPAUSED if self._admits else PauseState.PAUSED_NEW
        if self.halting.is_halted:
            state = PauseState.PAUSED_ALL
        if self._core.scheduler.pause_state != state:
            self._core.scheduler.set_pause_state(state)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> CoreStep:
        """Run one step; return all pending messages.

        Raises:
            StepFailed: the step failed and the engine cannot continue.
        """
        if self._images is not None and self._images.is_busy:
            self._enter_prepared(self._images)
        if self._start_held():
            return self._take(exclusive_changes=True)
        self._advance()
        return self._take()

    def _enter_prepared(self, images: ImagePreparation) -> None:
        idle = not (self._core.batch_queue or self._core.scheduler.has_requests())
        for request_id, prepared in images.done(idle=idle):
            self._enter(self._sequences[request_id].message, prepared.result)

    def _advance(self) -> None:
        core = self._core
        if not (core.batch_queue or core.scheduler.has_requests()):
            return
        try:
            outputs, executed = core.step_fn()
            core.post_step(executed)
        except Exception as error:
            logger.exception("vLLM's step failed with %d sequences", len(self._sequences))
            raise StepFailed(f"engine {self._rank}: {type(error).__name__} in a step") from error
        self._num_steps += executed
        computed = 0
        for client_outputs in (outputs or {}).values():
            self._count(client_outputs.scheduler_stats)
            for each in client_outputs.outputs:
                computed += self._output(each)
        if executed:
            self._counters.count_step(computed)

    def _output(self, output: Any) -> int:
        """Queue a step's output for its front end; return the number of tokens computed for it."""
        request_id = int(output.request_id)
        sequence = self._sequences.get(request_id)
        if sequence is None:  # aborted during the step
            return 0
        was_first = sequence.first is None
        result = sequence.convert(output, self._counters)
        if result is None:
            return 0
        computed = len(result.token_ids)
        if was_first and sequence.first is not None:
            self._uncomputed -= sequence.message.num_tokens
            computed += sequence.message.num_tokens - result.num_cached_tokens
        self._front_ends.address(sequence.message.front_end).append(result)
        if result.finish_reason is not None:
            self._forget(request_id)
        if request_id == self._exclusive_request:
            self._exclusive_steps -= 1
        return computed

    def _count(self, stats: Any) -> None:
        if stats is None:
            return
        self._counters.prefix_cache_queries += stats.prefix_cache_stats.queries
        self._counters.prefix_cache_hits += stats.prefix_cache_stats.hits
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            counters, by_position = self._counters, drafts.num_accepted_tokens_per_pos
            counters.spec_drafts += drafts.num_drafts
            counters.spec_draft_tokens += drafts.num_draft_tokens
            counters.spec_accepted_tokens += drafts.num_accepted_tokens
            counters.spec_accepted_at += [0] * (len(by_position) - len(counters.spec_accepted_at))
            for position, accepted in enumerate(by_position):
                counters.spec_accepted_at[position] += accepted

    def _start_held(self) -> bool:
        """Start held requests that can run; return whether the exclusive request has changed.

        The change is reported before the first step of the new exclusive request.
        """
        exclusive = self._exclusive_request
        if exclusive and (exclusive not in self._sequences or self._exclusive_steps <= 0):
            self._exclusive_request = 0
            return True
        reported = self._front_ends.reported.exclusive_request
        while self._held and self._admits:
            message = self._sequences[int(self._held[0].request_id)].message
            if self._exclusive_request not in (0, message.id):
                break
            if message.exclusive_steps and not self._exclusive_request:
                if len(self._sequences) > len(self._held) or self._core.batch_queue:
                    break
                self._exclusive_request, self._exclusive_steps = message.id, message.exclusive_steps
            if self._exclusive_request not in (0, reported):
                return True
            self._start(message, self._held.popleft())
        return False

    def _take(self, *, exclusive_changes: bool = False) -> CoreStep:
        if self.adapters.keeps_unlisted:
            self.adapters.sweep()
        urgent = UrgentStats(self._is_halted, self.halting.hands_over, self._exclusive_request)
        return self._front_ends.hand_over(urgent, self.stats, exclusive_changes=exclusive_changes)


def _failed(message: AddRequest, error: Exception) -> RequestOutput:
    """Return the error output of a request that could not be queued; no other is affected."""
    if isinstance(error, UnsupportedParameter | VLLMValidationError | ValueError):
        param = error.param if isinstance(error, UnsupportedParameter) else None
        param = getattr(error, "parameter", param)
        return RequestOutput(
            message.id, [], "error", error=str(error), refused=True, error_param=param
        )
    logger.error("request %s could not be queued", message.request_id, exc_info=error)
    return RequestOutput(message.id, [], "error", error=type(error).__name__)


def _choose_grammar_backend(outputs: Any, tokenizer: Any) -> None:
    """Complete vLLM's `StructuredOutputsConfig`: front ends write Lark grammars for tool calls.

    Raises:
        ValueError: vLLM would parse reasoning, too.
    """
    if outputs.reasoning_parser:
        raise ValueError("--engine-args: reasoning_parser: use --reasoning-parser")
    if outputs.backend == "auto" and GuidanceBackend.is_tokenizer_supported(tokenizer):
        outputs.backend = "guidance"


def _seed_draws(_worker: Any, seed: int, rank: int) -> None:
    set_random_seed(seed, rank)


def _compute_whole_prompts(arguments: dict[str, Any]) -> None:
    """Set vLLM's arguments so that each prompt is computed in one step.

    vLLM rewinds a seeded generator after each prefill chunk, which CPU generators cannot do.

    Raises:
        ValueError: a setting requires chunked prefill.
    """
    if arguments.get("long_prefill_token_threshold"):
        raise ValueError(
            "--long-prefill-token-threshold: vLLM engines on CPUs compute each prompt in one "
            "step: leave it out"
        )
    arguments["enable_chunked_prefill"] = False
    if EngineArgs(**arguments).create_model_config().is_hybrid:
        # The prefix cache of hybrid models needs chunked prefill.
        arguments.setdefault("enable_prefix_caching", False)


def _thread_settings(config: EngineConfig) -> dict[str, str]:
    """Divide a node's cores among the processes of its engines; return the environment for vLLM.

    One engine generates about 1.8 times as many tokens/s with bound threads. They stay unbound in
    engines added by scaling, if there are fewer cores than processes, and if a CPU quota is below
    the number of cores. With `--cpu-bind` each process gets its list. An engine with one thread
    computes in this process: a worker process polls for the next step, on the only core of the
    process that sends it.
    """
    lists, parallel = config.executor.bound_to, config.parallel
    processes, number = parallel.processes_on_node, parallel.number_on_node
    if lists:
        if processes == len(lists[0]) == 1:
            return _use_one_thread()
        # This process is bound to the first list, which its workers would inherit.
        os.sched_setaffinity(0, {cpu for cpus in lists for cpu in cpus})
        return {"VLLM_CPU_OMP_THREADS_BIND": lists_text(lists)}
    planned = max(1, parallel.engines_on_node)
    sharing = max(planned, number + 1) * processes
    cores, quota = sorted(os.sched_getaffinity(0)), cpu_quota()
    usable = len(cores) if quota is None else min(len(cores), int(quota))
    each = max(1, usable // sharing)
    if config.executor.threads is not None:
        each = min(each, max(1, config.executor.threads // processes))
    if processes == each == 1:
        return _use_one_thread()
    if number >= planned or usable < len(cores) or sharing > len(cores):
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(each)}
    own = cores[number * processes * each :]
    lists = tuple(tuple(own[at * each : (at + 1) * each]) for at in range(processes))
    return {"VLLM_CPU_OMP_THREADS_BIND": lists_text(lists)}


def _use_one_thread() -> dict[str, str]:
    """Limit this process to one thread; return the setting that makes it compute the model."""
    torch.set_num_threads(1)
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
