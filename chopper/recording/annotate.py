"""Names for what a trace shows: layers, recomputation, forward passes, garbage collection.

Nothing is asked of the user. Calls of modules are watched only while a trace is taken, and emit one
span each:

``chopper::layer::<fqn>``      a module's forward
``chopper::recompute::<fqn>``  the same within backward: activation checkpointing
``chopper::forward``           the outermost module's forward (a phase), when gradients are recorded
``chopper::phase::<name>``     a phase that the program or its trainer names; where they name none,
                             ``evaluation`` or ``inference`` around an outermost forward without
                             gradients, and ``evaluation`` around one in eval mode with them
``chopper::gc::<generation>``  Python's garbage collector at work

``<fqn>`` is the name in the root module's ``named_modules``, without what wrappers insert; the
root itself goes by its class. Backward has no module hooks that leave autograd's graph alone, so
each call's range of autograd sequence numbers is kept instead (table ``layer_sequence``): a
backward node carries the number that its forward took. The phases backward and optimizer need no
annotation: ``autograd::engine::evaluate_function`` and ``Optimizer.step#`` spans are torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from chopper.recording.hook.early import ImportWatch
from chopper.recording.optimizers import optimizer_was_made

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import torch

LAYER_PREFIX = "chopper::layer::"
RECOMPUTE_PREFIX = "chopper::recompute::"
FORWARD = "chopper::forward"
GC_PREFIX = "chopper::gc::"
DATA = "chopper::data"
PHASE_PREFIX = "chopper::phase::"

_CALLS_BETWEEN_CHECKS = 256
_WRAPPER_PARTS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))
_WRAPPERS_WITH_MODULE = frozenset(("DistributedDataParallel", "DataParallel"))


_Call = tuple[Any, Any, tuple[Any, ...], str, bool, int, int]
"""Module, span, phases, layer, recomputation, sequence number and time at its begin."""
_Row = tuple[str, bool, int, int, int, int, int]
"""A row of the table ``layer_sequence``."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Call] = []
        self.tid = threading.get_native_id()


class _Names:
    """A module's names, made once."""

    __slots__ = ("forward", "layer", "module", "recompute", "trained")

    def __init__(self, module: torch.nn.Module, layer: str) -> None:
        # Ids are reused: the weak reference tells whether this is still the module of this id.
        self.module = weakref.ref(module)
        self.layer = layer
        self.forward = LAYER_PREFIX + layer
        self.recompute = RECOMPUTE_PREFIX + layer
        self.trained = False
        """True once one of its parameters was seen to be trained."""


def strip_wrappers(name: str) -> str:
    """Drop what FSDP, activation checkpointing and torch.compile insert into a module's name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def module_names(root: torch.nn.Module) -> dict[int, str]:
    """Names of all modules under ``root`` by id: as in ``named_modules``, without wrappers."""
    names: dict[int, str] = {}
    within: list[str] = []  # names of DDP-like wrappers, whose child is called `module`
    root_class = _class_name(_unwrap(root))
    for name, module in named_submodules(root):
        unwrapped = name
        for wrapper in within:
            inner = f"{wrapper}.module" if wrapper else "module"
            if name == inner or name.startswith(inner + "."):
                unwrapped = (wrapper + name[len(inner) :]).lstrip(".")
        if type(module).__name__ in _WRAPPERS_WITH_MODULE:
            within.append(name)
        names[id(module)] = strip_wrappers(unwrapped) or root_class
    return names


def _class_name(module: torch.nn.Module) -> str:
    """The module's class as the program wrote it: ``fully_shard`` makes it one of its own."""
    kind = type(module)
    wrote = kind.__name__.removeprefix("FSDP")
    return wrote if any(base.__name__ == wrote for base in kind.__bases__) else kind.__name__


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module that wrappers wrap."""
    while True:
        children = {part: child for part, child in module._modules.items() if child is not None}
        inner = next((children[part] for part in children if part in _WRAPPER_PARTS), None)
        if inner is None and type(module).__name__ in _WRAPPERS_WITH_MODULE:
            inner = children.get("module")
        if inner is None:
            return module
        module = inner


class Annotator:
    """Emits layer spans and keeps sequence ranges between ``install`` and ``remove``.

    It takes part in nothing else, lets no error of its own out, and is absent when no trace is
    taken, since watching costs every call of a module some time.

    Args:
        on_call: called before each outermost forward, and some others, with the number of outermost
            ones so far. It may end the trace.
        on_failure: called with the error when annotating failed; it is over by then.
        current_phase: returns the phase that this thread is in by name, None for none.
        trained_ids: ``id`` of each parameter that an optimizer of torch stepped, as it grows.
    """

    def __init__(
        self,
        on_call: Callable[[int], None] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        current_phase: Callable[[], str | None] = lambda: None,
        trained_ids: Collection[int] = (),
    ) -> None:
        self._on_call = on_call
        self._on_failure = on_failure
        self._current_phase = current_phase
        self._trained_ids = trained_ids
        self._last_phase: str | None = None
        """Phase of the last outermost forward; None for training."""
        self._names: dict[int, _Names] = {}
        self._roots: set[str] = set()
        self._has_main_root = False
        self._threads = _Thread()
        self._watch: ModuleCalls | None = None
        self._gc_span: Any = None
        self._rows: list[_Row] = []
        self._root_calls = 0
        self.calls = 0
        """Calls of modules so far."""

    def install(self) -> None:
        """Watch the calls of modules. Idempotent."""
        if self._watch is not None:
            return
        import torch
        from torch._C._profiler import _RecordFunctionFast
        from torch.autograd.profiler import record_function

        self._span = _RecordFunctionFast
        self._phase: Any = record_function
        self._records_gradients = torch.is_grad_enabled
        self._graph_task = torch._C._current_graph_task_id
        self._sequence_nr = torch._C._autograd._get_sequence_nr
        self._now = time.time_ns
        self._watch = ModuleCalls(self.enter, self.leave)
        self._root_calls = 0
        gc.callbacks.append(self._on_gc)

    def remove(self) -> None:
        """Watch no longer. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()
            gc.callbacks.remove(self._on_gc)
        while self._threads.stack:  # within a forward: what is open here ends with the trace
            self._end_innermost()
        self._threads = _Thread()
        self._gc_span = None

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self.remove()
        if self._on_failure is not None:
            self._on_failure(error)

    def take_rows(self) -> list[_Row]:
        """Return the rows of ``layer_sequence`` since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def enter(self, module: torch.nn.Module) -> bool:
        """Begin the spans of a call; returns whether ``leave`` is to end them."""
        try:
            self._begin(module)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            self._failed(exc)
        return self._watch is not None

    def _begin(self, module: torch.nn.Module) -> None:
        stack = self._threads.stack
        in_backward = self._graph_task() != -1
        names = self._names.get(id(module))
        if names is None or names.module() is not module:
            names = self._name(module, in_backward)
        phases: tuple[Any, ...] = ()
        self.calls += 1
        outermost = not stack and not in_backward
        self._root_calls += outermost
        if (
            self._on_call is not None
            and not in_backward
            and (outermost or not self.calls % _CALLS_BETWEEN_CHECKS)
        ):
            self._on_call(self._root_calls)
            if self._watch is None:  # it ended the trace
                return
        if outermost:
            phases = tuple(self._phase(name) for name in self._root_phases(module, names))
            for phase in phases:
                phase.__enter__()
        span = self._span(names.recompute if in_backward else names.forward)
        stack.append(
            (module, span, phases, names.layer, in_backward, self._sequence_nr(), self._now())
        )
        span.__enter__()

    def _root_phases(self, module: torch.nn.Module, names: _Names) -> tuple[str, ...]:
        """Names of the spans around an outermost forward, outermost first.

        Analysis takes a forward in eval mode for training where backward goes through it.
        """
        named = self._current_phase() is not None
        with_gradients = self._records_gradients()
        if with_gradients and module.training and (self._last_phase is None or _has_own(module)):
            self._last_phase = None
            names.trained = True
            return (FORWARD,)
        if named:
            return (FORWARD,) if with_gradients else ()
        if _has_own(module):
            evaluates = with_gradients or (not module.training and self._is_trained(module, names))
            self._last_phase = "evaluation" if evaluates else "inference"
        # A loss is of the phase of the model before it.
        phase = PHASE_PREFIX + (self._last_phase or "inference")
        return (phase, FORWARD) if with_gradients else (phase,)

    def _is_trained(self, module: torch.nn.Module, names: _Names) -> bool:
        """Return whether a module is trained; a target network or a teacher is not."""
        if names.trained:
            return True
        if not self._trained_ids:
            trainable = any(parameter.requires_grad for parameter in parameters(module))
            return trainable and optimizer_was_made()
        names.trained = any(id(parameter) in self._trained_ids for parameter in parameters(module))
        return names.trained

    def leave(self, module: torch.nn.Module) -> None:
        """End the spans of a call, if they are open still."""
        try:
            self._end(module)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            self._failed(exc)

    def _end(self, module: torch.nn.Module) -> None:
        threads = self._threads
        if not any(entry[0] is module for entry in reversed(threads.stack)):
            return  # of an earlier trace
        while True:
            called, _, _, layer, recompute, low, start_ns = self._end_innermost()
            high = self._sequence_nr()
            if high > low:
                self._rows.append((layer, recompute, threads.tid, low, high, start_ns, self._now()))
            if called is module:
                return

    def _end_innermost(self) -> _Call:
        call = self._threads.stack.pop()
        _, span, phases, *_ = call
        span.__exit__(None, None, None)
        for phase in reversed(phases):
            phase.__exit__(None, None, None)
        return call

    def _name(self, module: torch.nn.Module, in_backward: bool) -> _Names:
        """Name a module that was not seen before, and all modules below it."""
        kind = _class_name(module)
        stack = self._threads.stack
        if stack:  # made during the forward of its parent
            names = {id(module): f"{stack[-1][3]}.{kind}"}
        elif in_backward:
            names = {id(module): kind}
        else:
            names = module_names(module)
            # The first root that has layers keeps the names that its state_dict has.
            if len(names) == 1 or self._has_main_root:
                root = names[id(module)]
                prefix = root
                count = 1
                while prefix in self._roots:
                    count += 1
                    prefix = f"{root}#{count}"
                self._roots.add(prefix)
                names = {
                    key: prefix if name == root else f"{prefix}.{name}"
                    for key, name in names.items()
                }
            else:
                self._has_main_root = True
                self._roots.add(names[id(module)])
        for _, part in named_submodules(module):
            if id(part) in names:
                self._names[id(part)] = _Names(part, names[id(part)])
        return self._names[id(module)]

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_span = self._span(f"{GC_PREFIX}{info['generation']}")
            self._gc_span.__enter__()
        elif self._gc_span is not None:
            self._gc_span.__exit__(None, None, None)
            self._gc_span = None


def _has_own(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters: a model has, most losses have none."""
    return next(parameters(module), None) is not None


# A program may override `parameters` and `named_modules` in any way: they are not called here.


def named_submodules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield what torch's ``named_modules`` would, whatever the program made of that method."""
    visited_ids: set[int] = set()
    pending = [("", root)]
    while pending:
        name, module = pending.pop()
        if id(module) in visited_ids:
            continue
        visited_ids.add(id(module))
        yield name, module
        children = [
            (f"{name}.{part}" if name else part, child)
            for part, child in module._modules.items()
            if child is not None
        ]
        pending.extend(reversed(children))


def parameters(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield what torch's ``parameters`` would, whatever the program made of that method."""
    for _, module in named_submodules(root):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class ModuleCalls:
    """Sees the calls of all modules; torch.compile compiles the same graphs as without it.

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
