"""Base class of the model's modules: `torch.nn.Module` with cheaper calls and attribute access.

`torch.nn.Module` checks eight kinds of hooks at every call, and looks up parameters, buffers and
submodules only after all other attributes.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

Rows = Callable[[Tensor], Tensor]
"""Maps [rows, in] to [rows, out]: a module, or a function without weights."""


class Module(nn.Module):
    """A module for inference that runs forward hooks only if there are any.

    A call is `forward` itself until a module of the class gets a hook or is compiled; from then on
    all modules of the class are called as in torch. Global hooks are detected when a whole model is
    called (a class with `finds_hooks`).

    All tensors are buffers: nothing is trained, and operators are slower on parameters.
    """

    has_hooks: ClassVar[bool] = False
    """Whether a call can do more than `forward`."""
    _classes: ClassVar[list[type["Module"]]] = []

    def __init_subclass__(cls, *, finds_hooks: bool = False) -> None:
        super().__init_subclass__()
        cls._classes.append(cls)
        if not finds_hooks:
            cls.__call__ = cls.forward  # type: ignore[method-assign]

    @classmethod
    def _run_hooks(cls) -> None:
        cls.has_hooks = True
        cls.__call__ = nn.Module.__call__  # type: ignore[method-assign]

    @property
    def is_hooked(self) -> bool:
        """Whether a call runs anything besides `forward`."""
        own = self.__dict__
        return bool(
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or "_compiled_call_impl" in own
        )

    def __call__(self, *arguments: Any) -> Any:
        """Call `forward`, with hooks and compiled code if there are any."""
        if _global_forward_hooks or _global_forward_pre_hooks:
            for each in self._classes:
                each._run_hooks()
        return super().__call__(*arguments)

    def register_forward_hook(self, *arguments: Any, **options: Any) -> RemovableHandle:
        """Register a forward hook, as in torch."""
        self._run_hooks()
        return super().register_forward_hook(*arguments, **options)

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> RemovableHandle:
        """Register a forward pre-hook, as in torch."""
        self._run_hooks()
        return super().register_forward_pre_hook(*arguments, **options)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile `forward`, as in torch."""
        self._run_hooks()
        super().compile(*arguments, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # on this instance only
            self._run_hooks()
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer, as in torch."""
        super().register_buffer(name, tensor, persistent)
        self.__dict__[name] = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__.update(self._parameters)
        self.__dict__.update(self._buffers)
        return self

    def add_to(self, sums: Tensor, *arguments: Any) -> Tensor:
        """Return sums [rows, out] plus the result of `forward`; may overwrite `sums`.

        Overridden by modules that can fuse the addition.
        """
        return sums.add_(self.forward(*arguments))

    def extra_repr(self) -> str:
        """Return the shapes and dtypes of the module's own tensors."""
        own = {**self._parameters, **self._buffers}
        return ", ".join(
            f"{name}: {str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
            for name, each in own.items()
            if each is not None
        )


def add_to(sums: Tensor, function: Rows, *arguments: Any) -> Tensor:
    """Return sums [rows, out] plus the function's result; may overwrite `sums`.

    Hooks of the function see only its result.
    """
    if isinstance(function, Module) and not (function.has_hooks and function.is_hooked):
        return function.add_to(sums, *arguments)
    return sums.add_(function(*arguments))


def weight_of(tensor: Tensor) -> Tensor:
    """Return a tensor as a buffer sharing its memory; assigning it to a module registers it."""
    return nn.Buffer(tensor)
