"""Operator calls on engines besides serving, by name and with typed arguments.

Only the utilities listed here can be called. Errors are returned to the caller; the engine
continues to serve.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Annotated, Literal, Protocol, get_type_hints

import msgspec

from engine.batch.executor import CannotDo
from engine.core.halting import FLEET, Halting
from engine.core.operations import Operations
from engine.core.steps import StepFailed
from engine.distributed.spec import GroupSpec
from engine.shared.addresses import join_host_port
from engine.shared.messages import (
    ASLEEP_TAGS,
    PUSHED,
    EngineSetup,
    EngineStats,
    FleetOrder,
    PauseMode,
    SleepMode,
    UtilityCall,
    UtilityResult,
    UtilityValue,
    WeightsSource,
)

logger = logging.getLogger(__name__)

Answer = dict[str, UtilityValue]


class OperableEngine(Protocol):
    """Operations that every engine supports; its setup names the utilities that it offers."""

    @property
    def setup(self) -> EngineSetup: ...

    @property
    def halting(self) -> Halting: ...

    @property
    def vocab_size(self) -> int: ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> int: ...

    def pause(self, mode: PauseMode) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: int, mode: SleepMode = "keep") -> None: ...

    def wake_up(self, tags: set[str] | None = None) -> None: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def weights(self) -> WeightsSource: ...

    @property
    def weight_updates(self) -> int: ...


def _arguments_of(run: Callable[..., Answer]) -> type[msgspec.Struct]:
    """Return a Struct of a call's arguments: the function's parameters after the engine."""
    hints = get_type_hints(run, include_extras=True)
    _, *parameters = inspect.signature(run).parameters.values()
    fields = [
        (each.name, hints[each.name])
        if each.default is each.empty
        else (each.name, hints[each.name], each.default)
        for each in parameters
    ]
    return msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True)


def execute_operation(
    engine: OperableEngine, event: UtilityCall | FleetOrder, rank: int
) -> list[tuple[int, UtilityResult]]:
    """Carry out an operator's call, or a fleet order, with `call_utility`.

    Returns results with the front ends that wait for them; the outcome of an order is recorded in
    `halting`.
    """
    results = []
    if isinstance(event, FleetOrder):
        _compare_weights(engine, event)
        calls = engine.halting.accept(event)
    else:
        calls = [event]
    for call in calls:
        result = call_utility(engine, call, rank)
        if call.front_end == FLEET:
            halting = engine.halting
            if halting.settled != call.call_id:
                halting.settled, halting.error = call.call_id, ""
            halting.error = halting.error or result.error or ""
        else:
            results.append((call.front_end, result))
    return results


def _compare_weights(engine: OperableEngine, order: FleetOrder) -> None:
    """Make an engine that missed weights sent by a trainer wait for the next ones."""
    sent, halting = order.weights, engine.halting
    if order.revision <= halting.order.revision or sent is None or sent.model != PUSHED:
        return
    if sent == engine.weights:
        halting.have_weights()
    else:
        logger.warning("waiting for a trainer, which has sent weights to the other engines")
        halting.lacks_weights = halting.hands_over = True


def call_utility(engine: OperableEngine, call: UtilityCall, rank: int) -> UtilityResult:
    """Carry out a call, or return an error; `rank` is the engine's.

    Raises:
        StepFailed: the call had to finish the steps in flight, and one failed.
    """
    result = UtilityResult(call.call_id, rank)
    run = UTILITIES.get(call.name)
    offered = engine.setup.utilities
    offered = tuple(sorted(UTILITIES)) if offered is None else offered
    if run is None or call.name not in offered:
        known = ", ".join(offered)
        error = f"engines have no utility {call.name!r}; they have {known}"
        return msgspec.structs.replace(result, error=error)
    try:
        arguments = msgspec.convert(call.arguments, _ARGUMENTS[call.name])
        answer = run(engine, **msgspec.structs.asdict(arguments))
        return msgspec.structs.replace(result, result=answer)
    except StepFailed:
        raise
    except msgspec.ValidationError as invalid:
        error = f"wrong arguments for {call.name}: {invalid}"
    except CannotDo as reason:
        error = str(reason)
    except Exception as failure:
        logger.exception("utility %s failed", call.name)
        error = f"{call.name} failed: {type(failure).__name__}: {failure}"
    return msgspec.structs.replace(result, error=error)


def _info(engine: OperableEngine) -> Answer:
    stats, setup, halting = engine.stats(), engine.setup, engine.halting
    return {
        "rank": stats.rank,
        "incarnation": stats.incarnation,
        "wave": stats.wave,
        "step": stats.step,
        "topology": stats.topology,
        "waiting": stats.waiting,
        "running": stats.running,
        "kv_usage": stats.kv_usage,
        "num_kv_blocks": setup.num_kv_blocks,
        "block_size": setup.block_size,
        "max_model_len": setup.max_model_len,
        "vocab_size": engine.vocab_size,
        "model_fingerprint": setup.model_fingerprint,
        "is_paused": engine.is_paused,
        "is_sleeping": halting.is_sleeping,
        "asleep": ",".join(tag for tag in ASLEEP_TAGS if tag in halting.asleep),
        "weight_version": engine.weights.version,
        "weight_updates": engine.weight_updates,
        "fleet_revision": halting.settled,
        "fleet_error": halting.error,
    }


def _pause(engine: OperableEngine, mode: PauseMode = "keep") -> Answer:
    engine.pause(mode)
    return {"is_paused": engine.is_paused}


def _resume(engine: OperableEngine) -> Answer:
    engine.resume()
    return {"is_paused": False}


def _sleep(engine: OperableEngine, level: Literal[0, 1, 2] = 1, mode: SleepMode = "keep") -> Answer:
    engine.sleep(level, mode)
    return {"is_sleeping": True}


def _wake_up(engine: OperableEngine, tags: str = ",".join(ASLEEP_TAGS)) -> Answer:
    """`tags`: memory to restore, separated by commas."""
    requested = set(tags.split(","))
    if unknown := requested.difference(ASLEEP_TAGS, ["scheduling"]):
        raise CannotDo(f"there is no tag {min(unknown)!r}; there are {', '.join(ASLEEP_TAGS)}")
    engine.wake_up(requested)
    return {"is_sleeping": engine.halting.is_sleeping}


def _load_weights(
    engine: Operations, model: str, version: str, after: int, revision: str | None = None
) -> Answer:
    """`after`: expected number of earlier replacements, see `info`."""
    before = engine.load_weights(WeightsSource(model, revision, version), after)
    return {"model": before.model, "revision": before.revision, "version": before.version}


def _settle_weights(engine: Operations) -> Answer:
    engine.settle_weights()
    return {"is_settled": True}


def _join_trainer(
    engine: Operations,
    master_address: str,
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)],
    rank: Annotated[int, msgspec.Meta(ge=1)],
    world_size: int,
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)],
) -> Answer:
    """`timeout`: seconds to wait for other members, to join and for each tensor."""
    if rank >= world_size:
        raise CannotDo(f"rank {rank} is out of range for a world size of {world_size}")
    address = join_host_port(master_address, master_port)
    engine.executor.weight_transfer().join(GroupSpec(address, rank, world_size, 0, timeout))
    return _transfer(engine)


def _start_weight_update(engine: Operations) -> Answer:
    engine.executor.weight_transfer().start()
    return _transfer(engine)


def _update_weights(engine: Operations, names: str, dtype_names: str, shapes: str) -> Answer:
    """The arguments are JSON lists."""
    decode = msgspec.json.decode
    engine.executor.weight_transfer().receive(
        decode(names, type=list[str]),
        decode(dtype_names, type=list[str]),
        decode(shapes, type=list[list[int]]),
    )
    return _transfer(engine)


def _leave_trainer(engine: Operations) -> Answer:
    engine.executor.weight_transfer().leave()
    return _transfer(engine)


def _transfer(engine: Operations) -> Answer:
    transfer = engine.executor.weight_transfer()
    return {
        "phase": transfer.phase,
        "error": transfer.error,
        "is_open": transfer.is_open,
        "received": transfer.num_received,
    }


def _pin_lora(engine: Operations, name: str) -> Answer:
    if not engine.scheduler.adapters.pin(engine.adapters.version(name)):
        raise CannotDo("one slot has to stay for other adapters: raise --max-loras")
    return {"is_pinned": True}


def _unpin_lora(engine: Operations, name: str) -> Answer:
    engine.scheduler.adapters.unpin(engine.adapters.version(name))
    return {"is_pinned": False}


def _collective_rpc(engine: Operations, method: str, args: str, kwargs: str) -> Answer:
    """`args` is a JSON list, `kwargs` a JSON object."""
    return {"result": engine.extensions.call(method, args, kwargs)}


_READINGS: dict[str, Callable[[Operations], Answer]] = {
    "execute_dummy_batch": lambda engine: {"step": engine.execute_dummy_batch()},
    "get_supported_tasks": lambda engine: {"tasks": engine.executor.info.task},
    "is_sleeping": lambda engine: {"is_sleeping": engine.halting.is_sleeping},
    "list_loras": lambda engine: dict(engine.adapters.versions()),
    "reset_encoder_cache": lambda engine: {"images_forgotten": engine.scheduler.encoder.reset()},
    "reset_prefix_cache": lambda engine: {"blocks_forgotten": engine.reset_prefix_cache()},
    "start_profile": lambda engine: {"directory": engine.start_profile()},
    "stop_profile": lambda engine: {"trace": engine.stop_profile()},
}
"""Utilities without arguments."""

UTILITIES: dict[str, Callable[..., Answer]] = {
    **_READINGS,
    "collective_rpc": _collective_rpc,
    "info": _info,
    "init_weight_transfer_engine": _join_trainer,
    "leave_weight_transfer": _leave_trainer,
    "load_weights": _load_weights,
    "pause": _pause,
    "pin_lora": _pin_lora,
    "resume": _resume,
    "settle_weights": _settle_weights,
    "sleep": _sleep,
    "start_weight_update": _start_weight_update,
    "unpin_lora": _unpin_lora,
    "update_weights": _update_weights,
    "wake_up": _wake_up,
    "weight_transfer": _transfer,
}
"""By the names that front ends send."""

_ARGUMENTS = {name: _arguments_of(run) for name, run in UTILITIES.items()}
