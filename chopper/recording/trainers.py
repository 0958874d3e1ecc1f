"""Phases of programs that name none: functions of known trainers, and modules in eval mode.

The functions are listed in ``trainers.json`` by the module that defines them. What a version of a
library lacks is left alone.

A function is redirected by exchanging its code: it stays the object that it is, so that it can be
pickled, and what was imported by name before the recording is seen.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import json
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from chopper.recording.hook.early import ImportWatch
from chopper.recording.phases import compiling
from chopper.storage import clock

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

_NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of what only begins when it is called."""
_MICRO_STEP = "micro-step"
"""Stands in ``trainers.json`` for a function that is no phase: it begins the backward pass of
a micro-step."""

_within = threading.local()
"""Whether a thread is within a micro-step: one trainer's may call another's."""

redirected: dict[int, Callable[..., Any]] = {}
"""Number of a function with exchanged code → function that it calls."""
_numbers = itertools.count()


class Redirection:
    """A function that calls something else while redirected; its signature and source stay."""

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self.own_code = function.__code__
        self.original = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, function.__closure__
        )
        """Does what the function did; takes all arguments, as it has no defaults."""
        self._number = next(_numbers)
        self._code = _code_that_calls(self._number, function.__code__)

    @classmethod
    def of(cls, function: FunctionType) -> Redirection:
        """Return the one of this function, as it is now."""
        known = _redirections.get(function)
        if known is None or function.__code__ not in (known.own_code, known._code):
            known = _redirections[function] = cls(function)
        return known

    def begin(self, call: Callable[..., Any]) -> None:
        """Have the function call this, with all of its arguments."""
        function = self._function()
        redirected[self._number] = call
        if function is not None:
            function.__code__ = self._code

    def end(self) -> None:
        """Give the function its own code, unless somebody has exchanged it since. Idempotent."""
        function = self._function()
        redirected[self._number] = self.original  # for copies of the code, and calls that run
        if function is not None and function.__code__ is self._code:
            function.__code__ = self.own_code


_redirections: weakref.WeakKeyDictionary[FunctionType, Redirection] = weakref.WeakKeyDictionary()
"""Made once for each function; what a thread has read of its code goes on working."""


def _code_that_calls(number: int, own: CodeType) -> CodeType:
    """Code with the parameters, the place and the number of cells of a function's own."""
    names = iter(own.co_varnames)
    positional = [next(names) for _ in range(own.co_argcount)]
    keywords = [next(names) for _ in range(own.co_kwonlyargcount)]
    several = next(names) if own.co_flags & inspect.CO_VARARGS else ""
    named = next(names) if own.co_flags & inspect.CO_VARKEYWORDS else ""
    parameters = positional.copy()
    if own.co_posonlyargcount:
        parameters.insert(own.co_posonlyargcount, "/")
    if several or keywords:
        parameters.append(f"*{several}")
    arguments = [*positional, *([f"*{several}"] if several else [])]
    arguments += [f"{name}={name}" for name in keywords]
    last = [f"**{named}"] if named else []
    # A name that is read after the return is a variable of the function around it.
    tree = ast.parse(
        f"def cells({', '.join(own.co_freevars)}):\n"
        f" def function({', '.join(parameters + keywords + last)}):\n"
        f"  from {__name__} import redirected as _chopper_redirected\n"
        f"  return _chopper_redirected[{number}]({', '.join(arguments + last)})\n"
        f"  ({', '.join(own.co_freevars)})\n"
    )
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            vars(node).update(
                lineno=own.co_firstlineno,
                end_lineno=own.co_firstlineno,
                col_offset=0,
                end_col_offset=0,
            )
    code = compile(tree, own.co_filename, "exec", dont_inherit=True)
    for _ in range(2):
        code = next(part for part in code.co_consts if isinstance(part, CodeType))
    return code.replace(co_name=own.co_name, co_qualname=own.co_qualname)


class TrainerPhases:
    """Names the phases that trainers are in, from the import of their modules on.

    A redirected function passes on whatever it is called with, returns and raises.

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
        self._redirections: list[Redirection] = []

    def begin(self) -> None:
        """Redirect what is imported; watch the imports of the rest."""
        text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
        for module, phases in json.loads(text).items():
            redirect = functools.partial(self._redirect_module, module, phases)
            self._watches.append(ImportWatch(module, redirect))
            self._watches[-1].begin()

    def end(self) -> None:
        """Give all functions their own code. Idempotent."""
        self._phase = None
        for watch in self._watches:
            watch.end()
        self._watches = []
        for redirection in self._redirections:
            redirection.end()
        self._redirections = []

    def _redirect_module(self, module: str, phases: dict[str, str]) -> None:
        for path, phase in phases.items():
            *classes, attribute = path.split(".")
            owner: Any = sys.modules[module]
            for part in classes:
                owner = vars(owner).get(part)
            function = None if owner is None else vars(owner).get(attribute)
            if not isinstance(function, FunctionType) or self._phase is None:
                continue
            if not function.__code__.co_flags & _NO_FUNCTION:
                redirection = Redirection.of(function)
                redirection.begin(functools.partial(self._call, redirection.original, phase))
                self._redirections.append(redirection)

    def _call(self, original: FunctionType, phase: str, /, *args: Any, **kwargs: Any) -> Any:
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
        self._eval: Redirection | None = None
        self._train: Redirection | None = None
        self._watch: ImportWatch | None = None
        self._begun: list[tuple[weakref.ref[torch.nn.Module], int, int]] = []
        """Modules in eval mode, the thread that put them there, and when."""
        self._has_trained = False

    def begin(self) -> None:
        """Watch; from its import on, where torch is not imported yet."""
        self._watch = ImportWatch("torch", self._begin)
        self._watch.begin()

    def _begin(self) -> None:
        from torch.nn import Module

        to_eval, to_train = vars(Module).get("eval"), vars(Module).get("train")
        if isinstance(to_eval, FunctionType) and isinstance(to_train, FunctionType):
            self._eval, self._train = Redirection.of(to_eval), Redirection.of(to_train)
            self._eval.begin(self._eval_called)

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        self.trained()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        if self._eval is not None:
            self._eval.end()

    def trained(self) -> None:
        """Note that a backward pass ended or an optimizer stepped: what began is no evaluation."""
        self._has_trained = True
        if self._begun:
            self._begun = []
            assert self._train is not None
            self._train.end()

    def _eval_called(self, module: torch.nn.Module) -> Any:
        assert self._eval is not None
        if compiling():
            return self._eval.original(module)
        start_ns, was_training = clock.now_ns(), getattr(module, "training", False)
        result = self._eval.original(module)
        with contextlib.suppress(Exception):  # the profiler never changes the program
            if self._has_trained and was_training and not self._named():
                entry = (weakref.ref(module), threading.get_native_id(), start_ns)
                self._begun = [*self._begun, entry]
                assert self._train is not None
                # It calls itself for each module of a model: only meanwhile is it redirected.
                self._train.begin(self._train_called)
        return result

    def _train_called(self, module: torch.nn.Module, mode: Any) -> Any:
        assert self._train is not None
        if compiling():
            return self._train.original(module, mode)
        with contextlib.suppress(Exception):
            for reference, tid, start_ns in self._begun if mode else ():
                evaluated = reference()
                if evaluated is not None and (evaluated is module or evaluated.training):
                    self.trained()
                    self._record(tid, start_ns, clock.now_ns())
                    break
        return self._train.original(module, mode)
