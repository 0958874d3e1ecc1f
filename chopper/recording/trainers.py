"""Phases of programs that name none: functions of known trainers, and modules in eval mode.

The functions are listed in ``trainers.json`` by the modules in which callers look them up. What a
version of a library lacks is left alone. No code object of the program is touched: methods are
wrapped in their class, and functions that a program may hold under another name are watched by
``sys.monitoring`` (Python 3.12).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from chopper.recording.hook.early import ImportWatch
from chopper.recording.logs import compiling
from chopper.storage import clock

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

_NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code that only begins when it is called."""
_MICRO_STEP = "micro-step"
"""Stands in ``trainers.json`` for a function that is no phase: it begins the backward pass of
a micro-step."""

_within = threading.local()
"""Whether a thread is within a micro-step: one trainer's may call another's."""


class Wrapper:
    """An attribute of a class, module or object that calls something else.

    Args:
        call: called with the original and with all arguments.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self.original: Any = vars(owner)[name]
        self.call: Callable[..., Any] | None = call
        original = self.original

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self.call
            return original(*args, **kwargs) if call is None else call(original, *args, **kwargs)

        self.wrapper = wrapper
        self._replace(original, wrapper)

    def end(self) -> None:
        """Put the original back. Idempotent.

        If somebody has wrapped it once more, it stays, and calls the original.
        """
        self.call = None
        self._replace(self.wrapper, self.original)

    def _replace(self, old: Any, new: Any) -> None:
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is old:
            setattr(owner, self._name, new)
            # DeepSpeed's pipelines take methods from a table of the class.
            tables = [t for t in vars(owner).values() if isinstance(t, dict)]
            for table in tables if isinstance(owner, type) else ():
                for key in [key for key, value in table.items() if value is old]:
                    table[key] = new


class _Monitor:
    """Enters a block with each call of some functions, by ``sys.monitoring`` (Python 3.12).

    For functions that programs import by name: one that is wrapped would not be seen by the names
    that were taken before, and could not be pickled by them.
    """

    def __init__(self) -> None:
        self._monitoring: Any = getattr(sys, "monitoring", None)
        self._tool: int | None = None
        self._blocks: dict[CodeType, AbstractContextManager[Any]] = {}

    def add(self, function: FunctionType, block: AbstractContextManager[Any]) -> bool:
        """Watch a function below its decorators; return False if Python cannot."""
        if self._tool is None and not self._begin():
            return False
        code, events = inspect.unwrap(function).__code__, self._monitoring.events
        self._blocks.setdefault(code, block)
        wanted = events.PY_START | events.PY_RETURN
        self._monitoring.set_local_events(self._tool, code, wanted)
        return True

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        self._blocks = {}
        tool, self._tool = self._tool, None
        if tool is not None:
            self._monitoring.set_events(tool, 0)
            self._monitoring.free_tool_id(tool)

    def _begin(self) -> bool:
        # Numbers that no kind of tool has by convention.
        free = [n for n in (3, 4) if self._monitoring and self._monitoring.get_tool(n) is None]
        if not free:
            return False
        self._tool, events = free[0], self._monitoring.events
        self._monitoring.use_tool_id(self._tool, "chopper")
        for event in (events.PY_START, events.PY_RETURN, events.PY_UNWIND):
            call = self._enter if event == events.PY_START else self._leave
            self._monitoring.register_callback(self._tool, event, call)
        self._monitoring.set_events(self._tool, events.PY_UNWIND)  # of no single function
        return True

    def _enter(self, code: CodeType, _offset: int) -> None:
        if code in self._blocks:
            self._blocks[code].__enter__()

    def _leave(self, code: CodeType, _offset: int, _result: Any) -> None:
        if code in self._blocks:
            self._blocks[code].__exit__(None, None, None)


class TrainerPhases:
    """Names the phases that trainers are in, from the import of their modules on.

    A wrapped function passes on whatever it is called with, returns and raises.

    Args:
        phase: returns the block of a phase.
        micro_step: called where the backward pass of a micro-step begins.
    """

    def __init__(
        self,
        phase: Callable[[str], AbstractContextManager[Any]],
        micro_step: Callable[[], None],
    ) -> None:
        self._phase: Callable[[str], AbstractContextManager[Any]] | None = phase
        self._note_micro_step = micro_step
        self._watches: list[ImportWatch] = []
        self._wrappers: list[Wrapper] = []
        self._monitor = _Monitor()
        self.unseen: list[str] = []
        """Functions whose calls are not seen: see ``_Monitor``."""

    def begin(self) -> None:
        """Watch the trainers that are imported, and the imports of the others."""
        text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
        for module, phases in json.loads(text).items():
            watch = functools.partial(self._watch_module, module, phases)
            self._watches.append(ImportWatch(module, watch))
            self._watches[-1].begin()

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        self._phase = None
        for watch in self._watches:
            watch.end()
        for wrapper in self._wrappers:
            wrapper.end()
        self._watches, self._wrappers = [], []
        self._monitor.end()

    def _watch_module(self, module: str, phases: dict[str, str]) -> None:
        for path, phase in phases.items():
            *classes, name = path.split(".")
            owner: Any = sys.modules[module]
            for part in classes:
                owner = vars(owner).get(part)
            function = None if owner is None else vars(owner).get(name)
            if not isinstance(function, FunctionType) or self._phase is None:
                continue
            if inspect.unwrap(function).__code__.co_flags & _NO_FUNCTION:
                continue
            # A function that its own module or another one of the library looks up as a global.
            if classes or name.startswith("_") or function.__module__ != module:
                call = functools.partial(self._call, phase)
                self._wrappers.append(Wrapper(owner, name, call))
            elif not self._monitor.add(function, self._phase(phase)):
                self.unseen.append(f"{module}.{name}")

    def _call(self, phase: str, original: FunctionType, /, *args: Any, **kwargs: Any) -> Any:
        begin = self._phase
        if phase == _MICRO_STEP:
            return self._micro_step(original, *args, **kwargs)
        with contextlib.nullcontext() if begin is None else begin(phase):
            return original(*args, **kwargs)

    def _micro_step(self, original: FunctionType, /, *args: Any, **kwargs: Any) -> Any:
        if self._phase is None or getattr(_within, "micro_step", False) or compiling():
            return original(*args, **kwargs)
        _within.micro_step = True
        try:
            self._note_micro_step()
            return original(*args, **kwargs)
        finally:
            _within.micro_step = False


class Evaluations:
    """Takes the time from ``module.eval()`` to ``module.train()`` for an evaluation.

    Not where a backward pass ended or an optimizer stepped meanwhile: then the module was trained
    in eval mode, or another one was. A module that never returns to train mode (a teacher, a target
    network, a copy) is in no evaluation. Nor is anything before the first training: models are
    loaded in eval mode. Costs a step nothing: hooks of forwards would.

    Args:
        record: called with thread, start and end of each evaluation.
        named: whether the running code is in a phase that is named otherwise.
    """

    def __init__(self, record: Callable[[int, int, int], None], named: Callable[[], bool]) -> None:
        self._record = record
        self._named = named
        self._watch = ImportWatch("torch", self._begin)
        self._eval: Wrapper | None = None
        self._train: Wrapper | None = None
        self._begun: list[tuple[weakref.ref[torch.nn.Module], int, int]] = []
        """Modules in eval mode, the thread that put them there, and when."""
        self._has_trained = False

    def begin(self) -> None:
        """Watch; from its import on, where torch is not imported yet."""
        self._watch.begin()

    def _begin(self) -> None:
        from torch.nn import Module

        self._eval = Wrapper(Module, "eval", self._eval_called)

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        self.trained()
        self._watch.end()
        if self._eval is not None:
            self._eval.end()

    def trained(self) -> None:
        """Note that a backward pass ended or an optimizer stepped: the open block is training."""
        self._has_trained = True
        self._begun = []
        train, self._train = self._train, None
        if train is not None:
            train.end()

    def _eval_called(self, original: Any, module: torch.nn.Module) -> Any:
        if compiling():
            return original(module)
        start_ns, was_training = clock.now_ns(), getattr(module, "training", False)
        result = original(module)
        with contextlib.suppress(Exception):  # the profiler never changes the program
            if self._has_trained and was_training and not self._named():
                entry = (weakref.ref(module), threading.get_native_id(), start_ns)
                self._begun = [*self._begun, entry]
                # It calls itself for each module of a model: only meanwhile is it wrapped.
                if self._train is None:
                    from torch.nn import Module

                    self._train = Wrapper(Module, "train", self._train_called)
        return result

    def _train_called(self, original: Any, module: torch.nn.Module, mode: Any = True) -> Any:
        if not compiling():
            with contextlib.suppress(Exception):
                for reference, tid, start_ns in self._begun if mode else ():
                    evaluated = reference()
                    if evaluated is not None and (evaluated is module or evaluated.training):
                        self.trained()
                        self._record(tid, start_ns, clock.now_ns())
                        break
        return original(module, mode)
