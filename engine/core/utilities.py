"""What operators may have an engine do beside serving: calls by name, with typed arguments.

Only what is listed here can be called. Whatever is wrong with a call, or goes wrong in it, is
answered to the caller; the engine goes on serving.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from engine.core.operations import Operations
from engine.core.steps import StepFailed
from engine.executor.interface import CannotDo
from engine.shared.messages import UtilityCall, UtilityResult, UtilityValue

logger = logging.getLogger(__name__)

Answer = dict[str, UtilityValue]


class _NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["keep", "move"] = "keep"
    """Whether requests wait here or go to engines that are not halted."""


class _Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal[1, 2] = 1
    mode: Literal["keep", "move"] = "keep"


class _Adapter(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Utility(NamedTuple):
    """The type of the arguments, and the call."""

    arguments: type[msgspec.Struct]
    run: Callable[[Operations, Any], Answer]


def call_utility(engine: Operations, call: UtilityCall, rank: int) -> UtilityResult:
    """Do what is asked for, or say why not; `rank` is the engine's.

    Raises:
        StepFailed: a call had to finish the steps in flight, and one failed.
    """
    result = UtilityResult(call.call_id, rank)
    utility = UTILITIES.get(call.name)
    if utility is None:
        known = ", ".join(sorted(UTILITIES))
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


def _info(engine: Operations, _: _NoArguments) -> Answer:
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
        "is_paused": halting.is_paused,
        "is_sleeping": halting.is_sleeping,
    }


def _reset_prefix_cache(engine: Operations, _: _NoArguments) -> Answer:
    return {"blocks_forgotten": engine.reset_prefix_cache()}


def _pause(engine: Operations, arguments: _Pause) -> Answer:
    engine.halting.pause(hand_over=arguments.mode == "move")
    return {"is_paused": True}


def _resume(engine: Operations, _: _NoArguments) -> Answer:
    engine.halting.resume()
    return {"is_paused": False}


def _sleep(engine: Operations, arguments: _Sleep) -> Answer:
    engine.sleep(arguments.level, hand_over=arguments.mode == "move")
    return {"is_sleeping": True}


def _wake_up(engine: Operations, _: _NoArguments) -> Answer:
    engine.wake_up()
    return {"is_sleeping": False}


def _is_sleeping(engine: Operations, _: _NoArguments) -> Answer:
    return {"is_sleeping": engine.halting.is_sleeping}


def _start_profile(engine: Operations, _: _NoArguments) -> Answer:
    return {"directory": engine.profiles.start()}


def _stop_profile(engine: Operations, _: _NoArguments) -> Answer:
    return {"trace": engine.profiles.stop(engine.stats().step)}


def _list_loras(engine: Operations, _: _NoArguments) -> Answer:
    return dict(engine.adapters.versions())


def _pin_lora(engine: Operations, arguments: _Adapter) -> Answer:
    engine.adapters.pin(arguments.name)
    return {"is_pinned": True}


def _unpin_lora(engine: Operations, arguments: _Adapter) -> Answer:
    engine.adapters.unpin(arguments.name)
    return {"is_pinned": False}


UTILITIES = {
    "info": _Utility(_NoArguments, _info),
    "is_sleeping": _Utility(_NoArguments, _is_sleeping),
    "list_loras": _Utility(_NoArguments, _list_loras),
    "pause": _Utility(_Pause, _pause),
    "pin_lora": _Utility(_Adapter, _pin_lora),
    "reset_prefix_cache": _Utility(_NoArguments, _reset_prefix_cache),
    "resume": _Utility(_NoArguments, _resume),
    "sleep": _Utility(_Sleep, _sleep),
    "start_profile": _Utility(_NoArguments, _start_profile),
    "stop_profile": _Utility(_NoArguments, _stop_profile),
    "unpin_lora": _Utility(_Adapter, _unpin_lora),
    "wake_up": _Utility(_NoArguments, _wake_up),
}
"""By the names that front ends send."""
