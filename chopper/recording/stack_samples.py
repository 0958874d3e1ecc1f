"""Samples of the traced thread's Python stack: table ``python_sample``.

Kineto's own stacks record every call and slow a program several times. A sample a few milliseconds
apart tells which function of the program had the time between operators, and costs about a
hundredth of it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import itertools
import operator
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from chopper.storage import clock

_PERIOD_S = (0.0005, 0.004)
"""Shortest and longest time between samples, which are a sixteenth of the step before."""
_PER_STEP = 16
_MOST = 100_000
_OWN = str(Path(__file__).parents[1])
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], _OWN)
_MODULE_CALL = "torch/nn/modules/module.py"
_IMPORT = "<frozen importlib"
_MAKES_DATA = re.compile(
    r"(?!\w*(log|metric|report|plot|save|write|model|state|config))"
    r"((get|next|load|read|fetch|sample|draw|make|build|prepare|collate)_?\w*"
    r"(batch|data|sample|example|item|record|shard)"
    r"|collate|tokenize|augment|preprocess|(load|read|fetch|tokens)$)"
)
"""A function that makes a batch, by its name."""
_GIVES_FROM_OTHERS = {("queue.py", "get"), ("queues.py", "get"), ("_base.py", "result")}
"""What waits for another thread or process to give something: file and function."""
_FOR_ITER = dis.opmap["FOR_ITER"]
_ITERATES = {"__next__", "__iter__", "__getitem__", "__getitems__"}


_Row = tuple[int, int, str | None, int | None, str | None, bool, int | None]
"""A row of the table ``python_sample``."""


class StackSampler:
    """Samples the stack of the thread that begins it, in a thread of its own."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._ident = self._tid = 0
        self._loop: dict[int, CodeType] = {}
        self._rows: list[_Row] = []
        self._began_s: float | None = None
        self._period_s, _ = _PERIOD_S
        self._switch_s: float | None = None

    def begin(self) -> None:
        """Sample this thread from here on."""
        self._over = threading.Event()
        self._ident, self._tid, self._rows = threading.get_ident(), threading.get_native_id(), []
        self._began_s, (self._period_s, _) = None, _PERIOD_S
        self.step_ended()
        # A thread that asks for the interpreter gets it after 5 ms else: later than short Python
        # functions end.
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _PERIOD_S[0] / 2))
        threading.Thread(target=self._run, args=(self._over,), name="chopper", daemon=True).start()

    def end(self) -> None:
        """Sample no longer. Idempotent."""
        self._over.set()
        if self._switch_s is not None:
            sys.setswitchinterval(self._switch_s)
            self._switch_s = None

    def step_ended(self) -> None:
        """Note the frames of this thread: those that stay are the training loop's.

        What the step took says how often to sample the next one.
        """
        now_s = time.monotonic()
        if self._began_s is not None:
            shortest_s, longest_s = _PERIOD_S
            self._period_s = min(max((now_s - self._began_s) / _PER_STEP, shortest_s), longest_s)
        self._began_s = now_s
        frame: FrameType | None = sys._getframe()
        self._loop = {}
        while frame is not None:
            self._loop[id(frame)] = frame.f_code
            frame = frame.f_back

    def take_rows(self) -> list[_Row]:
        """Return the rows of ``python_sample`` since ``begin``."""
        rows, self._rows = self._rows, []
        return rows

    def _run(self, over: threading.Event) -> None:
        try:
            file = open(f"/proc/self/task/{self._tid}/schedstat", "rb", buffering=0)  # noqa: PTH123, SIM115
        except OSError:
            file = None
        with contextlib.nullcontext() if file is None else file:
            while not over.wait(self._period_s) and len(self._rows) < _MOST:
                frames = _stack_of(self._ident)
                if not frames or over.is_set():
                    return
                # The thread goes on once a system call lets it: its frames are read before.
                now_ns, position = clock.now_ns(), self._locate(frames)
                del frames  # their locals, tensors among them, live no longer than without samples
                try:
                    counts = b"" if file is None else os.pread(file.fileno(), 128, 0)
                except ProcessLookupError:  # the thread has ended
                    return
                delay_ns = int(counts.split()[1]) if counts else None
                self._rows.append((now_ns, self._tid, *position, delay_ns))

    def _locate(
        self, frames: Sequence[FrameType]
    ) -> tuple[str | None, int | None, str | None, bool]:
        """Return the program's function, its line, the library it called, and if for data.

        Args:
            frames: of a stack, the innermost first.
        """
        function, line, library = None, None, None
        is_data = of_loop = False
        for frame, caller in itertools.zip_longest(frames, frames[1:]):
            code = frame.f_code
            name, is_program = _named(code)
            if function is None and is_program:
                function, line = name, frame.f_lineno
                of_loop = self._loop.get(id(frame)) is code
            elif function is None and not code.co_filename.startswith(_OWN):
                library = name
            if self._loop.get(id(frame)) is not code:
                outer = caller.f_code.co_name if caller is not None else ""
                gives_data = (
                    _is_data(code)
                    or self._feeds_loop(frame, caller)
                    or (caller is not None and _gives_from_others(code, caller.f_code))
                )
                # What a module's call or an import does is no data by the names that it uses.
                is_own_work = code.co_filename.endswith(_MODULE_CALL)
                is_own_work |= code.co_filename.startswith(_IMPORT)
                is_data = not is_own_work and (
                    is_data or (gives_data and outer not in ("__enter__", "__exit__"))
                )
        # What a library's loader does is not what the loop around it does.
        return None if of_loop and is_data else function, line, library, is_data

    def _feeds_loop(self, frame: FrameType, caller: FrameType | None) -> bool:
        """Return whether a generator is what the training loop iterates over.

        One that ``max`` or ``sum`` consumes there is not, and neither is one within a callback.
        """
        code = frame.f_code
        if not code.co_flags & inspect.CO_GENERATOR or caller is None or _is_own(code):
            return False
        if self._loop.get(id(caller)) is not caller.f_code:
            return False
        return code.co_name != "<genexpr>" or caller.f_code.co_code[caller.f_lasti] == _FOR_ITER


def _stack_of(ident: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; none of a thread that has ended.

    Python makes frame objects when they are asked for. Up to Python 3.11 that can start a garbage
    collection, whose finalizers may let the thread go on; a frame that it leaves meanwhile is then
    read after it was freed (a segmentation fault). So all are made at once, in calls of C that let
    no other thread run, with the collector off.
    """
    every: Iterable[Any] = itertools.starmap(sys._current_frames, ((),))
    names: Iterable[Any] = itertools.chain(
        map(dict.get, every, (ident,)), itertools.repeat("f_back")
    )
    outwards = itertools.accumulate(names, getattr)
    read: Callable[[], Any] = functools.partial(list, itertools.takewhile(_IS_FRAME, outwards))
    calls = [gc.disable, read, gc.enable] if gc.isenabled() else [read]
    frames: list[FrameType] = [*map(operator.call, calls)][len(calls) // 2]
    return frames


_IS_FRAME = functools.partial(operator.is_not, None)


@functools.lru_cache(maxsize=4096)
def _is_data(code: CodeType) -> bool:
    """Return whether the code iterates or makes a batch, by its name."""
    name = code.co_name
    return not _is_own(code) and (name in _ITERATES or bool(_MAKES_DATA.match(name)))


@functools.lru_cache(maxsize=4096)
def _gives_from_others(code: CodeType, caller: CodeType) -> bool:
    """Return whether the program itself waits here for what another thread or process gives."""
    place = Path(code.co_filename).name, code.co_name
    return place in _GIVES_FROM_OTHERS and _named(caller)[1]


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN)


@functools.lru_cache(maxsize=4096)
def _named(code: CodeType) -> tuple[str, bool]:
    """Return a function as torch writes it in a trace, and whether it is the program's own."""
    path = code.co_filename
    is_program = (
        not path.startswith(_LIBRARIES)
        and "-packages/" not in path
        and (path[:1] != "<" or path.startswith("<ipython"))
    )
    entry = max((e for e in sys.path if e and path.startswith(f"{e}/")), key=len, default="")
    return f"{path[len(entry) :].lstrip('/')}({code.co_firstlineno}): {code.co_name}", is_program
