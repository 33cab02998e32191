"""What operators may have an engine do beside serving: calls by name, with typed arguments.

Only what is listed here can be called. Whatever is wrong with a call, or goes wrong in it, is
answered to the caller; the engine goes on serving.
"""

import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Protocol

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


class Operated(Protocol):
    """What every engine lets operators do; its setup names the utilities that it has."""

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


class _NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: PauseMode = "keep"


class _Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal[0, 1, 2] = 1
    mode: SleepMode = "keep"


class _WakeUp(msgspec.Struct, forbid_unknown_fields=True):
    tags: str = ",".join(ASLEEP_TAGS)
    """What to have back, separated by commas."""


class _Adapter(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _LoadWeights(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    version: str
    after: int
    """How often the weights have been replaced before, see `info`."""
    revision: str | None = None


class _JoinTrainer(msgspec.Struct, forbid_unknown_fields=True):
    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank: Annotated[int, msgspec.Meta(ge=1)]
    world_size: int
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    """Seconds that everybody waits for the others, to meet and for each tensor."""


class _Receive(msgspec.Struct, forbid_unknown_fields=True):
    names: str
    """A JSON list, as are the next two."""
    dtype_names: str
    shapes: str


class _Rpc(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: str
    """A JSON list."""
    kwargs: str
    """A JSON object."""


class _Utility(NamedTuple):
    """The type of the arguments, and the call."""

    arguments: type[msgspec.Struct]
    run: Callable[[Any, Any], Answer]


def carry_out(
    engine: Operated, event: UtilityCall | FleetOrder, rank: int
) -> list[tuple[int, UtilityResult]]:
    """Do what an operator wants of this engine, or of all of them.

    Returns:
        Results with the front ends that wait for them; how an order for all ended is noted.

    Raises:
        StepFailed: as `call_utility`.
    """
    results = []
    if isinstance(event, FleetOrder):
        _compare_weights(engine, event)
        calls = engine.halting.take_up(event)
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


def _compare_weights(engine: Operated, order: FleetOrder) -> None:
    """Have an engine that started too late for what a trainer has sent wait for more of it."""
    sent, halting = order.weights, engine.halting
    if order.revision <= halting.order.revision or sent is None or sent.model != PUSHED:
        return
    if sent == engine.weights:
        halting.have_weights()
    else:
        logger.warning("waiting for a trainer, which has sent weights to the other engines")
        halting.lack_weights()


def call_utility(engine: Operated, call: UtilityCall, rank: int) -> UtilityResult:
    """Do what is asked for, or say why not; `rank` is the engine's.

    Raises:
        StepFailed: a call had to finish the steps in flight, and one failed.
    """
    result = UtilityResult(call.call_id, rank)
    utility = UTILITIES.get(call.name)
    offered = engine.setup.utilities
    offered = tuple(sorted(UTILITIES)) if offered is None else offered
    if utility is None or call.name not in offered:
        known = ", ".join(offered)
        error = f"engines have no utility {call.name!r}; they have {known}"
        return msgspec.structs.replace(result, error=error)
    try:
        arguments = msgspec.convert(call.arguments, utility.arguments)
        return msgspec.structs.replace(result, result=utility.run(engine, arguments))
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


def _info(engine: Operated, _: _NoArguments) -> Answer:
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


def _reset_prefix_cache(engine: Operated, _: _NoArguments) -> Answer:
    return {"blocks_forgotten": engine.reset_prefix_cache()}


def _reset_encoder_cache(engine: Operations, _: _NoArguments) -> Answer:
    return {"images_forgotten": engine.reset_encoder_cache()}


def _pause(engine: Operated, arguments: _Pause) -> Answer:
    engine.pause(arguments.mode)
    return {"is_paused": engine.is_paused}


def _resume(engine: Operated, _: _NoArguments) -> Answer:
    engine.resume()
    return {"is_paused": False}


def _sleep(engine: Operated, arguments: _Sleep) -> Answer:
    engine.sleep(arguments.level, arguments.mode)
    return {"is_sleeping": True}


def _wake_up(engine: Operated, arguments: _WakeUp) -> Answer:
    tags = set(arguments.tags.split(","))
    if unknown := tags.difference(ASLEEP_TAGS, ["scheduling"]):
        raise CannotDo(f"there is no tag {min(unknown)!r}; there are {', '.join(ASLEEP_TAGS)}")
    engine.wake_up(tags)
    return {"is_sleeping": engine.halting.is_sleeping}


def _is_sleeping(engine: Operated, _: _NoArguments) -> Answer:
    return {"is_sleeping": engine.halting.is_sleeping}


def _load_weights(engine: Operations, arguments: _LoadWeights) -> Answer:
    source = WeightsSource(arguments.model, arguments.revision, arguments.version)
    before = engine.load_weights(source, arguments.after)
    return {"model": before.model, "revision": before.revision, "version": before.version}


def _settle_weights(engine: Operations, _: _NoArguments) -> Answer:
    engine.settle_weights()
    return {"is_settled": True}


def _join_trainer(engine: Operations, arguments: _JoinTrainer) -> Answer:
    if arguments.rank >= arguments.world_size:
        raise CannotDo(f"rank {arguments.rank} is none of a world of {arguments.world_size}")
    address = join_host_port(arguments.master_address, arguments.master_port)
    transfer = engine.weight_transfer
    transfer.join(GroupSpec(address, arguments.rank, arguments.world_size, 0, arguments.timeout))
    return _transfer(engine, _NoArguments())


def _start_weight_update(engine: Operations, _: _NoArguments) -> Answer:
    engine.weight_transfer.start()
    return _transfer(engine, _NoArguments())


def _update_weights(engine: Operations, arguments: _Receive) -> Answer:
    decode = msgspec.json.decode
    engine.weight_transfer.receive(
        decode(arguments.names, type=list[str]),
        decode(arguments.dtype_names, type=list[str]),
        decode(arguments.shapes, type=list[list[int]]),
    )
    return _transfer(engine, _NoArguments())


def _leave_trainer(engine: Operations, _: _NoArguments) -> Answer:
    engine.weight_transfer.leave()
    return _transfer(engine, _NoArguments())


def _transfer(engine: Operations, _: _NoArguments) -> Answer:
    transfer = engine.weight_transfer
    return {
        "phase": transfer.phase,
        "error": transfer.error,
        "is_open": transfer.is_open,
        "received": transfer.num_received,
    }


def _start_profile(engine: Operations, _: _NoArguments) -> Answer:
    return {"directory": engine.start_profile()}


def _stop_profile(engine: Operations, _: _NoArguments) -> Answer:
    return {"trace": engine.stop_profile()}


def _list_loras(engine: Operations, _: _NoArguments) -> Answer:
    return dict(engine.adapters.versions())


def _pin_lora(engine: Operations, arguments: _Adapter) -> Answer:
    engine.adapters.pin(arguments.name)
    return {"is_pinned": True}


def _unpin_lora(engine: Operations, arguments: _Adapter) -> Answer:
    engine.adapters.unpin(arguments.name)
    return {"is_pinned": False}


def _collective_rpc(engine: Operations, arguments: _Rpc) -> Answer:
    result = engine.extensions.call(arguments.method, arguments.args, arguments.kwargs)
    return {"result": result}


UTILITIES = {
    "collective_rpc": _Utility(_Rpc, _collective_rpc),
    "info": _Utility(_NoArguments, _info),
    "init_weight_transfer_engine": _Utility(_JoinTrainer, _join_trainer),
    "is_sleeping": _Utility(_NoArguments, _is_sleeping),
    "leave_weight_transfer": _Utility(_NoArguments, _leave_trainer),
    "load_weights": _Utility(_LoadWeights, _load_weights),
    "list_loras": _Utility(_NoArguments, _list_loras),
    "pause": _Utility(_Pause, _pause),
    "pin_lora": _Utility(_Adapter, _pin_lora),
    "reset_encoder_cache": _Utility(_NoArguments, _reset_encoder_cache),
    "reset_prefix_cache": _Utility(_NoArguments, _reset_prefix_cache),
    "resume": _Utility(_NoArguments, _resume),
    "settle_weights": _Utility(_NoArguments, _settle_weights),
    "sleep": _Utility(_Sleep, _sleep),
    "start_profile": _Utility(_NoArguments, _start_profile),
    "start_weight_update": _Utility(_NoArguments, _start_weight_update),
    "stop_profile": _Utility(_NoArguments, _stop_profile),
    "unpin_lora": _Utility(_Adapter, _unpin_lora),
    "update_weights": _Utility(_Receive, _update_weights),
    "wake_up": _Utility(_WakeUp, _wake_up),
    "weight_transfer": _Utility(_NoArguments, _transfer),
}
"""By the names that front ends send."""
