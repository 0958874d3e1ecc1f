"""An independent witness of a training program, in its own process; shares nothing with chopper.

Python imports this file at its start when this folder is on PYTHONPATH. Each process that imports
torch appends JSON lines to ``$CLIENTS_PROBE/<pid>.jsonl``: one when it begins, one after each step
of an optimizer or, where there is none, after each outermost backward pass, one after each call of
the functions that ``$CLIENTS_TIMED`` names (``module:Class.method``, separated by commas). They
hold wall-clock nanoseconds, a checksum of the parameters, and sums so far: time in forward passes
with and without gradients, in backward passes, in optimizers, and waiting for a DataLoader's batch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from typing import Any

_FIRST_BYTES = 1 << 16
"""Of each parameter, the bytes that the checksum reads."""


class Probe:
    """The sums of one process, and the file that they are written to."""

    def __init__(self, directory: str) -> None:
        self.file = os.open(
            os.path.join(directory, f"{os.getpid()}.jsonl"),  # noqa: PTH118 - light at start
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        )
        self.pid = os.getpid()
        self.sums_ns: dict[str, int] = {}
        self.inside = threading.local()
        """Spans that a thread is inside of, and since when the innermost one runs."""
        self.optimizers: dict[int, int] = {}
        self.timed = [name for name in os.environ.get("CLIENTS_TIMED", "").split(",") if name]
        rank = os.environ.get("RANK")
        self.write(event="begin", rank=None if rank is None else int(rank), argv=sys.argv)

    def write(self, **event: object) -> None:
        if os.getpid() != self.pid:  # a fork, for example a worker of a DataLoader
            return
        # The clock is read last, so what the probe itself does lies before the end of the step.
        line = json.dumps({**event, "sums_ns": self.sums_ns, "t_ns": time.time_ns()})
        os.write(self.file, (line + "\n").encode())

    def enter(self, kind: str) -> None:
        """Begin a span; the one around it stands still until it ends."""
        stack = self.spans()
        now_ns = time.perf_counter_ns()
        if stack:
            # What an optimizer's step does before a forward pass is its closure's, not its own.
            around = "closure" if stack[-1] == "optimizer" else stack[-1]
            self.add(around, now_ns - self.inside.since_ns)
        stack.append(kind)
        self.inside.since_ns = now_ns

    def leave(self) -> None:
        """End the innermost span."""
        now_ns = time.perf_counter_ns()
        self.add(self.spans().pop(), now_ns - self.inside.since_ns)
        self.inside.since_ns = now_ns

    def spans(self) -> list[str]:
        """Return the kinds of the spans that this thread is inside of."""
        if not hasattr(self.inside, "stack"):
            self.inside.stack = []
        stack: list[str] = self.inside.stack
        return stack

    def add(self, kind: str, ns: int) -> None:
        self.sums_ns[kind] = self.sums_ns.get(kind, 0) + ns

    def span(self, kind: str, function: Any) -> Any:
        """Return a function whose calls are spans."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return _look_alike(timed, function)

    def whole(self, name: str, function: Any) -> Any:
        """Return a function whose outermost calls are written down from begin to end."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            inside = self.inside.__dict__.setdefault("whole", set())
            if name in inside:
                return function(*args, **kwargs)
            inside.add(name)
            began_ns = time.time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                inside.discard(name)
                self.write(event="call", name=name, began_ns=began_ns)

        return _look_alike(timed, function)

    def watch(self) -> None:
        """Wrap what torch calls in training."""
        import torch
        from torch.optim import Optimizer
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        # What all ways into a backward pass come down to.
        backward = self.backward(vars(torch.autograd)["_engine_run_backward"])
        wrap_step = Optimizer.profile_hook_step

        def step(function: Any) -> Any:
            """Wrap the step of a class of optimizers, when the first of them is made."""
            self.find_timed()  # Trainers are imported by then.
            return wrap_step(self.step(function))

        for owner, name, replacement in (
            (torch.autograd, "_engine_run_backward", backward),
            (_BaseDataLoaderIter, "__next__", self.span("data", _BaseDataLoaderIter.__next__)),
            (DataLoader, "__iter__", self.span("data", DataLoader.__iter__)),
            (Optimizer, "profile_hook_step", staticmethod(step)),
        ):
            setattr(owner, name, replacement)
        if not os.environ.get("CLIENTS_NO_FORWARD"):
            self.watch_forward(torch)

    def watch_forward(self, torch: Any) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        def enter(module: Any, args: Any) -> None:
            if not torch.compiler.is_compiling():
                kind = "forward" if torch.is_grad_enabled() else "inference"
                # What a checkpoint recomputes belongs to the backward pass.
                self.enter("backward" if "backward" in self.spans() else kind)

        def leave(module: Any, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self.leave()

        register_module_forward_pre_hook(enter)
        register_module_forward_hook(leave, always_call=True)

    def backward(self, function: Any) -> Any:
        spanned = self.span("backward", function)

        def backward(*args: Any, **kwargs: Any) -> Any:
            outermost = "backward" not in self.spans()
            try:
                return spanned(*args, **kwargs)
            finally:
                if outermost and not self.optimizers:
                    self.write(event="backward", peak_kb=peak_kb())

        return backward

    def step(self, function: Any) -> Any:
        """An optimizer's own step, within all hooks that torch calls around it."""
        spanned = self.span("optimizer", function)

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.find_timed()
            index = self.optimizers.setdefault(id(optimizer), len(self.optimizers))
            result = spanned(optimizer, *args, **kwargs)
            crc = checksum(optimizer)
            self.write(event="step", optimizer=index, crc=crc, peak_kb=peak_kb())
            return result

        return _look_alike(step, function)

    def find_timed(self) -> None:
        """Wrap the functions to time, once their modules are there."""
        for entry in [entry for entry in self.timed if entry.split(":")[0] in sys.modules]:
            self.timed.remove(entry)
            module, _, path = entry.partition(":")
            owner_path, _, name = path.rpartition(".")
            owner = sys.modules[module]
            for part in filter(None, owner_path.split(".")):
                owner = getattr(owner, part)
            setattr(owner, name, self.whole(path, getattr(owner, name)))


def _look_alike(function: Any, original: Any) -> Any:
    """Return a function with the name and the signature of another."""
    import functools

    return functools.wraps(original)(function)


def checksum(optimizer: Any) -> int:
    """CRC of the parameters' first bytes, read without an operator of torch."""
    import ctypes

    crc = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            size_bytes = min(_FIRST_BYTES, parameter.numel() * parameter.element_size())
            if size_bytes and parameter.is_contiguous() and parameter.device.type == "cpu":
                crc = zlib.crc32(ctypes.string_at(parameter.data_ptr(), size_bytes), crc)
    return crc


def peak_kb() -> int:
    """Peak resident memory of this process."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


class TorchImport:
    """Leaves the import of torch to the other finders and watches what came of it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            # Libraries ask whether torch is there before they import it.
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            begin()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def begin() -> None:
    """Begin to watch; what fails is said, for a probe that sees nothing proves nothing."""
    try:
        Probe(os.environ["CLIENTS_PROBE"]).watch()
    except Exception as exc:  # noqa: BLE001
        print(f"probe: {type(exc).__name__}: {exc}", file=sys.stderr)


if os.environ.get("CLIENTS_PROBE"):
    sys.meta_path.insert(0, TorchImport())
