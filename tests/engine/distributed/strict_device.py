"""A simulated device: tensors that claim to be on it, with separate connections for them.

It is as strict as CUDA and NCCL are, on a machine without either: tensors of the device and of the
processor do not mix, and whatever travels over the wrong connections is refused. It is stricter
with work for another device than the thread's current one, which CUDA starts on the wrong device.
"""

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.overrides import TorchFunctionMode

from engine.distributed import backend
from engine.distributed.backend import Backend, Connections
from engine.distributed.group import CPU
from engine.distributed.spec import GroupSpec
from engine.executor import encoding, in_process, loading, worker
from engine.shared.config import EngineConfig

DEVICE = torch.device("cuda")
"""Device type passed to groups, and reported by the tensors."""


class _Current(threading.local):
    """Index of a thread's current device, on which it launches work."""

    number = 0

    def set(self, device: torch.device | int) -> None:
        self.number = device if isinstance(device, int) else device.index or 0


_current = _Current()


class OnDevice(Tensor):
    """A tensor that claims to be on a device, like every result computed from it."""

    number: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in _OF_PROCESSORS, f"{func.__name__}: of a tensor on the device"
        copies = func.__name__ == "copy_"  # takes tensors of both kinds
        for each in _tensors((*args, *kwargs.values())):
            assert copies or isinstance(each, OnDevice) or each.dim() == 0, (
                f"{func.__name__}: a tensor of the processor among those of the device"
            )
            assert not isinstance(each, OnDevice) or each.number == _current.number, (
                f"{func.__name__}: of device {each.number}, but {_current.number} is current"
            )
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for each in _tensors(result if isinstance(result, list | tuple) else [result]):
            if isinstance(each, OnDevice):
                each.number = _current.number
        return plain(result).clone() if func.__name__ == "cpu" else result

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE.type, self.number)


_OF_PROCESSORS = {Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.pin_memory}


def on_device(values: Tensor, where: object = DEVICE) -> Tensor:
    """Mark a tensor as being on a device, by default the current one; shares its memory."""
    made = values.as_subclass(OnDevice)
    number = torch.device(cast("str", where)).index
    made.number = _current.number if number is None else number
    return cast("Tensor", made)


def plain(values: Tensor) -> Tensor:
    """Return the tensor as a plain CPU tensor; shares its memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(Tensor)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Placement(TorchFunctionMode):
    """Places tensors on the device that are created there or moved there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is Tensor.to and any(map(_is_device, (*args[1:2], kwargs.get("device")))):
            where, *rest = (kwargs["device"], *args[1:]) if "device" in kwargs else args[1:]
            rest = [each for each in rest if isinstance(each, torch.dtype)]
            named = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
            moved = args[0].to(*rest, **named) if rest or named else args[0]
            return moved if isinstance(moved, OnDevice) else on_device(moved.clone(), where)
        if _is_device(kwargs.get("device")):
            where = kwargs["device"]
            kwargs["device"] = CPU
            return on_device(func(*args, **kwargs), where)
        if func is torch._has_compatible_shallow_copy_type:
            return False  # `Module.to` then replaces the parameter
        if func is Tensor.pin_memory:
            assert type(args[0]) is Tensor, "pin_memory of a tensor on the device"
            return args[0]
        return func(*args, **kwargs)


def _is_device(where: object) -> bool:
    return isinstance(where, torch.device | str) and torch.device(where).type == DEVICE.type


class StrictBackend:
    """Gloo connections for one kind of tensor, which reject the other kind."""

    def __init__(self, inner: Backend, kind: type[Tensor], abort: Callable[[], None]) -> None:
        self._inner = inner
        self._kind = kind
        self.abort = abort

    def __getattr__(self, name: str) -> Callable[..., Any]:
        collective = getattr(self._inner, name)

        def checked(*arguments: Any) -> Any:
            for each in _tensors(arguments):
                assert type(each) is self._kind, (
                    f"{name}: {type(each).__name__} over connections for {self._kind.__name__}"
                )
            return collective(*map(_without_device, arguments))

        return checked


def _without_device(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_without_device(each) for each in argument]
    return plain(argument) if isinstance(argument, Tensor) else argument


_MEMORY: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 8,
    "mem_get_info": lambda _=None: (1 << 31, 1 << 31),
    "reset_peak_memory_stats": lambda _: None,
    "max_memory_allocated": lambda _: 1 << 20,
    "memory_reserved": lambda _: 0,
    "synchronize": lambda _=None: None,
    "set_device": _current.set,
    "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=4),
}
"""torch's report of eight empty devices."""


def install() -> None:
    """Make this process's groups reject mixing of device and CPU tensors."""
    gloo = backend.gloo_backend

    def of_processor(store: Store, spec: GroupSpec) -> Backend:
        inner = gloo(store, spec)
        return cast("Backend", StrictBackend(inner, Tensor, inner.abort))

    def of_device(store: Store, spec: GroupSpec, device: torch.device) -> Backend:
        assert _is_device(device)
        inner = Connections(store, "device", spec, CPU)
        return cast("Backend", StrictBackend(inner.backend, OnDevice, inner.disconnect))

    backend.gloo_backend = of_processor
    backend.nccl_backend = of_device
    # NCCL detects a lost member by itself; gloo behind these connections can miss it.
    Connections.is_watched = property(lambda _: True)  # type: ignore[method-assign,assignment]
    _Placement().__enter__()  # type: ignore[no-untyped-call]
    run = threading.Thread.run

    def run_with_placement(thread: threading.Thread) -> None:
        with _Placement():
            run(thread)

    threading.Thread.run = run_with_placement  # type: ignore[assignment]
    for name, answer in _MEMORY.items():
        setattr(torch.cuda, name, answer)


def replace_processors() -> None:
    """Make this process's engines and workers use the device, whatever their settings.

    Features that need a CPU stay on the CPU.
    """
    for module in (encoding, in_process, worker):
        setattr(module, "take_device", _take_device)  # noqa: B010


def _take_device(config: EngineConfig, rank: int = 0) -> torch.device:
    quantized = config.model.quantization or config.scheduler.speculative_model_quantization
    stays = config.executor.batch_invariant or quantized in ("int4", "int8")
    model = replace(config.model, device="cpu" if stays else "cuda")
    return loading.take_device(replace(config, model=model), rank)
