"""Executor that runs the model in the engine's own process, plus workers for other shards."""

import logging
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from socket import socket

from msgspec.structs import replace

from engine.batch.batch import BatchPlan
from engine.batch.executor import CannotDo, ExecutorInfo, GroupExecutor, PendingResult
from engine.batch.weight_transfer import SentTensors, WeightTransfer
from engine.distributed.engines import EngineGroup, join_engines
from engine.distributed.group import Group
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.draft_loading import draft_price, load_draft
from engine.executor.kv_sizing import KvSizing
from engine.executor.leader import TeamLeader, TeamStep
from engine.executor.loading import (
    LoadedModel,
    load_model,
    max_head_threads,
    set_threads,
    take_device,
)
from engine.executor.model_holder import ModelHolder
from engine.executor.pipelining import PipelinedSteps
from engine.executor.step_thread import StepThread
from engine.executor.team import MismatchedWorkers, Team
from engine.executor.team_messages import (
    Allocate,
    JoinGroup,
    PrepareGroup,
    SettleWeights,
    Sleep,
    StartProfile,
    StopProfile,
)
from engine.grammar.masks import GrammarTable, grammar_table
from engine.kernels.processor import row_price
from engine.lora.modules import AdaptableModules
from engine.lora.store import AdapterStore
from engine.lora.weights import adapter_weights
from engine.models.adapters import AdapterWeights
from engine.models.formats.files import CheckpointError, TensorFiles
from engine.models.formats.quantized_scheme import read_scheme
from engine.models.hf_config import read_config, read_spec
from engine.models.loading.decoder import Shard
from engine.models.loading.mlps import GroupPosition
from engine.models.parallel.balance import ExpertBalance
from engine.models.settings import model_length, open_checkpoint
from engine.models.weights import decoder_tensors
from engine.runner.head_threads import keeps_bits
from engine.runner.host_memory import keep_freed_memory, release_freed_memory
from engine.runner.model_runner import ModelRunner
from engine.runner.pooler import Pooler
from engine.scheduler.block_table import CacheShape, lookahead_tokens
from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.gguf.directory import is_gguf
from engine.shared.model_files import model_directory

logger = logging.getLogger(__name__)


class InProcessExecutor(GroupExecutor):
    """Executor that computes in the engine's own process, alone or with a team of workers.

    If steps overlap, they run in a separate thread and `submit` returns immediately (torch releases
    the GIL while it computes); otherwise `submit` returns when the step is done.

    Plans, tokens and all request state stay in this process. Workers hold a shard of each layer, or
    other layers, and the KV cache for these.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        engines_on_node: int = 1,
        progress: Callable[[str], None] | None = None,
        team: Team | None = None,
    ) -> None:
        """Load the model, in all processes if there are several, and size the KV cache.

        Args:
            rank: selects the experts that this engine holds first, if they are distributed.
            engines_on_node: number of engines that share the node's CPUs and memory.
            progress: receives human-readable progress messages.
            team: processes that hold the other parts of the model; this executor takes ownership.

        Raises:
            WorkerFailed: a worker cannot start.
            MismatchedWorkers: a worker has another kind of device, or other weights.
            ModelNotFound: there is no such model.
            UnsupportedModel: the model's config requires an unimplemented feature.
            CheckpointError: the weights do not fit the config.
            NotEnoughMemory: the KV cache cannot hold one sequence.
        """
        self._config = config
        self._report = progress or logger.info
        self._leader: TeamLeader | None = None
        try:
            self._start(rank, engines_on_node, team)
        except BaseException as error:
            if self._leader is not None:
                self._leader.close()
            elif team is not None:
                team.close()
            if team is not None and isinstance(error, CannotDo):
                raise MismatchedWorkers(str(error)) from error
            raise

    def _start(self, rank: int, engines_on_node: int, team: Team | None) -> None:
        config = self._config
        self._device = take_device(config)
        if team is not None:
            self._leader = TeamLeader(config, team, self._device)
        leader = self._leader
        set_threads(config, engines_on_node)
        processes = config.parallel.processes_on_node
        self._shard = None
        if leader is not None and config.parallel.tensor_parallel_size > 1:
            self._shard = Shard(leader.group, leader)
        self._num_stages = config.parallel.pipeline_parallel_size
        in_group = None
        if config.parallel.enable_expert_parallel:
            size = config.parallel.data_parallel_size
            in_group = GroupPosition(rank % size, size)
        self._holder = ModelHolder(self._load, self._device, in_group, self._report)
        self.expert_balance = self._holder.balance
        loaded = self._loaded
        model, spec = loaded.model, loaded.model.spec
        self._max_head_threads = 1
        if self._device.type == "cpu":
            self._max_head_threads = max_head_threads(spec, config, engines_on_node)
        if loaded.is_batch_invariant and not keeps_bits(model, self._max_head_threads):
            self._max_head_threads = 1
        self._report("allocating the KV cache")
        self.info = self._size_cache(loaded, engines_on_node * processes)
        self._steps = StepThread(
            self._device, own_thread=config.scheduler.steps_overlap or self._num_stages > 1
        )
        self.grammars: GrammarTable | None = grammar_table(
            model_directory(config.model, weights=False),
            spec.vocab_size,
            spec.eos_token_ids,
        )
        self.adapters: AdapterStore[AdapterWeights] | None = None
        if config.lora.enable_lora:
            modules = AdaptableModules(
                read_spec(model_directory(config.model, weights=False)),
                experts_here=not config.parallel.enable_expert_parallel,
            )
            rank = config.lora.max_lora_rank
            self.adapters = AdapterStore(
                modules.max_size(rank),
                lambda files: adapter_weights(files, modules.pairs(files, rank), model.dtype),
            )
        self._runner: ModelRunner | None
        self._pipelined: PipelinedSteps | None
        self._build_runner(loaded)
        self._was_shut_down = False
        self._transfer: WeightTransfer | None = None
        self._previous: tuple[EngineConfig, ExecutorInfo] | None = None
        """Settings and info before the weights were replaced, until that is settled."""
        if config.parallel.data_parallel_size == 1:
            self._holder.share_experts(Group.single() if self._shard is None else self._shard.group)
        keep_freed_memory()

    def prepare_group(self, position: int, size: int) -> None:
        """Hold exactly the experts of this position in a group of `size`."""
        loaded = self._holder.loaded
        has_all_experts = loaded is not None and loaded.model.expert_group is None
        if self._holder.in_group is None or has_all_experts:
            raise CannotDo("only --enable-expert-parallel and a model with experts form groups")
        in_group = GroupPosition(position, size)
        if self._leader is not None:
            self._leader.team.send(PrepareGroup(position, size))
        self._steps.call(partial(self._holder.move, in_group, self._num_shards))
        if self._leader is not None:
            self._leader.wait()

    def join_group(self, spec: GroupSpec, listener: socket | None) -> EngineGroup:
        """Connect to the other engines and take steps with them from now on.

        The position must have been prepared. Rank 0 accepts connections on the listener.

        Raises:
            GroupBroken: not all engines connected.
            WorkerFailed: a worker has died.
        """
        assert self._holder.in_group == GroupPosition(spec.rank, spec.size), "not prepared"
        leader = self._leader
        if leader is not None:
            leader.team.send(JoinGroup(spec))
        try:
            group = join_engines(spec, self._device, listener, shards=self._num_shards)
        except GroupBroken:
            if leader is not None:
                leader.team.collect()
            raise
        self._steps.regroup()
        self._holder.share_experts(group.processes)
        try:
            if leader is not None:
                leader.wait()
        except CannotDo as error:
            group.close()
            raise GroupBroken(str(error)) from error
        return group

    @property
    def device_type(self) -> str:
        """Device type of the KV cache."""
        return self._device.type

    @property
    def block_format(self) -> str:
        """Shape and dtype of a KV cache block; the executor must be awake, as for the two below.

        With tensor parallelism: the format of one shard's part, and the number of parts.
        """
        assert self._runner is not None
        block_format = self._runner.block_format
        return (
            block_format
            if self._leader is None
            else f"{self._leader.group.size} parts of {block_format}"
        )

    def read_block(self, block_id: int) -> bytes:
        """Return the contents of a KV cache block; no step may be writing to it.

        With workers, their parts follow this process's, and the call waits for steps in flight.

        Raises:
            WorkerFailed: a worker has died.
        """
        assert self._runner is not None
        content = self._runner.read_block(block_id)
        if self._leader is None:
            return content
        return self._between_steps(partial(self._leader.read_block, block_id, content))

    def write_block(self, block_id: int, content: bytes) -> None:
        """Overwrite a block with the contents of another one; no step may be using it.

        With workers, it waits and raises like `read_block`.
        """
        assert self._runner is not None
        if self._leader is not None:
            content = self._between_steps(partial(self._leader.write_block, block_id, content))
        self._runner.write_block(block_id, content)

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step, or queue it to the step thread.

        Raises:
            RuntimeError: the executor sleeps or was shut down.
        """
        runner = self._runner
        if runner is None:
            state = "was shut down" if self._was_shut_down else "sleeps"
            raise RuntimeError(f"the executor {state}")
        pending: PendingResult
        if self._pipelined is not None:
            pending = self._pipelined.submit(plan)
        else:
            pending = self._steps.submit(runner.run, plan)
        return pending if self._leader is None else TeamStep(pending, self._leader.team)

    def sleep(self, level: int) -> None:
        """Free the KV cache, and at level 2 the weights, in all processes.

        At level 1 an accelerator's weights are offloaded to host memory, or, if that has no room,
        freed and later reloaded from the checkpoint. Workers restore theirs when `wake_up`
        allocates the KV cache.
        """
        self._runner = self._pipelined = None
        self._holder.sleep(level)
        if self._leader is not None:
            self._leader.call(Sleep(level))

    def wake_up(self, *, kv_cache: bool = True) -> None:
        """Restore or reload the weights, and allocate the KV cache if requested.

        Raises:
            CannotDo: the model has changed since the start.
        """
        if self._runner is not None:
            return
        loaded = self._holder.wake_up()
        try:
            self.info.check_unchanged(loaded.fingerprint)
        except CannotDo:
            self._holder.free()
            raise
        if kv_cache:
            self._build_runner(loaded)

    def load_weights(self, model: str, revision: str | None) -> None:
        """Switch to another checkpoint, with an empty KV cache.

        Raises:
            CannotDo: it cannot be loaded, has another architecture, or there are workers.
        """
        if self._leader is not None:
            raise CannotDo("only single-process engines can replace weights")
        self._replace_weights(replace(self._config.model, model=model, revision=revision))

    def weight_transfer(self) -> WeightTransfer:
        """Return the receiver of weights sent by a trainer.

        Raises:
            CannotDo: this model's weights cannot be replaced.
        """
        if self._transfer is None:
            self._check_takes_weights()
            spec = read_spec(model_directory(self._config.model, weights=False))
            sizes = sum(prod(shape) for shape in decoder_tensors(spec).values())
            tied_head = spec.vocab_size * spec.hidden_size  # some trainers send it, too
            self._transfer = WeightTransfer(self._device, sizes + tied_head, self._check_sent)
        return self._transfer

    def take_weights(self) -> None:
        """Switch to the weights that a trainer has sent, with an empty KV cache.

        Raises:
            CannotDo: tensors are missing or unexpected.
        """
        transfer = self.weight_transfer()
        self._check_takes_weights()
        sent = transfer.take()
        self._check_sent(sent)
        self._replace_weights(self._config.model, sent)

    def settle_weights(self, *, revert: bool) -> None:
        """Free the previous weights, or with `revert` switch back to them and free the new ones."""
        previous, self._previous = self._previous, None
        if revert and previous is None:
            raise CannotDo("the previous weights are no longer available")
        if self._leader is not None:
            self._leader.call(SettleWeights(revert))
        if previous is not None and revert:
            self._config, self.info = previous
            self._runner = self._pipelined = None  # which holds the KV cache
        self._holder.settle(revert=revert)
        if revert:
            self._build_runner(self._loaded)

    def _check_takes_weights(self) -> None:
        loaded = self._holder.loaded
        reasons = {
            "with --enable-expert-parallel": self._holder.in_group is not None,
            "with --pipeline-parallel-size": self._num_stages > 1,
            "of a GGUF file": is_gguf(self._config.model.model),
        }
        if loaded is not None:  # a sleeping model is checked again when weights are taken
            reasons |= {
                "of a model that transformers computes": loaded.loader is None,
                "of a model that accepts images": loaded.vision is not None,
                "of a pooling model": loaded.pooling is not None,
                "with --speculative-model or --speculative-method mtp": loaded.draft is not None,
            }
        for reason, holds in reasons.items():
            if holds:
                raise CannotDo(f"a trainer cannot replace weights {reason}")
        directory = model_directory(self._config.model, weights=False)
        if read_scheme(read_config(directory)) is not None:
            raise CannotDo("a trainer cannot replace quantized weights")

    def _check_sent(self, sent: TensorFiles) -> None:
        directory = model_directory(self._config.model, weights=False)
        try:
            open_checkpoint(directory, read_spec(directory), self._config.model, sent)
        except CheckpointError as error:
            raise CannotDo(str(error)) from error

    def _replace_weights(self, settings: ModelConfig, sent: SentTensors | None = None) -> None:
        """Load other weights; the previous ones are kept until settled, so both need memory."""
        if self._runner is None:
            raise CannotDo("the engine sleeps: wake it up before its weights are replaced")
        before, previous = self._loaded.model, (self._config, self.info)
        self._previous = None
        self._config = replace(self._config, model=settings)
        what = settings.model if sent is None else "the trainer's update"
        try:
            if sent is not None and self._leader is not None:
                self._leader.take_weights(sent)
            loaded = self._holder.replace(sent)
            if loaded.model.spec != before.spec or loaded.model.dtype != before.dtype:
                raise CannotDo(f"{what} is a model of another shape")
        except Exception as error:
            self._config = previous[0]
            self._holder.settle(revert=True)
            if sent is not None and self._leader is not None:
                self._leader.call(SettleWeights(revert=True))
            if isinstance(error, CannotDo):
                raise
            raise CannotDo(f"{what} cannot be loaded: {error}") from error
        finally:
            if sent is not None:
                sent.tensors = {}  # the loader would keep them alive
        self.info = replace(self.info, model_fingerprint=loaded.fingerprint)
        self._runner = self._pipelined = None  # which holds the KV cache
        self._build_runner(loaded)
        self._previous = previous
        release_freed_memory(self._device)

    def start_profile(self) -> None:
        """Start a profile of the steps; raises as `StepThread.start_profile`."""
        self._steps.start_profile()
        if self._leader is not None:
            self._leader.call(StartProfile())

    def stop_profile(self, path: Path) -> None:
        """Stop the profile and write its trace; raises as `StepThread.stop_profile`.

        Workers add `-rank-N` to the names of theirs.
        """
        self._steps.stop_profile(path)
        if self._leader is not None:
            self._leader.call(StopProfile(str(path)))

    def shutdown(self) -> None:
        """Free the model and the KV cache, and terminate the workers."""
        self._was_shut_down = True
        self._steps.shutdown()
        if self.grammars is not None:
            self.grammars.shutdown()
        if self.adapters is not None:
            self.adapters.shutdown()
        if self._transfer is not None:
            self._transfer.leave()
        self._runner = self._pipelined = self._previous = None
        self._holder.close()
        if self._leader is not None:
            self._leader.close()

    def _between_steps(self, exchange: Callable[[], bytes]) -> bytes:
        """Call a function that sends commands to workers, without interleaving with steps."""
        assert self._leader is not None
        try:
            return self._steps.call(exchange)
        except GroupBroken as error:
            raise self._leader.team.failure() from error

    def _load(
        self,
        in_group: GroupPosition | None,
        balance: ExpertBalance | None,
        sent: TensorFiles | None,
    ) -> LoadedModel:
        """Load the weights, including those of a draft model."""
        loaded = load_model(
            self._config,
            self._device,
            self._report,
            in_group=in_group,
            shard=self._shard,
            stage=self._num_stages - 1,
            balance=balance,
            with_vision=True,
            sent=sent,
        )
        longest = model_length(loaded.model.spec, self._config.model)
        draft = load_draft(self._config, loaded.model, longest, self._report)
        return replace(loaded, draft=draft)

    def _size_cache(self, loaded: LoadedModel, processes: int) -> ExecutorInfo:
        """Size the KV cache; `processes` is the number that share this node's memory."""
        model, pooling = loaded.model, loaded.pooling
        spec = model.spec
        max_model_len = model_length(spec, self._config.model)
        if pooling is not None and self._config.model.max_model_len is None:
            max_model_len = min(max_model_len, pooling.max_length or max_model_len)
        windows = spec.cache_groups.windows
        in_one_step = pooling is not None and pooling.in_one_step
        lookahead = lookahead_tokens(
            self._config.scheduler,
            max_model_len,
            num_stages=self._num_stages,
            in_one_step=in_one_step,
        )
        shape = CacheShape(self._config.cache.block_size, windows, lookahead)
        in_16_bits = model.dtype.itemsize == 2 and self._config.model.quantization is None
        row = row_price(self._device, in_16_bits=in_16_bits)
        draft = draft_price(loaded.draft, spec, model.dtype, self._config)
        scheduling = self._config.scheduler
        if scheduling.max_draft_tokens:
            configured = scheduling.speculative_row_price
            logger.info(
                "drafts: verifying a token costs %.3g of a one-token step, drafting it %.3g",
                row if configured is None else configured,
                draft,
            )
        reserved = 0 if loaded.vision is None else self._config.cache.encoder_cache_bytes
        sizing = KvSizing(
            self._config, self._device, processes, self._leader, loaded.draft, reserved
        )
        return ExecutorInfo(
            num_kv_blocks=sizing.num_blocks(model, max_model_len, shape),
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            model_fingerprint=loaded.fingerprint,
            task="generate" if pooling is None else pooling.task,
            in_one_step=in_one_step,
            cache_windows=windows,
            num_stages=self._num_stages,
            is_batch_invariant=loaded.is_batch_invariant,
            row_price=row,
            draft_price=draft,
            vision=None if loaded.vision is None else loaded.vision.spec,
            embedding_bytes=spec.hidden_size * model.dtype.itemsize,
        )

    @property
    def _num_shards(self) -> int:
        return 1 if self._shard is None else self._shard.group.size

    @property
    def _loaded(self) -> LoadedModel:
        assert self._holder.loaded is not None, "the weights are here"
        return self._holder.loaded

    def _build_runner(self, loaded: LoadedModel) -> None:
        model, pooling = loaded.model, loaded.pooling
        if self._leader is not None:
            self._leader.call(Allocate(self.info.num_kv_blocks, self.info.model_fingerprint))
        self._runner = ModelRunner(
            model,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self.info.max_model_len,
            num_kv_blocks=self.info.num_kv_blocks,
            block_size=self._config.cache.block_size,
            grammars=self.grammars,
            enforce_eager=self._config.executor.enforce_eager,
            max_head_threads=self._max_head_threads,
            pooler=None if pooling is None else Pooler(pooling, model.classify),
            adapters=self.adapters,
            earlier=None if self._leader is None else self._leader.earlier(model),
            draft=loaded.draft,
            vision=loaded.vision,
        )
        self._pipelined = None
        if self._num_stages > 1 and self._steps.pool is not None:
            self._pipelined = PipelinedSteps(self._runner, self._steps.pool)
