"""Runs the model in the engine's own process and thread."""

import logging
import os
from collections.abc import Callable

import msgspec
import torch

from engine.config import EngineConfig
from engine.executor.interface import ExecutorInfo
from engine.model_files import model_directory
from engine.models.decoder import Decoder
from engine.models.hf_config import ModelSpec, read_spec
from engine.models.loader import DecoderLoader, compute_dtype, model_length, open_checkpoint
from engine.runner.kv_memory import available_memory, bytes_per_block, count_blocks
from engine.runner.model_runner import ModelRunner
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
    """Executor without a process of its own: `submit` returns when the step is done."""

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
        report = progress or logger.info
        _set_threads(config, engines_on_node)
        device = _device(config, rank)
        directory = model_directory(config.model, weights=config.model.load_format == "auto")
        spec = read_spec(directory)
        max_model_len = model_length(spec, config.model)
        report(f"loading weights of {directory.name}")
        checkpoint = open_checkpoint(directory, spec, config.model)
        dtype = compute_dtype(spec, config.model, checkpoint)
        with torch.inference_mode():
            model = DecoderLoader(
                spec, checkpoint, dtype=dtype, device=device, max_model_len=max_model_len
            ).load()
        report("allocating the KV cache")
        num_blocks = _num_blocks(config, spec, model, max_model_len, engines_on_node)
        self._runner: ModelRunner | None = ModelRunner(
            model,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            num_kv_blocks=num_blocks,
            block_size=config.cache.block_size,
        )
        self._info = ExecutorInfo(
            num_kv_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            model_fingerprint=checkpoint.fingerprint(),
        )

    @property
    def info(self) -> ExecutorInfo:
        """What was found while loading."""
        return self._info

    def submit(self, plan: BatchPlan) -> FinishedStep:
        """Run a step.

        Raises:
            RuntimeError: the executor was shut down.
        """
        if self._runner is None:
            raise RuntimeError("the executor was shut down")
        try:
            return FinishedStep(self._runner.run(plan))
        except Exception as error:  # belongs to whoever waits for this step
            return FinishedStep(error)

    def shutdown(self) -> None:
        """Free the model and the KV cache."""
        self._runner = None


def _set_threads(config: EngineConfig, engines_on_node: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(config.executor.threads or max(1, (cores or 1) // engines_on_node))
    if torch.get_num_interop_threads() == 1:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:  # only possible before the first parallel work of a process
        logger.debug("the inter-operator thread pool was started already")


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
