"""Loads a model onto a device according to the settings, in all computing processes."""

import importlib.util
import logging
from collections.abc import Callable
from math import prod
from pathlib import Path

import msgspec
import torch

from engine.executor.environment import num_cores
from engine.executor.layout import Layout
from engine.executor.rules import check_sharded_state, image_refusal
from engine.kernels.processor import kernels_are_faster
from engine.kernels.registry import fused_kernels
from engine.models.cache_groups import CacheGroups, divide, one_group
from engine.models.decoder import Decoder
from engine.models.fallback.choice import implementation
from engine.models.fallback.loading import load_fallback
from engine.models.formats.checkpoint import Checkpoint
from engine.models.formats.files import TensorFiles, computed_fingerprint
from engine.models.heads.eagle3 import is_eagle3, is_unsupported_head
from engine.models.heads.head import DraftHead
from engine.models.hf_config import read_config, read_spec
from engine.models.loading.decoder import AdapterCapacity, DecoderLoader, Shard
from engine.models.loading.invariance import is_batch_invariant
from engine.models.loading.kernels_ahead import compile_ahead
from engine.models.loading.mlps import GroupPosition
from engine.models.parallel.balance import ExpertBalance
from engine.models.parallel.sharded_state import ShardedState
from engine.models.parallel.stages import divide_layers
from engine.models.parallel.tensors import TensorSharding
from engine.models.settings import (
    compute_types,
    fits_caches,
    losses,
    model_length,
    open_checkpoint,
    quantization,
)
from engine.models.spec import ModelSpec, TowerSpec, UnsupportedModel, VisionSpec
from engine.models.vision.loading import VisionEncoder, has_vision, load_vision
from engine.shared.config import EngineConfig, ModelConfig, ParallelConfig
from engine.shared.cpu.machine import usable_cores
from engine.shared.model_files import model_directory, served_names
from engine.shared.plugins import install_command
from engine.shared.pooling import PoolingSpec, read_pooling

logger = logging.getLogger(__name__)

_MAX_HEAD_THREADS = 4
"""More were not measured; each thread reads its share of a few dozen megabytes."""


class LoadedModel(msgspec.Struct, frozen=True):
    """A loaded model, and the loader that can replace parts of it later."""

    model: Decoder
    fingerprint: str
    loader: DecoderLoader | None
    """Holds the weight files open; None for a model of transformers."""
    pooling: PoolingSpec | None = None
    """How sequences are pooled into vectors; None if the model generates tokens."""
    is_batch_invariant: bool = False
    vision: VisionEncoder | None = None
    """None if images are refused."""
    draft: Decoder | DraftHead | None = None
    """Configured draft model or head, whose tokens the model verifies."""


def load_model(
    config: EngineConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    in_group: GroupPosition | None = None,
    shard: Shard | None = None,
    stage: int = 0,
    balance: ExpertBalance | None = None,
    served: CacheGroups | None = None,
    with_vision: bool = False,
    sent: TensorFiles | None = None,
) -> LoadedModel:
    """Load the weights: all, the experts of a position in a group, or a shard of each layer.

    With pipeline stages, only those of the given stage. With --enable-eplb, the expert load
    measured before a reload is passed as `balance`. A draft model gets the cache groups of the
    model that is `served`. A vision encoder is loaded only `with_vision`. Weights that were `sent`
    replace the files' weights.

    Raises:
        ModelNotFound: there is no such model.
        UnsupportedModel: the model's config requires an unimplemented feature.
        CheckpointError: the weights do not fit the config.
    """
    settings = config.model
    directory = model_directory(settings, weights=settings.load_format != "dummy")
    pooling = read_pooling(directory, settings)
    is_fallback = pooling is None and implementation(directory, settings) == "transformers"
    check_sharded_state(config, is_fallback=is_fallback, is_pooling=pooling is not None)
    if is_fallback:
        report(f"loading weights of {directory.name} with transformers")
        fallback = load_fallback(
            directory,
            settings,
            device,
            lambda found: _cache_groups(config, found, device),
            config.cache.kv_cache_dtype,
        )
        return LoadedModel(fallback.model, fallback.fingerprint, None)
    spec = read_spec(directory)
    if pooling is not None:
        outputs = pooling.size if pooling.task == "classify" else 0
        spec = msgspec.structs.replace(spec, num_outputs=outputs)
    groups = _cache_groups(config, spec, device, served)
    spec = msgspec.structs.replace(spec, cache_groups=groups)
    checkpoint: Checkpoint
    if settings.load_format == "sharded_state" and sent is None:
        # A single process loads the shards of one rank, which are the whole model.
        ranks = (0, 1) if shard is None else (shard.group.rank, shard.group.size)
        checkpoint = ShardedState(directory, spec, TensorSharding(spec, *ranks))
    else:
        checkpoint = open_checkpoint(directory, spec, settings, sent)
    in_group = None if spec.moe is None else in_group
    parallel = config.parallel
    stages = divide_layers(
        spec.num_layers, parallel.pipeline_parallel_size, parallel.layers_of_stages
    )
    in_one_process = in_group is None and parallel.processes == 1
    types = compute_types(spec, settings, checkpoint, device=device, in_one_process=in_one_process)
    types = types._replace(kv_cache_dtype=config.cache.kv_cache_dtype)
    if balance is None and in_group is not None and parallel.enable_eplb:
        balance = _new_balance(spec, parallel, in_group.size, device)
    is_eager = device.type == "cpu" and config.executor.enforce_eager
    is_stock = is_eager or not kernels_are_faster(device)
    kernels = None if is_stock else fused_kernels(types.activations, device)
    rounding = quantization(settings, types, device=device, in_one_process=in_one_process)
    is_whole = in_group is None and shard is None
    is_plain = rounding is None and types.kv_cache_dtype == "auto" and not config.lora.enable_lora
    if kernels is not None and device.type == "cpu" and is_plain and is_whole:
        report("preparing kernels: the first start on a machine compiles them")
        compile_ahead(spec, draws_tokens=pooling is None)
    what = f"loading weights of {served_names(settings)[0]}"
    report(what)
    for loss in losses(spec, model_length(spec, settings), rounding):
        logger.warning("%s", loss)
    is_invariant = is_batch_invariant(
        config, spec, types, device, kernels=kernels, is_quantized=rounding is not None
    )
    loader = DecoderLoader(
        spec,
        checkpoint,
        types=types,
        device=device,
        max_model_len=model_length(spec, settings),
        in_group=in_group,
        shard=shard,
        stage=stages[stage],
        quantization=rounding,
        batch_invariant=is_invariant,
        adapters=AdapterCapacity.of(config.lora),
        balance=balance,
        kernels=kernels,
    )
    with torch.inference_mode():
        model = loader.load(lambda layer, layers: report(f"{what}: layer {layer} of {layers}"))
        fingerprint = computed_fingerprint(checkpoint.fingerprint(), settings.quantization)
        vision = None
        if with_vision and pooling is None and _takes_images(config, directory, spec.vision):
            report(f"loading the vision encoder of {served_names(settings)[0]}")
            vision = load_vision(directory, spec, settings, types.activations, device)
        return LoadedModel(model, fingerprint, loader, pooling, is_invariant, vision)


def _takes_images(config: EngineConfig, directory: Path, vision: VisionSpec | None) -> bool:
    if vision is None or config.model.language_model_only:
        return False
    reason = image_refusal(config, vision)
    if reason is None and not has_vision(directory, vision, config.model):
        reason = f"the weights in {directory}, which include no vision encoder"
    is_tower = isinstance(vision, TowerSpec)
    if reason is None and is_tower and importlib.util.find_spec("transformers") is None:
        reason = f"a vision encoder of transformers: {install_command('transformers')}"
    if reason is not None:
        logger.warning("images are not accepted with %s", reason)
    return reason is None


def _cache_groups(
    config: EngineConfig, spec: ModelSpec, device: torch.device, served: CacheGroups | None = None
) -> CacheGroups:
    """Return which layers share KV blocks; for a draft model, next to those of `served`.

    A draft model stores keys and values in the blocks of a group that keeps all positions, a draft
    head in those of all layers. CUDA graphs support a single block table.
    """
    if served is not None:
        of_layers = (served.windows.index(None),) * spec.num_layers
        return CacheGroups(served.windows, of_layers)
    if _has_head(config):
        return CacheGroups()
    has_draft, extra_layers = config.scheduler.speculative_model is not None, 0.0
    if has_draft:
        draft = read_spec(model_directory(draft_settings(config), weights=False))
        extra_layers = draft.num_layers * prod(draft.kv_shape) / prod(spec.kv_shape)
    groups = one_group(spec.windows)
    if device.type == "cpu":
        groups = divide(spec.windows, model_length(spec, config.model), extra_layers)
    return CacheGroups() if has_draft and None not in groups.windows else groups


def _has_head(config: EngineConfig) -> bool:
    scheduling = config.scheduler
    if not scheduling.drafts_with_model or scheduling.speculative_method == "mtp":
        return scheduling.drafts_with_model
    draft_config = read_config(model_directory(draft_settings(config), weights=False))
    return is_eagle3(draft_config) or is_unsupported_head(draft_config)


def draft_settings(config: EngineConfig) -> ModelConfig:
    """Return the model settings for drafting, except length: a model, a head, or a layer."""
    name, quantization = config.scheduler.speculative_model, config.model.quantization
    quantization = config.scheduler.speculative_model_quantization or quantization
    settings = msgspec.structs.replace(config.model, quantization=quantization)
    if name is None:
        return settings
    return msgspec.structs.replace(
        settings, model=name, revision=None, model_impl="swell", runner="generate"
    )


def _new_balance(
    spec: ModelSpec, parallel: ParallelConfig, engines: int, device: torch.device
) -> ExpertBalance:
    assert spec.moe is not None
    experts, size = spec.moe.num_experts, engines * parallel.processes
    if parallel.num_redundant_experts > experts * (size - 1):
        raise UnsupportedModel(
            f"--num-redundant-experts {parallel.num_redundant_experts} is more than "
            f"{experts * (size - 1)}, with which each of {size} processes has all {experts} experts"
        )
    balance = ExpertBalance(
        spec.num_layers,
        experts,
        parallel.num_redundant_experts,
        parallel.eplb_step_interval,
        device,
    )
    balance.reset(size)
    return balance


def set_threads(config: EngineConfig, engines_on_node: int, cores: int | None = None) -> None:
    """Set this process's thread count: its share of the cores, or of the configured threads.

    A bound process has its own cores, with one thread each. `cores` is the number that the node's
    engines share; None selects what suits the decoder.

    Raises:
        ModelNotFound: there is no such model.
        UnsupportedModel: the model's config requires an unimplemented feature.
    """
    processes = config.parallel.processes_on_node
    if config.executor.bound_to and not config.executor.threads:
        of_process = min(usable_cores(), num_cores())
    else:
        of_engine = config.executor.threads or (cores or _free_cores(config)) // engines_on_node
        of_process = of_engine // processes
    torch.set_num_threads(max(1, of_process))
    if torch.get_num_interop_threads() == 1:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:  # only possible before the first parallel work of a process
        logger.debug("the inter-operator thread pool has already started")


def max_head_threads(spec: ModelSpec, config: EngineConfig, engines_on_node: int) -> int:
    """Return the maximum number of threads for the LM head of a large batch."""
    parallel, executor = config.parallel, config.executor
    is_spread = parallel.enable_expert_parallel or parallel.processes > 1
    if is_spread or executor.threads or not fits_caches(spec):
        return 1
    if executor.bound_to:  # its threads already use all of its cores
        return 1
    return min(_MAX_HEAD_THREADS, num_cores() // engines_on_node)


def _free_cores(config: EngineConfig) -> int:
    """Return the number of cores on which the node's engines compute.

    A small model produces tokens so fast that front ends and clients need a core, and gains little
    from one more core: its engines leave one free.
    """
    directory = model_directory(config.model, weights=False)
    if implementation(directory, config.model) == "transformers":
        return num_cores()
    return num_cores() - (1 if fits_caches(read_spec(directory)) else 0)


class TooFewDevices(ValueError):
    """The node has fewer devices than its engines need."""


def device_number(parallel: ParallelConfig, worker: int, count: int) -> int:
    """Return which of the `count` visible devices belongs to a process of an engine.

    Devices are numbered per node, engine by engine, with consecutive numbers for each engine.

    Args:
        worker: index of the process among the engine's on this node, from 0, in stage order.

    Raises:
        TooFewDevices: the engine's last device does not exist.
    """
    engine, size = parallel.number_on_node, parallel.processes_on_node
    first, last = engine * size, (engine + 1) * size - 1
    if last >= count:
        needed = f"device {first}" if size == 1 else f"devices {first} to {last}"
        raise TooFewDevices(
            f"engine {engine} of this node needs CUDA {needed}, but only {count} "
            f"{'is' if count == 1 else 'are'} visible: lower --data-parallel-size (on several "
            "nodes --data-parallel-size-local), --tensor-parallel-size or "
            "--pipeline-parallel-size, or set CUDA_VISIBLE_DEVICES to more"
        )
    return first + worker


def take_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return the device of one of an engine's processes; rank 0 is the leader.

    It becomes the current device of the calling thread: kernels are launched and graphs recorded on
    the current device, wherever their tensors are.

    Raises:
        ValueError: CUDA is requested but unavailable, or lacks devices for the node's engines.
    """
    device_type = config.model.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device was found")
    worker = Layout.of(config.parallel).index_on_node(rank)
    # torch renumbers the devices of CUDA_VISIBLE_DEVICES, if set.
    number = device_number(config.parallel, worker, torch.cuda.device_count())
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
