"""Executor for encoder models: computes vectors of whole sequences, without a KV cache."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import Executor, ExecutorInfo, PendingResult
from engine.executor.environment import num_cores
from engine.executor.loading import set_threads, take_device
from engine.executor.offloading import OffloadedWeights, offload
from engine.executor.step_thread import StepThread
from engine.models.device_copies import to_device
from engine.models.encoders.encoder import Encoder, EncoderBatch, groups_of
from engine.models.encoders.loading import LoadedEncoder, load_encoder
from engine.runner.host_memory import keep_freed_memory, release_freed_memory
from engine.runner.pooler import Pooler
from engine.runner.slots import IntArray
from engine.shared.config import EngineConfig
from engine.shared.messages import PoolingParams
from engine.shared.model_files import model_directory
from engine.shared.pooling import PoolingSpec

logger = logging.getLogger(__name__)


class EncoderRunner:
    """Runs the plans of one engine, in order, on one encoder."""

    def __init__(self, encoder: Encoder, pooler: Pooler) -> None:
        self.encoder = encoder
        self._pooler = pooler

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchResult:
        """Compute the plan's sequences, each of which starts, complete, in this plan."""
        starts = {start.slot: start for start in plan.starting}
        # Sorted by length, as sequences of equal length are computed together.
        rows = sorted(range(len(plan.slots)), key=plan.counts.__getitem__)
        if not rows:
            return BatchResult([])
        sequences = [starts[plan.slots[row]] for row in rows]
        counts = np.array([len(each.token_ids) for each in sequences], np.int64)
        firsts = np.cumsum(counts) - counts
        params = [each.pooling or PoolingParams() for each in sequences]
        token_ids = np.fromiter((i for s in sequences for i in s.token_ids), np.int64, counts.sum())
        states = self.encoder(self._batch(token_ids, params, counts))
        vectors = self._pooler.vectors(states, token_ids, firsts, counts, params)
        return BatchResult([], pooled=dict(zip(rows, vectors, strict=True)))

    def _batch(
        self, token_ids: IntArray, params: list[PoolingParams], counts: IntArray
    ) -> EncoderBatch:
        device = self.encoder.device
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        second = np.array([each.types_from for each in params], np.int64)
        types = (positions >= np.repeat(second, counts)) & np.repeat(second > 0, counts)
        return EncoderBatch(
            token_ids=to_device(token_ids, device),
            positions=to_device(positions, device),
            types=to_device(types.astype(np.int64), device),
            groups=groups_of(counts.tolist()),
        )


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
