"""Executor for encoder models: computes vectors of whole sequences, without a KV cache."""

import logging
from collections.abc import Callable
from pathlib import Path

from engine.batch.batch import BatchPlan
from engine.batch.executor import Executor, ExecutorInfo, PendingResult
from engine.executor.environment import num_cores
from engine.executor.loading import set_threads, take_device
from engine.executor.offloading import OffloadedWeights, offload
from engine.executor.step_thread import StepThread
from engine.models.encoders.loading import LoadedEncoder, load_encoder
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.host_memory import keep_freed_memory, release_freed_memory
from engine.runner.pooler import Pooler
from engine.shared.config import EngineConfig
from engine.shared.model_files import model_directory
from engine.shared.pooling import PoolingSpec

logger = logging.getLogger(__name__)


class EncoderExecutor(Executor):
    """Executor of a model without a KV cache.

    If steps overlap, they run in a separate thread, as in `InProcessExecutor`.
    """

    def __init__(
        self,
        config: EngineConfig,
        pooling: PoolingSpec,
        engines_on_node: int = 1,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Load the model.

        Raises:
            ModelNotFound: there is no such model.
            UnsupportedModel: the model's config requires an unimplemented feature.
            CheckpointError: the weights do not fit the config.
        """
        self._config = config
        self._pooling = pooling
        self._report = progress or logger.info
        self._device = take_device(config)
        set_threads(config, engines_on_node, cores=num_cores())
        loaded = self._load()
        self.info = ExecutorInfo(
            num_kv_blocks=config.scheduler.max_num_seqs,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=(),
            model_fingerprint=loaded.fingerprint,
            task=pooling.task,
            in_one_step=True,
            has_kv=False,
        )
        self._steps = StepThread(self._device, own_thread=config.scheduler.steps_overlap)
        self._runner: EncoderRunner | None = self._new_runner(loaded)
        self._asleep: tuple[EncoderRunner, OffloadedWeights] | None = None
        """The runner, while its weights are offloaded."""
        keep_freed_memory()

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step, or queue it to the worker thread.

        Raises:
            RuntimeError: the executor sleeps or was shut down.
        """
        runner = self._runner
        if runner is None:
            raise RuntimeError("the executor sleeps or was shut down")
        return self._steps.submit(runner.run, plan)

    def sleep(self, level: int) -> None:
        """Free the weights; at level 1 those of an accelerator are offloaded to host memory."""
        if level > 1:
            self._runner = self._asleep = None
        elif self._device.type != "cpu" and self._runner is not None:
            runner, self._runner = self._runner, None
            offloaded = offload([runner.encoder], self._device)
            self._asleep = None if offloaded is None else (runner, offloaded)
        release_freed_memory(self._device)

    def wake_up(self, *, kv_cache: bool = True) -> None:
        """Restore or reload the weights; there is no KV cache.

        Raises:
            CannotDo: the model has changed since the start.
        """
        if self._asleep is not None:
            runner, offloaded = self._asleep
            offloaded.restore()
            self._runner, self._asleep = runner, None
        if self._runner is not None:
            return
        loaded = self._load()
        self.info.check_unchanged(loaded.fingerprint)
        self._runner = self._new_runner(loaded)

    def start_profile(self) -> None:
        """Start a profile of the steps; raises as `StepThread.start_profile`."""
        self._steps.start_profile()

    def stop_profile(self, path: Path) -> None:
        """Stop the profile and write its trace; raises as `StepThread.stop_profile`."""
        self._steps.stop_profile(path)

    def shutdown(self) -> None:
        """Free the model."""
        self._steps.shutdown()
        self._runner = self._asleep = None

    def _load(self) -> LoadedEncoder:
        directory = model_directory(
            self._config.model, weights=self._config.model.load_format != "dummy"
        )
        self._report(f"loading weights of {directory.name}")
        return load_encoder(
            directory,
            self._config.model,
            self._pooling,
            self._device,
            batch_invariant=bool(self._config.executor.batch_invariant),
        )

    def _new_runner(self, loaded: LoadedEncoder) -> EncoderRunner:
        return EncoderRunner(loaded.encoder, Pooler(self._pooling, loaded.encoder.head))
