"""Watch the program's optimizers step, and its backward passes end.

These are the ends of steps, when the program marks none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from chopper.recording.hook.early import ImportWatch
from chopper.recording.trainers import Wrapper

_CREATE_GRAPH = 3
"""Position of this argument of autograd's engine."""


class _Scaled(threading.local):
    """Calls of ``GradScaler.step`` that this thread is inside of."""

    def __init__(self) -> None:
        self.stepped: list[int | None] = []
        """For each, the optimizer that stepped within it."""


class StepHook:
    """A global hook of optimizers that may be removed while it runs.

    torch iterates over its dictionary of hooks itself: when a hook removes itself and the program
    has another one behind it, the program's step ends with an error.
    """

    def __init__(self, register: Callable[[Any], Any], call: Callable[[Any], None]) -> None:
        self._call: Callable[[Any], None] | None = call
        self._running = 0

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            if self._call is not None:
                self._running += 1
                try:
                    self._call(optimizer)
                finally:
                    self._running -= 1

        # torch.compile calls it, as it is, between its graphs.
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._handle = register(hook)

    def remove(self) -> None:
        """Call nothing from here on. While it runs, the hook itself stays. Idempotent."""
        self._call = None
        if not self._running:
            self._handle.remove()


class BackwardWatch:
    """Sees the outermost backward passes of every thread, ``torch.autograd.grad`` among them.

    Those that make a graph of their own (``create_graph``) are mostly a part of the forward pass,
    as with a gradient penalty; ``torch.func.grad`` has no others.

    Args:
        before: called before each of them.
        around: makes the block that each of them runs in, unless it makes a graph.
        after: called after each that raised nothing, with whether it made a graph.
    """

    _latest: BackwardWatch | None = None
    """The watch that began last, while it watches."""

    def __init__(
        self,
        before: Callable[[], None] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        after: Callable[[bool], None] | None = None,
    ) -> None:
        self._before = before
        self._around = around
        self._after = after
        self._wrapper: Wrapper | None = None

    def begin(self) -> None:
        """Watch. torch must be imported."""
        import torch

        self._graph_task = torch._C._current_graph_task_id
        if hasattr(torch.autograd, "_engine_run_backward"):
            self._wrapper = Wrapper(torch.autograd, "_engine_run_backward", self._run_backward)
            BackwardWatch._latest = self

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # outputs, their gradients, retain_graph, create_graph, ...
        makes_graph = len(args) > _CREATE_GRAPH and bool(args[_CREATE_GRAPH])
        if self._graph_task() != -1 or (makes_graph and _is_inner_gradient()):
            return original(*args, **kwargs)
        if self._before is not None:
            self._before()
        with contextlib.nullcontext() if makes_graph else self._around():
            result = original(*args, **kwargs)
        # What was called before may have put another watch in the place of this one, below
        # or above a wrapper of the program: its name in torch says nothing about the order.
        watch = self if self._wrapper is not None else BackwardWatch._latest
        if watch is not None and watch._after is not None:
            watch._after(makes_graph)
        return result

    def remove(self) -> None:
        """Watch no longer. Idempotent."""
        wrapper, self._wrapper = self._wrapper, None
        if BackwardWatch._latest is self:
            BackwardWatch._latest = None
        if wrapper is not None:
            wrapper.end()


def _is_inner_gradient() -> bool:
    """Return whether ``torch.func`` differentiates within a function that it differentiates."""
    from torch._C import _functorch

    levels = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    return levels.count(_functorch.TransformType.Grad) > 1


def optimizer_was_made() -> bool:
    """Return whether the program made an optimizer of torch, which marks the class at its first."""
    from torch.optim.optimizer import Optimizer

    kinds: list[Any] = [Optimizer]
    while kinds:
        kind = kinds.pop()
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False


class OptimizerWatch:
    """Sees every step of an optimizer of torch, also those that a gradient scaler skips.

    ``GradScaler.step(optimizer)`` leaves ``optimizer.step()`` out when gradients overflowed. The
    program's step ended there all the same, so a call of the one counts as the other. A scaler
    that does not come from ``torch.amp.GradScaler`` is not seen.

    Args:
        stepped: called with the id of an optimizer, after each of its steps.
        in_backward: makes the block that each backward pass runs in.
        in_step: makes the block that a step runs in of a gradient scaler, or of an object that
            wraps an optimizer.
        backward: called after each backward pass, with whether it made a graph.
        dropped: called with the id of an optimizer that stepped, when it is no more.
    """

    def __init__(
        self,
        stepped: Callable[[int], None],
        in_backward: Callable[[], AbstractContextManager[Any]],
        in_step: Callable[[], AbstractContextManager[Any]],
        backward: Callable[[bool], None],
        dropped: Callable[[int], None],
    ) -> None:
        self._stepped = stepped
        self._dropped = dropped
        self._in_step = in_step
        self._note_backward = backward
        self._backward = BackwardWatch(around=in_backward, after=self._backward_ended)
        self._wrappers: dict[Any, Wrapper] = {}
        """Methods ``step`` of what wraps an optimizer, themselves and as they are wrapped."""
        self._running: dict[int, list[Wrapper]] = {}
        """Thread → those of them that it is inside of."""
        self.trained_ids: set[int] = set()
        """``id`` of each parameter of the optimizers that stepped."""
        self._known: dict[int, Any] = {}
        """Those optimizers, by id."""
        self._kinds: dict[Any, int] = {}
        """Class and shapes of parameters → number, from 1."""
        self._kind_of: dict[int | None, int] = {}
        """The same by the optimizer's id."""
        self._groups: dict[int, int] = {}
        """Optimizer → number of its groups of parameters at its last step."""
        self._handle: StepHook | None = None
        self._scaler: Wrapper | None = None
        self._finder: ImportWatch | None = None
        self._scaled = _Scaled()
        self._of_scaled: dict[int, int] = {}
        """Optimizer that a scaler was given → the optimizer that stepped for it."""
        self.saw_torch = False

    def begin(self) -> None:
        """Watch; from its import on, where torch is not imported yet."""
        self._finder = ImportWatch("torch", self._begin)
        self._finder.begin()

    def _begin(self) -> None:
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.saw_torch = True
        self._finder = None
        self._handle = StepHook(register_optimizer_step_post_hook, self._after_step)
        self._scaler = Wrapper(GradScaler, "step", self._scaled_step)
        self._backward.begin()

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.end()
        self._backward.remove()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        for wrapper in self._wrappers.values():
            wrapper.end()
        scaler, self._scaler = self._scaler, None
        if scaler is not None:
            scaler.end()

    def kind_of(self, optimizer_id: int | None) -> int:
        """Return 1 for the optimizer that stepped first and its like, 2 for the next kind …

        Those of one class whose parameters have the same shapes are alike.
        """
        return self._kind_of.get(optimizer_id, 1)

    def _after_step(self, optimizer: Any) -> None:
        if self._scaled.stepped:
            self._scaled.stepped[-1] = id(optimizer)
        is_new = id(optimizer) not in self._known
        if is_new:
            self._known[id(optimizer)] = None
            with contextlib.suppress(Exception):  # the program's objects may be of any kind
                self._watch_wrappers(optimizer)
            with contextlib.suppress(TypeError):  # a class without weak references
                forget = functools.partial(self._forget, id(optimizer))
                self._known[id(optimizer)] = weakref.ref(optimizer, forget)
        try:
            groups = optimizer.param_groups
            if len(groups) != self._groups.get(id(optimizer)):  # add_param_group adds one
                self._groups[id(optimizer)] = len(groups)
                trained = [p for group in groups for p in group["params"]]
                self.trained_ids.update(id(p) for p in trained)
                if is_new:  # one that gets further parameters stays of its kind
                    like = (type(optimizer), tuple(tuple(p.shape) for p in trained))
                    kind = self._kinds.setdefault(like, len(self._kinds) + 1)
                    self._kind_of[id(optimizer)] = kind
        except Exception:  # noqa: BLE001 - an optimizer may have groups of any kind
            self._groups[id(optimizer)] = 0
        self._stepped(id(optimizer))

    def _watch_wrappers(self, optimizer: Any) -> None:
        """Find what wraps this optimizer, from the methods ``step`` that are calling it.

        From the next call on they are wrapped. Such objects need not derive from torch's optimizer
        (Accelerate, Opacus, Apex, own schedules): they show its groups, or hold it and no model.
        """
        from torch.nn import Module

        frame, inner = sys._getframe(), optimizer
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            code = frame.f_code
            if code.co_name != "step" or not code.co_argcount:
                continue
            owner = frame.f_locals.get(code.co_varnames[0])
            method = inspect.getattr_static(type(owner), "step", None)
            if owner is inner or isinstance(owner, Module) or not isinstance(method, FunctionType):
                continue
            attributes = getattr(owner, "__dict__", {})
            holds = any(value is inner for value in attributes.values())
            if hasattr(owner, "param_groups") or (
                holds and not any(isinstance(value, Module) for value in attributes.values())
            ):
                inner = owner
                # A scheduler of torch gives the object a method of its own.
                holder = owner if isinstance(attributes.get("step"), FunctionType) else None
                self._wrap(holder or next(k for k in type(owner).__mro__ if "step" in vars(k)))

    def _wrap(self, holder: Any) -> None:
        method = vars(holder)["step"]
        if method not in self._wrappers:
            wrapper = Wrapper(holder, "step", lambda *args, **kw: self._step(wrapper, *args, **kw))
            self._wrappers[method] = self._wrappers[wrapper.wrapper] = wrapper

    def _step(self, wrapper: Wrapper, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        running = self._running.setdefault(threading.get_ident(), [])
        running.append(wrapper)
        try:
            with self._in_step():
                return original(*args, **kwargs)
        finally:
            running.pop()

    def _backward_ended(self, makes_graph: bool) -> None:
        # What runs backward in its step trains: it is no mere optimizer.
        for wrapper in self._running.get(threading.get_ident(), ()):
            wrapper.end()
        self._note_backward(makes_graph)

    def _forget(self, optimizer_id: int, _reference: Any) -> None:
        self._known.pop(optimizer_id, None)
        self._groups.pop(optimizer_id, None)
        self._dropped(optimizer_id)

    def _scaled_step(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._scaled.stepped.append(None)
        with self._in_step():
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                inner = self._scaled.stepped.pop()
            if inner is not None:
                self._of_scaled[id(optimizer)] = inner
            elif self._scaler is not None:
                self._stepped(self._of_scaled.get(id(optimizer), id(optimizer)))
        return result
