"""The reference workloads by name, and how one is started.

``prepare`` refuses what cannot work, in one line each, before anything is written or started;
``Launch.run`` starts the ranks and returns when none of them is left.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from chopper._claim import LAUNCHED_VARIABLE, OUTPUT_VARIABLE
from chopper.errors import ChopperError, UsageError


class WorkloadUnavailable(ChopperError):
    """The workload cannot run on this machine as asked; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the command line has to know of a workload without loading it."""

    module: str
    """Run as ``python -m`` by each rank."""

    summary: str
    """What it shows, in one line."""

    options: str = "chopper.workloads.options"
    """Torch-free module whose ``OPTIONS`` and ``parse`` are the workload's command line."""

    ranks: int = 2
    """Started on a machine without GPUs when the user names no number."""


WORKLOADS: dict[str, Workload] = {
    "fsdp1": Workload(
        module="chopper.workloads.fsdp1",
        summary="Llama training sharded by FullyShardedDataParallel: flat parameters, one "
        "gather per block, limited prefetch",
    ),
    "fsdp2": Workload(
        module="chopper.workloads.fsdp2",
        summary="Llama training sharded by fully_shard: per-weight DTensors, copies in and out "
        "of each gather, deterministic memory",
    ),
}


class OptionInfo(Protocol):
    """One option, as ``chopper.workloads.options.Option`` declares it."""

    @property
    def name(self) -> str:
        """Without the dashes."""

    @property
    def help(self) -> str:
        """What it sets."""

    @property
    def default(self) -> str | int | None:
        """Used when it is not given."""

    @property
    def choices(self) -> tuple[str, ...] | None:
        """All that it may be, or None."""


def options_of(name: str) -> tuple[OptionInfo, ...]:
    """Options of a workload that are the user's to set behind ``--``."""
    declared: tuple[OptionInfo, ...] = importlib.import_module(find(name).options).OPTIONS
    return tuple(option for option in declared if option.name != "output")


def find(name: str) -> Workload:
    """Look a workload up by name.

    Raises:
        UsageError: there is none of this name.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    from difflib import get_close_matches

    close = get_close_matches(name, WORKLOADS, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"{name!r}: no such workload: there are {', '.join(WORKLOADS)}{guess}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A workload that is ready to start."""

    name: str
    ranks: int

    command: tuple[str, ...]
    """Given to torchrun: ranks, module and the module's options."""

    notes: tuple[str, ...]
    """What the user should know before it starts: automatic choices with their reasons."""

    def run(self, output: Path) -> int:
        """Run it to its end, recorded into ``output``, and return its exit code.

        All output of the ranks goes to stderr. Signals are passed on, and no process is left
        behind: see ``chopper._launch.launch``. Must be called from the main thread.
        """
        from chopper._launch import launch

        env = dict(os.environ)
        # Without it, torchrun gives each rank one thread. The user's own number stands.
        env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.ranks)))
        env[OUTPUT_VARIABLE] = str(output.resolve())
        env[LAUNCHED_VARIABLE] = "1"
        agent = [sys.executable, "-m", "chopper._torchrun", str(os.getpid())]
        return launch([*agent, *self.command], env=env)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def prepare(
    name: str, *, ranks: int | None = None, steps: int | None = None, options: Sequence[str] = ()
) -> Launch:
    """Check a workload's options and this machine, and settle what was left open.

    Args:
        name: one of ``WORKLOADS``.
        ranks: processes; by default one per GPU, or the workload's own number without GPUs.
        steps: optimizer steps; the workload's own number by default.
        options: the workload's command line.

    Raises:
        UsageError: no such workload, or options that it does not have.
        WorkloadUnavailable: torch is missing, or the machine has too few GPUs, too little memory,
            or lacks the data type.
    """
    workload = find(name)
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: a run needs at least one rank")
    if any(word == "--output" or word.startswith("--output=") for word in options):
        raise UsageError("--output: name the run's directory with -o, before the --")
    words = [*options]
    if steps is not None:
        if any(word == "--steps" or word.startswith("--steps=") for word in options):
            raise UsageError("--steps is given twice, before and after the --: give it once")
        words += ["--steps", str(steps)]
    parsed = importlib.import_module(workload.options).parse(words, prog=name, parser=_Parser)
    if importlib.util.find_spec("torch") is None:
        raise WorkloadUnavailable(
            f"{name}: needs PyTorch, which is not installed: pip install torch"
        )
    ranks, device, notes = _settle(workload, ranks, parsed)
    words = _without(words, "--device")
    command = (str(ranks), workload.module, *words, "--device", device)
    return Launch(name=name, ranks=ranks, command=command, notes=notes)


def _without(words: Sequence[str], option: str) -> list[str]:
    """Drop an option with one value, which is known to be well formed."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _settle(
    workload: Workload, ranks: int | None, options: argparse.Namespace
) -> tuple[int, str, tuple[str, ...]]:
    """Choose ranks and device; raise when the machine cannot do it."""
    import torch

    from chopper.workloads.llama import SIZES, parameter_count, training_bytes
    from chopper.workloads.machine import choose_device, dtype_problem

    notes = []
    if ranks is None:
        gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
        ranks = gpus or workload.ranks
        why = "one per GPU" if gpus else "the workload's default on CPUs"
        notes.append(f"{ranks} ranks ({why}); --ranks sets another number")
    try:
        device, why = choose_device(options.device, local_ranks=ranks)
    except ValueError as exc:
        raise WorkloadUnavailable(str(exc)) from exc
    if options.device == "auto":
        notes.append(f"on {'GPUs' if device == 'cuda' else 'the CPU'}: {why}")
    problem = dtype_problem(device, options.dtype)
    if problem is not None:
        raise WorkloadUnavailable(problem)
    cores = usable_cores()
    if device == "cpu" and ranks > cores:
        notes.append(
            f"warning: {ranks} ranks share {cores} cores: they will wait for each other, and the "
            "run will show that instead of the workload"
        )

    config = SIZES[options.size]
    needed = training_bytes(
        config,
        ranks=ranks,
        batch=options.batch,
        sequence=options.sequence,
        element_bytes=2 if options.dtype == "bfloat16" else 4,
        checkpoint=options.checkpoint == "full",
    )
    if device == "cpu":
        needed, available, where = ranks * needed, usable_memory_bytes(), f"{ranks} ranks here"
    else:
        available = min(torch.cuda.get_device_properties(i).total_memory for i in range(ranks))
        where = "each GPU"
    if needed > available:
        raise WorkloadUnavailable(
            f"--size {options.size} ({parameter_count(config) / 1e9:.2f} B parameters, batch "
            f"{options.batch}, sequence {options.sequence}) needs about {needed / 1e9:.0f} GB, "
            f"{where} can have {available / 1e9:.0f} GB: take a smaller size, batch or sequence, "
            "or more GPUs"
        )
    return ranks, device, tuple(notes)


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity mask, and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            return max(1, min(cores or 1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no second version of control groups here
    return cores or 1


def usable_memory_bytes() -> int:
    """Memory that can be had without swapping, and within the container's limit."""
    import psutil

    available: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" is no number: no limit
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # File pages count as used, but are given up under pressure.
        return max(0, min(available, limit - used + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):
        return available
