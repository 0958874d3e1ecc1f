"""Where the program's optimizers step: the ends of steps, when the program marks none."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class _Scaled(threading.local):
    """Calls of ``GradScaler.step`` that this thread is inside of."""

    def __init__(self) -> None:
        self.stepped: list[int | None] = []
        """For each, the optimizer that stepped within it."""


class OptimizerWatch:
    """Sees every step of an optimizer of torch, also those that a gradient scaler skips.

    ``GradScaler.step(optimizer)`` leaves ``optimizer.step()`` out when gradients overflowed. The
    program's step ended there all the same, so a call of the one counts as the other. A scaler
    that does not come from ``torch.amp.GradScaler`` is not seen.

    Args:
        stepped: called with the id of an optimizer, after each of its steps.
    """

    def __init__(self, stepped: Callable[[int], None]) -> None:
        self._stepped = stepped
        self._handle: Any = None
        self._scaler: tuple[Any, Any, Any] | None = None
        self._finder: _ImportWatch | None = None
        self._scaled = _Scaled()
        self._of_scaled: dict[int, int] = {}
        """What a scaler was given → the optimizer that stepped for it."""
        self.saw_torch = False

    def begin(self) -> None:
        """Watch; from its import on, where torch is not imported yet."""
        if "torch" in sys.modules:
            self._begin()
        else:
            self._finder = _ImportWatch("torch", self._begin)
            sys.meta_path.insert(0, self._finder)

    def _begin(self) -> None:
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.saw_torch = True
        self._finder = None
        self._handle = register_optimizer_step_post_hook(self._after_step)
        original = GradScaler.step
        wrapped = self._wrap(original)
        self._scaler = (GradScaler, original, wrapped)
        GradScaler.step = wrapped  # type: ignore[method-assign]

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        finder, self._finder = self._finder, None
        if finder is not None:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(finder)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        scaler, self._scaler = self._scaler, None
        if scaler is not None:
            kind, original, wrapped = scaler
            # Somebody may have wrapped it once more: then it stays, and only passes on.
            if kind.step is wrapped:
                kind.step = original

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self._scaled.stepped:
            self._scaled.stepped[-1] = id(optimizer)
        self._stepped(id(optimizer))

    def _wrap(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._scaler is None:
                return original(scaler, optimizer, *args, **kwargs)
            self._scaled.stepped.append(None)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                inner = self._scaled.stepped.pop()
            if inner is not None:
                self._of_scaled[id(optimizer)] = inner
            elif self._scaler is not None:
                self._stepped(self._of_scaled.get(id(optimizer), id(optimizer)))
            return result

        return step


class _ImportWatch:
    """A finder that calls ``then`` once a module was imported, which it leaves to the others."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:  # noqa: ARG002
        if name != self._name:
            return None
        from importlib.util import find_spec

        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec

        def exec_module(module: object) -> None:
            del loader.exec_module
            loader.exec_module(module)
            # The profiler never changes the program.
            with contextlib.suppress(Exception):
                self._then()

        loader.exec_module = exec_module
        return spec
