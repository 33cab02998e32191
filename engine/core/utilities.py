"""What operators may have an engine do beside serving: calls by name, with typed arguments.

Only what is listed here can be called. Whatever is wrong with a call, or goes wrong in it, is
answered to the caller; the engine goes on serving.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from engine.core.profiles import Profiles
from engine.core.wave_clock import WaveClock
from engine.executor.interface import CannotDo
from engine.shared.messages import (
    EngineSetup,
    EngineStats,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)

logger = logging.getLogger(__name__)

Answer = dict[str, UtilityValue]


class Operated(Protocol):
    """What of an engine operators may look at and do."""

    rank: int
    incarnation: int
    clock: WaveClock
    vocab_size: int
    is_paused: bool
    is_sleeping: bool
    profiles: Profiles

    @property
    def setup(self) -> EngineSetup: ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> int: ...

    def pause(self, *, hand_over: bool = False) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: int, *, hand_over: bool = False) -> None: ...

    def wake_up(self) -> None: ...


class _NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["keep", "move"] = "keep"
    """Whether requests wait here or go to engines that are not halted."""


class _Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal[1, 2] = 1
    mode: Literal["keep", "move"] = "keep"


class _Utility(NamedTuple):
    """The type of the arguments, and the call."""

    arguments: type[msgspec.Struct]
    run: Callable[[Operated, Any], Answer]


def call_utility(core: Operated, call: UtilityCall, fatal: type[Exception]) -> UtilityResult:
    """Do what is asked for, or say why not.

    Raises:
        fatal: the engine itself has failed meanwhile.
    """
    result = UtilityResult(call.call_id, core.rank)
    utility = UTILITIES.get(call.name)
    if utility is None:
        known = ", ".join(sorted(UTILITIES))
        error = f"engines have no utility {call.name!r}; they have {known}"
        return msgspec.structs.replace(result, error=error)
    try:
        arguments = msgspec.convert(call.arguments, utility.arguments)
        return msgspec.structs.replace(result, result=utility.run(core, arguments))
    except fatal:
        raise
    except msgspec.ValidationError as invalid:
        error = f"wrong arguments for {call.name}: {invalid}"
    except CannotDo as reason:
        error = str(reason)
    except Exception as failure:
        logger.exception("utility %s failed", call.name)
        error = f"{call.name} failed: {type(failure).__name__}: {failure}"
    return msgspec.structs.replace(result, error=error)


def _info(core: Operated, _: _NoArguments) -> Answer:
    stats, setup = core.stats(), core.setup
    return {
        "rank": core.rank,
        "incarnation": core.incarnation,
        "wave": core.clock.wave,
        "step": stats.step,
        "topology": stats.topology,
        "waiting": stats.waiting,
        "running": stats.running,
        "kv_usage": stats.kv_usage,
        "num_kv_blocks": setup.num_kv_blocks,
        "block_size": setup.block_size,
        "max_model_len": setup.max_model_len,
        "vocab_size": core.vocab_size,
        "model_fingerprint": setup.model_fingerprint,
        "is_paused": core.is_paused,
        "is_sleeping": core.is_sleeping,
    }


def _reset_prefix_cache(core: Operated, _: _NoArguments) -> Answer:
    return {"blocks_forgotten": core.reset_prefix_cache()}


def _pause(core: Operated, arguments: _Pause) -> Answer:
    core.pause(hand_over=arguments.mode == "move")
    return {"is_paused": True}


def _resume(core: Operated, _: _NoArguments) -> Answer:
    core.resume()
    return {"is_paused": False}


def _sleep(core: Operated, arguments: _Sleep) -> Answer:
    core.sleep(arguments.level, hand_over=arguments.mode == "move")
    return {"is_sleeping": True}


def _wake_up(core: Operated, _: _NoArguments) -> Answer:
    core.wake_up()
    return {"is_sleeping": False}


def _is_sleeping(core: Operated, _: _NoArguments) -> Answer:
    return {"is_sleeping": core.is_sleeping}


def _start_profile(core: Operated, _: _NoArguments) -> Answer:
    return {"directory": core.profiles.start()}


def _stop_profile(core: Operated, _: _NoArguments) -> Answer:
    return {"trace": core.profiles.stop(core.stats().step)}


UTILITIES = {
    "info": _Utility(_NoArguments, _info),
    "is_sleeping": _Utility(_NoArguments, _is_sleeping),
    "pause": _Utility(_Pause, _pause),
    "reset_prefix_cache": _Utility(_NoArguments, _reset_prefix_cache),
    "resume": _Utility(_NoArguments, _resume),
    "sleep": _Utility(_Sleep, _sleep),
    "start_profile": _Utility(_NoArguments, _start_profile),
    "stop_profile": _Utility(_NoArguments, _stop_profile),
    "wake_up": _Utility(_NoArguments, _wake_up),
}
"""By the names that front ends send."""
