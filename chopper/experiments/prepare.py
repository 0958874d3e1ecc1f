"""Look a reference workload up, check that it can run here as asked, and start its ranks.

A workload is a module of the folder ``workloads/`` that assigns WORKLOAD. ``prepare`` refuses what
cannot work, in one line each, before anything is written or started; ``Launch.run`` starts the
ranks and returns when none of them is left.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import chopper.workloads
from chopper.errors import ChopperError, UsageError
from chopper.experiments.results import Program
from chopper.fresh_python import own_python
from chopper.limits import usable_cores, usable_memory_bytes
from chopper.quantities import one_of
from chopper.recording.claim import LAUNCHED_VARIABLE, OUTPUT_VARIABLE, STACKS_VARIABLE

if TYPE_CHECKING:
    from chopper.experiments.declarations import Needs, Option, Variant, Workload

_MARK = "\nWORKLOAD = "


class WorkloadUnavailable(ChopperError):
    """The workload cannot run on this machine as asked; the message says what would."""


@cache
def program(name: str) -> Program | None:
    """Load a workload's declaration and functions; None where there is none of this name."""
    if not name.isidentifier() or not any(
        _declares(folder / f"{name}.py") for folder in _folders()
    ):
        return None
    module = importlib.import_module(f"chopper.workloads.{name}")
    optional = {name: getattr(module, name, None) for name in ("headlines", "fits", "model")}
    return Program(workload=module.WORKLOAD, needs=module.needs, **optional)


@cache
def workloads() -> dict[str, Workload]:
    """All workloads by name, in the order of their positions."""
    files = (file for folder in _folders() for file in sorted(folder.glob("*.py")))
    programs = (program(file.stem) for file in files if _declares(file))
    listed = sorted((p.workload for p in programs if p), key=lambda w: (w.position, w.name))
    return {workload.name: workload for workload in listed}


def _folders() -> list[Path]:
    return [Path(folder) for folder in chopper.workloads.__path__]


def _declares(file: Path) -> bool:
    """Read, not imported: the modules beside the workloads load torch."""
    return file.is_file() and _MARK in file.read_text(encoding="utf-8")


def find(name: str) -> Workload:
    """Look a workload up by name; UsageError where there is none."""
    declared = program(name) or program(one_of("workload", name, workloads()))
    assert declared is not None
    return declared.workload


def options_of(name: str) -> tuple[Option, ...]:
    """Options of a workload that are the user's to set behind ``--``."""
    return tuple(option for option in find(name).options if not option.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A workload that is ready to start."""

    workload: Workload
    ranks: int

    device: str

    words: tuple[str, ...]

    options: dict[str, Any]

    variants: tuple[Variant, ...]

    repeats: int

    notes: tuple[str, ...]
    """Automatic choices with their reasons, for the user to know before it starts."""

    stacks: bool = False

    chosen: frozenset[str] = frozenset()
    """Options that the workload chose."""

    @property
    def name(self) -> str:
        """Name of the workload."""
        return self.workload.name

    def command(self, variant: Variant | None = None) -> list[str]:
        """Command that starts the ranks, or the process that starts them."""
        module = (variant and variant.module) or self.workload.module
        words = [*self.words]
        if variant is not None:
            variant_words = ["--variant", variant.name] if variant.words is None else variant.words
            words = [*variant_words, *words]  # the user's come last, and win
        started = (str(os.getpid()), str(self.ranks), module, *words)
        return own_python("chopper.workloads.processes", *started)

    @property
    def expected_s(self) -> float | None:
        """About how long all of it takes; None when the size is not the default one."""
        workload = self.workload
        declared = {o.name: o.default for o in options_of(self.name)}
        changed = any(
            declared[k] != v
            for k, v in self.options.items()
            if k in declared and k not in self.chosen
        )
        if changed or self.ranks != workload.ranks or self.device != "cpu":
            return None
        of_all = sum(v.default and not v.needs_gpu for v in workload.variants) or 1
        share = (len(self.variants) or 1) / of_all * self.repeats / workload.repeats
        return workload.seconds * share

    def run(self, output: Path, variant: Variant | None = None) -> int:
        """Run it to its end, recorded into ``output``, and return its exit code."""
        from chopper.experiments.launch import launch

        env = dict(os.environ)
        # Each rank would take all cores. The user's own number stands.
        env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.ranks)))
        env[OUTPUT_VARIABLE] = str(output.resolve())
        env[LAUNCHED_VARIABLE] = "1"
        if self.stacks:
            env[STACKS_VARIABLE] = "1"
        return launch(self.command(variant), env=env, hold_interrupts=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def prepare(
    name: str,
    *,
    ranks: int | None = None,
    steps: int | None = None,
    options: Sequence[str] = (),
    variants: str | None = None,
    repeats: int | None = None,
    stacks: bool = False,
) -> Launch:
    """Check a workload's options and this machine, and choose defaults.

    Args:
        name: of a workload.
        ranks: by default one per GPU, or the workload's own number without GPUs.
        steps: the workload's own number by default.
        options: the workload's command line.
        variants: names, comma-separated, or ``all``; those that run by default otherwise.
        repeats: the workload's own number by default.
        stacks: trace Python's call stacks, too.

    Raises:
        UsageError: no such workload, or options that it does not have.
        WorkloadUnavailable: the machine lacks a package, GPUs, memory or the data type.
    """
    workload = find(name)
    _check_counts(workload, ranks, repeats)
    words = _words(workload, steps, options)
    requested = _asked_variants(workload, variants, words)
    parsed = workload.parse(words, parser=_Parser)
    _require_torch(workload)
    # What a workload needs depends on which of its variants run.
    parsed.variants = tuple(variant.name for variant in requested)
    ranks, device, notes, needs = _settle(workload, ranks, parsed)
    absent = dict(needs.absent)
    if device == "cpu":
        absent |= {v.name: "needs a GPU, none is used here" for v in requested if v.needs_gpu}
    present, left_out = _present(workload, requested, absent)
    return Launch(
        workload=workload,
        ranks=ranks,
        device=device,
        words=(*words, "--device", device),  # the last one counts
        options={
            key: value if isinstance(value, str | int | float) or value is None else str(value)
            for key, value in sorted((vars(parsed) | {**needs.chosen}).items())
            if key not in ("output", "device", "variant", "variants", "ranks", "channel")
        },
        variants=present,
        repeats=repeats or workload.repeats,
        notes=(*notes, *left_out),
        stacks=stacks,
        chosen=frozenset(needs.chosen),
    )


def _check_counts(workload: Workload, ranks: int | None, repeats: int | None) -> None:
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: a run needs at least one rank")
    if repeats is not None and repeats < 1:
        raise UsageError(f"--repeats {repeats}: each variant runs at least once")
    if repeats is not None and not workload.experiment:
        raise UsageError(
            f"--repeats: {workload.name} is recorded once; it has no variants to compare"
        )


def _words(workload: Workload, steps: int | None, options: Sequence[str]) -> list[str]:
    if any(word in ("-o", "--output") or word.startswith("--output=") for word in options):
        raise UsageError("--output: name the run's directory with -o, before the --")
    if steps is None:
        return [*options]
    if all(option.name != "steps" for option in workload.options):
        name = workload.name
        raise UsageError(
            f"--steps: {name} has no steps; see its options: chopper bench {name} --help"
        )
    if any(word == "--steps" or word.startswith("--steps=") for word in options):
        raise UsageError("--steps is given twice, before and after the --: give it once")
    return [*options, "--steps", str(steps)]


def _asked_variants(
    workload: Workload, requested: str | None, words: Sequence[str]
) -> tuple[Variant, ...]:
    """The variants to run, in the order of their declaration, the baseline first."""
    if not workload.variants:
        if requested is not None:
            raise UsageError(f"--variants: {workload.name} has no variants")
        return ()
    if any(word == "--variant" or word.startswith("--variant=") for word in words):
        raise UsageError("--variant: name those to run with --variants, before the --")
    if requested is None:
        return tuple(v for v in workload.variants if v.default)
    if requested == "all":
        return workload.variants
    known = [v.name for v in workload.variants]
    kind = f"variant of {workload.name}"
    names = {one_of(kind, part, known) for part in requested.strip(", ").split(",")}
    return tuple(v for v in workload.variants if v.name in names)


def _require_torch(workload: Workload) -> None:
    if importlib.util.find_spec("torch") is None:
        raise WorkloadUnavailable(
            f"{workload.name}: needs PyTorch, which is not installed: pip install torch"
        )
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as exc:  # OSError: of a library that it loads itself
        raise WorkloadUnavailable(
            f"{workload.name}: needs PyTorch, which is installed and cannot be imported ({exc}): "
            "install it again"
        ) from exc


def _present(
    workload: Workload, variants: tuple[Variant, ...], absent: Mapping[str, str]
) -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    """The variants that can run here, and a note for each reason that others cannot."""
    variants_by_reason: dict[str, list[str]] = {}
    for variant in variants:
        if variant.name in absent:
            variants_by_reason.setdefault(absent[variant.name], []).append(variant.name)
    reasons = [f"{', '.join(names)}: {why}" for why, names in variants_by_reason.items()]
    present = tuple(v for v in variants if v.name not in absent)
    if reasons and not present:
        raise WorkloadUnavailable(f"{workload.name} {'; '.join(reasons)}")
    return present, tuple(f"left out: {reason}" for reason in reasons)


def _settle(
    workload: Workload, ranks: int | None, options: argparse.Namespace
) -> tuple[int, str, list[str], Needs]:
    """Choose ranks and device, with notes and what they need; raise when the machine lacks it."""
    import torch

    from chopper.workloads.ranks import choose_device, dtype_problem

    notes = []
    if ranks is None:
        gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
        ranks = (workload.ranks if workload.ranks == 1 else gpus) or workload.ranks
        why = "one per GPU" if gpus and ranks == gpus > 1 else "the workload's default on CPUs"
        if workload.ranks > 1:
            notes.append(f"{ranks} ranks ({why}); --ranks sets another number")
    try:
        device, why = choose_device(options.device, local_ranks=ranks)
    except ValueError as exc:
        raise WorkloadUnavailable(str(exc)) from exc
    if options.device == "auto":
        notes.append(f"on {'GPUs' if device == 'cuda' else 'the CPU'}: {why}")
    problem = dtype_problem(device, getattr(options, "dtype", None) or "float32")
    if problem is not None:
        raise WorkloadUnavailable(problem)
    cores = usable_cores()
    if device == "cpu" and ranks > cores:
        notes.append(
            f"warning: {ranks} ranks share {cores} cores: they will wait for each other, and the "
            "run will show that instead of the workload"
        )
    of_workload = program(workload.name)
    assert of_workload is not None
    try:
        needs = of_workload.needs(options, ranks, device)
    except ValueError as exc:
        raise WorkloadUnavailable(f"{workload.name}: {exc}") from exc
    _require_memory(needs, ranks, device)
    return ranks, device, [*notes, *needs.notes], needs


def _require_memory(needs: Needs, ranks: int, device: str) -> None:
    import torch

    needed_bytes = needs.memory_bytes
    if device == "cpu":
        needed_bytes, usable_bytes = ranks * needed_bytes, usable_memory_bytes()
        where = "one rank here" if ranks == 1 else f"{ranks} ranks here"
    else:
        memories = (torch.cuda.get_device_properties(i).total_memory for i in range(ranks))
        usable_bytes, where = min(memories), "each GPU"
    if needed_bytes > usable_bytes:
        raise WorkloadUnavailable(
            f"{needs.what} needs about {needed_bytes / 1e9:.0f} GB, {where} can have "
            f"{usable_bytes / 1e9:.0f} GB: {needs.remedy}"
        )
