"""Spans of a rank's work on its device's clock, over the steps that are traced as well.

Shared by the workloads pipeline, experts, context and tensor: what they measure is held against
theory, and against the attribution of the same steps.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import chopper
from chopper.hardware.measure import wait
from chopper.models.architectures import Architecture
from chopper.workloads.llama import Block, initial_value, rotary_table
from chopper.workloads.ranks import Progress

_P = ParamSpec("_P")
_T = TypeVar("_T")

WARMUP = 2
TRACED = 6


def mesh_of_all(device: torch.device, dimension: str) -> DeviceMesh:
    """Return all ranks as a mesh of one dimension: a recording finds its name while it is held."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(dimension,))


def window(steps: int) -> tuple[int, int]:
    """Return the steps to trace and to measure: the first, and the one after the last."""
    return min(WARMUP, steps - 1), min(WARMUP + TRACED, steps)


def recorded(output: Path | None, steps: int) -> chopper.Profile:
    """Return a recording whose traced steps are those that a `Timeline` measures."""
    # What activations take of memory, as it grows in a traced step, looks like the trace's own.
    return chopper.profile(output, steps=window(steps), trace_limit=8)


class Timeline:
    """Durations of named spans, step by step: by the host's clock on CPUs, else by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, Any] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._steps: list[dict[str, list[tuple[Any, Any]]]] = []

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, name: str) -> None:
        """Begin a span on the current stream."""
        self._open[name] = self._now()

    def end(self, name: str) -> None:
        """End a span."""
        self._spans[name].append((self._open.pop(name), self._now()))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block."""
        self.begin(name)
        yield
        self.end(name)

    def timed(self, name: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return the same function with each call timed."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.span(name):
                return function(*args, **kwargs)

        return call

    def run(
        self, step: Callable[[], _T], steps: int, prof: chopper.Profile | None = None
    ) -> list[_T]:
        """Run the steps, keep the spans of those in `window`, and return what each returned."""
        first, end = window(steps)
        results = []
        progress = Progress(steps, "step")
        for number in range(steps):
            self._spans = defaultdict(list)
            with self.span("step"):
                results.append(step())
            if prof is not None:
                prof.step()
            progress.advance()
            if first <= number < end:
                self._steps.append(self._spans)
        wait(self._device)
        return results

    def _durations_ns(self, name: str) -> list[list[float]]:
        return [
            [
                end - begin if isinstance(begin, int) else begin.elapsed_time(end) * 1e6
                for begin, end in spans.get(name, ())
            ]
            for spans in self._steps
        ]

    def per_step_ns(self, *names: str) -> float:
        """Return the time of all spans of these names per step, in ns: the mean over steps."""
        return sum(sum(map(sum, self._durations_ns(name))) for name in names) / len(self._steps)

    def each_ns(self, name: str) -> float | None:
        """Return the median duration of a single span in ns; None where there are none."""
        durations_ns = [ns for spans in self._durations_ns(name) for ns in spans]
        return statistics.median(durations_ns) if durations_ns else None

    def share(self, *names: str) -> float:
        """Return the share of the steps' time that spans of these names have."""
        return self.per_step_ns(*names) / self.per_step_ns("step")


class Stack(nn.Module):
    """Blocks of a Llama model between hidden states: [batch, sequence, width] -> the same."""

    def __init__(self, config: Architecture, layers: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in layers})

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks, one after the other."""
        cos, sin = rotary_table(self.config, x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.layers.values():
            x = block(x, cos, sin)
        return x


def filled(
    module: nn.Module,
    config: Architecture,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give a module of the meta device its storage, and each weight its value by its name."""
    module.to_empty(device=device)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(initial_value(name, weight.shape, config, seed=seed, device=device))
    module.to(dtype)


def stack(
    config: Architecture,
    layers: Sequence[int],
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Stack:
    """Return the blocks of these layers, the same ones however a model is cut."""
    with torch.device("meta"):
        blocks = Stack(config, layers)
    filled(blocks, config, seed=seed, device=device, dtype=dtype)
    return blocks
