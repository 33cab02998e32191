"""Runs the model in the engine's own process: in the caller's thread, or in one beside it."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.executor.interface import CannotDo, ExecutorInfo, PendingResult
from engine.model_files import model_directory
from engine.models.decoder import Decoder
from engine.models.hf_config import ModelSpec, read_spec
from engine.models.loader import DecoderLoader, compute_dtype, model_length, open_checkpoint
from engine.runner.host_memory import give_back_freed_memory, keep_freed_memory
from engine.runner.kv_memory import available_memory, bytes_per_block, count_blocks
from engine.runner.model_runner import ModelRunner
from engine.runner.profiling import StepProfiler
from engine.scheduler.batch import BatchPlan, BatchResult

logger = logging.getLogger(__name__)


class FinishedStep(msgspec.Struct, frozen=True):
    """A step that has run: its result, or what went wrong in it."""

    outcome: BatchResult | Exception

    def result(self) -> BatchResult:
        """Return the result or raise."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class InProcessExecutor:
    """Executor without a process of its own.

    With `async_scheduling` steps run in a thread of their own and `submit` returns at once (torch
    releases the GIL while it computes); else `submit` returns when the step is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        engines_on_node: int = 1,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Load the model and size the KV cache.

        Args:
            rank: picks the accelerator of this engine where there are several.
            engines_on_node: how many engines share the node's processors and memory.
            progress: is told what happens now, in words for people.

        Raises:
            ModelNotFound: there is no such model.
            UnsupportedModel: the model's config asks for something that is not implemented.
            CheckpointError: the weights do not fit the config.
            NotEnoughMemory: the KV cache cannot hold one sequence.
        """
        self._config = config
        self._report = progress or logger.info
        _set_threads(config, engines_on_node)
        self._device = _device(config, rank)
        model, fingerprint = self._load()
        spec = model.spec
        max_model_len = model_length(spec, config.model)
        self._report("allocating the KV cache")
        num_blocks = _num_blocks(config, spec, model, max_model_len, engines_on_node)
        self._info = ExecutorInfo(
            num_kv_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            model_fingerprint=fingerprint,
        )
        self._model: Decoder | None = model
        self._runner: ModelRunner | None = self._new_runner(model)
        self._worker = _worker_thread() if config.scheduler.async_scheduling else None
        self._profiler: StepProfiler | None = None
        self._was_shut_down = False
        keep_freed_memory()

    @property
    def info(self) -> ExecutorInfo:
        """What was found while loading."""
        return self._info

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step, or have the worker thread run it after those before it.

        Raises:
            RuntimeError: the executor sleeps or was shut down.
        """
        runner = self._runner
        if runner is None:
            state = "was shut down" if self._was_shut_down else "sleeps"
            raise RuntimeError(f"the executor {state}")
        if self._worker is not None:
            return self._worker.submit(runner.run, plan)
        try:
            return FinishedStep(runner.run(plan))
        except Exception as error:  # belongs to whoever waits for this step
            return FinishedStep(error)

    def sleep(self, level: int) -> None:
        """Free the KV cache, at level 2 and on accelerators the weights too.

        After level 1 on a CPU the weights are still in memory. An accelerator reads them again from
        the checkpoint's files, at level 1 as at 2; these are usually still in the page cache.
        """
        self._runner = None
        if level > 1 or self._device.type != "cpu":
            self._model = None
        give_back_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Load the weights again if they are gone, and allocate the KV cache.

        Raises:
            CannotDo: the model has changed since the start.
        """
        if self._runner is not None:
            return
        if self._model is None:
            model, fingerprint = self._load()
            if fingerprint != self._info.model_fingerprint:
                raise CannotDo("the model's weights have changed: the engine has to be restarted")
            self._model = model
        self._runner = self._new_runner(self._model)

    def start_profile(self) -> None:
        """Begin to record what steps do.

        Raises:
            CannotDo: a profile is being recorded.
        """
        if self._profiler is not None:
            raise CannotDo("a profile is being recorded already")
        profiler = StepProfiler()
        self._in_step_thread(profiler.start)
        self._profiler = profiler

    def stop_profile(self, path: Path) -> None:
        """End the recording and write its trace.

        Raises:
            CannotDo: nothing is being recorded.
            OSError: the trace cannot be written.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise CannotDo("no profile is being recorded")
        self._in_step_thread(partial(profiler.stop, path))

    def shutdown(self) -> None:
        """Free the model and the KV cache."""
        self._was_shut_down = True
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._runner = self._model = None

    def _load(self) -> tuple[Decoder, str]:
        """Load the weights; return them with their fingerprint."""
        settings = self._config.model
        directory = model_directory(settings, weights=settings.load_format == "auto")
        spec = read_spec(directory)
        self._report(f"loading weights of {directory.name}")
        checkpoint = open_checkpoint(directory, spec, settings)
        with torch.inference_mode():
            model = DecoderLoader(
                spec,
                checkpoint,
                dtype=compute_dtype(spec, settings, checkpoint),
                device=self._device,
                max_model_len=model_length(spec, settings),
            ).load()
        return model, checkpoint.fingerprint()

    def _new_runner(self, model: Decoder) -> ModelRunner:
        return ModelRunner(
            model,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self._info.max_model_len,
            num_kv_blocks=self._info.num_kv_blocks,
            block_size=self._config.cache.block_size,
        )

    def _in_step_thread(self, function: Callable[[], None]) -> None:
        if self._worker is None:
            function()
        else:
            self._worker.submit(function).result()


def _set_threads(config: EngineConfig, engines_on_node: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(config.executor.threads or max(1, (cores or 1) // engines_on_node))
    if torch.get_num_interop_threads() == 1:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:  # only possible before the first parallel work of a process
        logger.debug("the inter-operator thread pool was started already")


def _worker_thread() -> ThreadPoolExecutor:
    """Return one thread that computes with as many threads as the caller would."""
    return ThreadPoolExecutor(
        1,
        thread_name_prefix="executor",
        # The libraries below torch keep this number per thread.
        initializer=torch.set_num_threads,
        initargs=(torch.get_num_threads(),),
    )


def _device(config: EngineConfig, rank: int) -> torch.device:
    wanted = config.model.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device was found")
    return torch.device("cuda", rank % torch.cuda.device_count())


def _num_blocks(
    config: EngineConfig, spec: ModelSpec, model: Decoder, max_model_len: int, engines_on_node: int
) -> int:
    return count_blocks(
        config.cache,
        block_bytes=bytes_per_block(spec, config.cache.block_size, model.dtype),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        available_bytes=available_memory(model.device, engines_on_node),
    )
