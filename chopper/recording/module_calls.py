"""The calls of torch's modules, seen without the program noticing, and the modules' parameters.

What a program overrides (``parameters``, ``named_modules``) may take and return anything, so it is
not called here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from chopper.recording.hook.early import ImportWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def named_submodules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield what torch's ``named_modules`` would, whatever the program made of that method."""
    seen: set[int] = set()
    left = [("", root)]
    while left:
        name, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        children = [
            (f"{name}.{part}" if name else part, child)
            for part, child in module._modules.items()
            if child is not None
        ]
        left.extend(reversed(children))


def parameters(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield what torch's ``parameters`` would, whatever the program made of that method."""
    for _, module in named_submodules(root):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class ModuleCalls:
    """Sees the calls of all modules, and has torch.compile compile what it would have anyhow.

    Global module hooks would be seen by the compiler: it traces them, warns of them, and compiles
    anew when they come or go. So ``Module.__call__`` is wrapped, and is torch's own again while
    something is compiled.

    Args:
        enter: called with a module before its forward; returns whether ``leave`` is to follow.
        leave: called with the module when its forward ended, however it did. Neither may raise.
    """

    def __init__(
        self, enter: Callable[[torch.nn.Module], bool], leave: Callable[[torch.nn.Module], None]
    ) -> None:
        import torch

        self._module_class: Any = torch.nn.Module
        self._functions: tuple[Any, Any] = (enter, leave)
        self._active = True
        self._original = original = self._module_class.__call__
        is_compiling = torch.compiler.is_compiling

        watch = self

        @functools.wraps(original)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            # torch's tracer of Python reads the module from the variable of this name.
            if is_compiling() or not watch._active or not enter(self):
                return original(self, *args, **kwargs)
            try:
                return original(self, *args, **kwargs)
            finally:
                leave(self)

        self._call: Any = call
        # The compiler keeps the method that it meets when it is imported.
        self._compiler = ImportWatch("torch._dynamo", self._watch_compiler, self._hide)
        self._compiler.begin()
        self._show()

    def remove(self) -> None:
        """Call nothing from here on. Idempotent."""
        self._active = False
        self._hide()
        self._compiler.end()
        compiler = sys.modules.get("torch._dynamo.callback")
        if compiler is not None:
            with contextlib.suppress(AttributeError, ValueError):  # torch._dynamo.reset()
                compiler.callback_handler.remove_start_callback(self._hide)
                compiler.callback_handler.remove_end_callback(self._show)

    def _hide(self, *_: Any) -> None:
        # Somebody may have wrapped it once more: then it stays, and only passes on.
        if self._module_class.__call__ is self._call:
            self._module_class.__call__ = self._original

    def _show(self, *_: Any) -> None:
        if self._active and self._module_class.__call__ is self._original:
            self._module_class.__call__ = self._call

    def _watch_compiler(self) -> None:
        from torch._dynamo import callback, eval_frame

        self._show()
        callback.callback_handler.register_start_callback(self._hide)
        callback.callback_handler.register_end_callback(self._show)
        # Between its graphs the compiler would compile these, too.
        compiler: Any = eval_frame
        compiler.skip_code(self._call.__code__)
        for function in self._functions:
            code = function.__code__
            try:  # what they call included
                strategy = compiler.FrameExecStrategy(*2 * [compiler.FrameAction.SKIP])
                compiler.set_code_exec_strategy(code, strategy)
            except AttributeError:
                compiler.skip_code(code)
