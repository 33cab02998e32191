"""What operators may have an engine do beside serving: calls by name, with typed arguments.

Only what is listed here can be called. Whatever is wrong with a call, or goes wrong in it, is
answered to the caller; the engine goes on serving.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from engine.batch.executor import CannotDo
from engine.core.halting import FLEET, Halting
from engine.core.operations import Operations
from engine.core.steps import StepFailed
from engine.shared.messages import (
    ASLEEP_TAGS,
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
    for call in engine.halting.take_up(event) if isinstance(event, FleetOrder) else [event]:
        result = call_utility(engine, call, rank)
        if call.front_end == FLEET:
            halting = engine.halting
            if halting.settled != call.call_id:
                halting.settled, halting.error = call.call_id, ""
            halting.error = halting.error or result.error or ""
        else:
            results.append((call.front_end, result))
    return results


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
    "is_sleeping": _Utility(_NoArguments, _is_sleeping),
    "load_weights": _Utility(_LoadWeights, _load_weights),
    "list_loras": _Utility(_NoArguments, _list_loras),
    "pause": _Utility(_Pause, _pause),
    "pin_lora": _Utility(_Adapter, _pin_lora),
    "reset_encoder_cache": _Utility(_NoArguments, _reset_encoder_cache),
    "reset_prefix_cache": _Utility(_NoArguments, _reset_prefix_cache),
    "resume": _Utility(_NoArguments, _resume),
    "sleep": _Utility(_Sleep, _sleep),
    "start_profile": _Utility(_NoArguments, _start_profile),
    "stop_profile": _Utility(_NoArguments, _stop_profile),
    "unpin_lora": _Utility(_Adapter, _unpin_lora),
    "wake_up": _Utility(_WakeUp, _wake_up),
}
"""By the names that front ends send."""
