"""The reference workloads by name, and how one is started.

``prepare`` refuses what cannot work, in one line each, before anything is written or started;
``Launch.run`` starts the ranks and returns when none of them is left.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from chopper.errors import ChopperError, UsageError
from chopper.fresh_python import own_python
from chopper.hardware.environment import usable_cores
from chopper.limits import usable_memory_bytes
from chopper.recording.claim import LAUNCHED_VARIABLE, OUTPUT_VARIABLE

if TYPE_CHECKING:
    from chopper.experiments.launch import Output
    from chopper.experiments.results import Exhibit, Experiment, Headline


class WorkloadUnavailable(ChopperError):
    """The workload cannot run on this machine as asked; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way in which a workload can run."""

    name: str
    summary: str
    words: tuple[str, ...] | None = None
    """Added to the workload's options; ``--variant NAME`` by default."""
    module: str | None = None
    """Run instead of the workload's own."""
    needs_gpu: bool = False
    """Left out, with a note, on machines without."""
    default: bool = True
    """Runs when no variants are named; ``--variants all`` runs the others, too."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Columns of a view (``chopper analyze --view``) that are shown of all variants."""

    view: str
    columns: tuple[str, ...]
    where: tuple[str, str] | None = None
    """Only rows with this value in this column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the command line has to know of a workload without loading it."""

    module: str
    """Run as ``python -m`` by each rank."""

    summary: str
    """What it shows, in one line."""

    options: str
    """Name of its options in ``chopper.workloads.options``."""

    check: str
    """``module:function`` that is given the options, the ranks and the kind of device, and returns
    the `Needs` of one rank, or raises ValueError with what the machine lacks."""

    ranks: int = 2
    """Started on a machine without GPUs when the user names no number."""

    starter: str = "chopper.workloads.processes"
    """Starts the ranks, as ``python -m STARTER RANKS MODULE [options]``."""

    measures: bool = False
    """It measures numbers itself (``prof.measure``): what it records is an experiment."""

    variants: tuple[Variant, ...] = ()
    """Run in turn and compared; none: it runs in one way."""

    baseline: str | None = None
    """The variant that the others are compared with."""

    beside: tuple[Beside, ...] = ()
    """What of the variants' views is shown beside each other."""

    repeats: int = 1
    """How often each variant runs unless the user says otherwise."""

    seconds: int
    """About what all of it takes at its default size on two quiet CPU cores."""

    packages: tuple[str, ...] = ()
    """Importable names, besides torch, that it cannot do without."""

    @property
    def experiment(self) -> bool:
        """Whether it is recorded as variants and repetitions beside each other."""
        return self.measures or bool(self.variants)


class Needs(Protocol):
    """What one rank takes, as a workload's ``check`` tells it."""

    @property
    def memory_bytes(self) -> int:
        """At its peak."""

    @property
    def what(self) -> str:
        """The options that decide it, in words."""

    @property
    def remedy(self) -> str:
        """What to do where there is not enough."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before it starts."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Variants that cannot run here as asked, and why."""


_FSDP = ("chopper.workloads.fsdp1", "chopper.workloads.fsdp2")

WORKLOADS: dict[str, Workload] = {
    "fsdp1": Workload(
        module=_FSDP[0],
        summary="Llama training sharded by FullyShardedDataParallel: flat parameters, one "
        "gather per block, limited prefetch",
        options="TRAINING",
        check="chopper.workloads.llama:needs",
        seconds=20,
    ),
    "fsdp2": Workload(
        module=_FSDP[1],
        summary="Llama training sharded by fully_shard: per-weight DTensors, copies in and out "
        "of each gather, deterministic memory",
        options="TRAINING",
        check="chopper.workloads.llama:needs",
        seconds=20,
    ),
    "fsdp": Workload(
        module=_FSDP[0],
        summary="FSDP1 and FSDP2 beside each other: same model, seed and data, the same losses; "
        "what differs in time, memory and its order, clocks and copies",
        options="FSDP",
        check="chopper.workloads.llama:needs",
        variants=(
            Variant(
                name="fsdp1",
                summary="FullyShardedDataParallel, flat parameters",
                words=("--allocations", "yes"),
            ),
            Variant(
                name="fsdp2",
                summary="fully_shard, a DTensor per weight",
                words=("--allocations", "yes"),
                module=_FSDP[1],
            ),
        ),
        baseline="fsdp1",
        beside=(
            Beside(
                "memory",
                ("peak_allocated_bytes", "allocation_count", "requested_bytes"),
                ("phase", "all"),
            ),
            Beside(
                "memory_determinism",
                ("similarity_ratio", "identical_ratio", "peak_mean_bytes", "peak_std_bytes"),
            ),
            Beside("clock_by_step", ("clock_mean_hz", "observed_ns", "at_reference_ns")),
        ),
        repeats=3,
        seconds=80,
    ),
    "interconnect": Workload(
        module="chopper.workloads.interconnect",
        summary="fsdp2 over a link of several rates between two network namespaces: the step as "
        "T = T_c + V/B, and the exposed communication that makes it",
        options="INTERCONNECT",
        check="chopper.workloads.interconnect:needs",
        starter="chopper.workloads.linked",
        variants=(
            Variant(name="unshaped", summary="as fast as the kernel copies"),
            Variant(name="1gbit", summary="each end sends at most 125 MB/s"),
            Variant(name="300mbit", summary="each end sends at most 37.5 MB/s", default=False),
            Variant(name="100mbit", summary="each end sends at most 12.5 MB/s"),
        ),
        baseline="unshaped",
        repeats=3,
        seconds=105,
    ),
    "overlap": Workload(
        module="chopper.workloads.overlap",
        summary="all-gather with product and product with reduce-scatter: one after the other, "
        "chunk by chunk, with and without the swizzle, against the bound of pure overlap",
        options="OVERLAP",
        check="chopper.workloads.overlap:needs",
        starter="chopper.workloads.linked",
        measures=True,
        variants=(
            Variant(name="sequential", summary="the exchange, then the product, or the reverse"),
            Variant(name="library", summary="the collectives of torch.distributed"),
            Variant(name="chunked", summary="chunk by chunk, what is here or awaited first"),
            Variant(name="unswizzled", summary="chunk by chunk, in the order of the rows"),
            Variant(
                name="symmetric",
                summary="torch's fused operators on symmetric memory",
                needs_gpu=True,
            ),
            Variant(name="triton", summary="one kernel that waits for flags", needs_gpu=True),
            Variant(
                name="triton-unswizzled",
                summary="the same in the order of the rows",
                needs_gpu=True,
            ),
        ),
        baseline="sequential",
        repeats=3,
        seconds=110,
    ),
    "offload": Workload(
        module="chopper.workloads.offload",
        summary="one training with its memory in fourteen places: ZeRO's stages, optimizer, weights "
        "and activations in host memory, checkpointing, unified memory; predicted and measured, what "
        "each costs, and the largest model that fits",
        options="OFFLOAD",
        check="chopper.workloads.offload:needs",
        measures=True,
        variants=tuple(
            Variant(name=name, summary=summary, needs_gpu=gpu, default=default)
            for name, summary, gpu, default in (
                ("ddp", "everything on every rank", False, True),
                ("zero1", "DeepSpeed: optimizer states in parts", False, False),
                ("zero2", "and gradients", False, False),
                ("zero3", "and weights", False, False),
                ("zero1-offload", "zero1, the optimizer in host memory", False, False),
                ("zero2-offload", "zero2, the optimizer in host memory", False, True),
                ("zero3-offload", "zero3, the optimizer in host memory", False, False),
                ("zero3-param-offload", "and the weights", False, True),
                ("fsdp1-offload", "FullyShardedDataParallel with CPUOffload", False, False),
                ("fsdp2-offload", "fully_shard with CPUOffloadPolicy", False, False),
                ("checkpoint", "each block's forward run again in backward", False, True),
                ("activation-offload", "saved tensors in host memory, synchronously", False, True),
                ("activation-offload-overlap", "the same on a side stream", True, True),
                ("unified", "all of it in pages that host and device share", False, False),
            )
        ),
        baseline="ddp",
        repeats=3,
        seconds=100,
    ),
    "collectives": Workload(
        module="chopper.workloads.collectives",
        summary="all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send and receive over "
        "sizes: time, algorithm and bus bandwidth as nccl-tests defines them, and the α-β fit",
        options="COLLECTIVES",
        check="chopper.workloads.collectives:needs",
        measures=True,
        repeats=3,
        seconds=60,
    ),
    "gemm": Workload(
        module="chopper.workloads.gemm",
        summary="matrix products per data type and shape, on random numbers and on zeros: what "
        "the device achieves, and what the data does to it",
        options="GEMM",
        check="chopper.workloads.gemm:needs",
        ranks=1,
        measures=True,
        variants=(
            Variant(name="random", summary="normal random numbers"),
            Variant(name="zeros", summary="zeros"),
        ),
        baseline="random",
        repeats=3,
        seconds=100,
    ),
    "membw": Workload(
        module="chopper.workloads.membw",
        summary="copy, scale, add and triad over array sizes, as STREAM defines them: bandwidth "
        "of each cache and of memory",
        options="MEMBW",
        check="chopper.workloads.sweep:needs",
        ranks=1,
        measures=True,
        variants=(
            Variant(name="random", summary="normal random numbers"),
            Variant(name="zeros", summary="zeros", default=False),
        ),
        baseline="random",
        repeats=3,
        seconds=60,
    ),
    "dataloader": Workload(
        module="chopper.workloads.dataloader",
        summary="a mixture of many sources feeding data-parallel ranks: torch's DataLoader, as "
        "people use it, tuned, and reading a batch at once, against loader, planner and "
        "constructor actors on Ray: throughput, memory, balance",
        options="DATALOADER",
        check="chopper.workloads.loading:needs",
        starter="chopper.workloads.ray_ranks",
        measures=True,
        variants=(
            Variant(
                name="loader",
                summary="DataLoader, every worker opens every source",
                default=False,
            ),
            Variant(
                name="tuned",
                summary="DataLoader with more workers, which fetch further ahead",
            ),
            Variant(
                name="concurrent",
                summary="as loader, but a batch's documents are read at once",
                default=False,
            ),
            Variant(
                name="disaggregated", summary="each source opened once, by actors", default=False
            ),
            Variant(name="balanced", summary="and each rank has as much to compute"),
        ),
        baseline="tuned",
        seconds=105,
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
    workload = find(name)
    # Which variant it is, the command says: `chopper run NAME --variants …`.
    hidden = {"output", "ranks", "channel"} | ({"variant"} if workload.variants else set())
    return tuple(option for option in _declared(workload) if option.name not in hidden)


def _declared(workload: Workload) -> tuple[Any, ...]:
    module = importlib.import_module("chopper.workloads.options")
    declared: tuple[Any, ...] = getattr(module, workload.options)
    return declared


def headlines_of(name: str) -> Callable[[Experiment], tuple[Headline, ...]] | None:
    """What draws a workload's headline numbers from its experiment; None where it has none."""
    from chopper.workloads import headlines

    found: Callable[[Experiment], tuple[Headline, ...]] | None = headlines.HEADLINES.get(name)
    return found


def model_of(name: str) -> Callable[[], tuple[Headline, ...]] | None:
    """What draws the headlines that need no measurement; None where a workload has none."""
    from chopper.workloads import headlines

    found: Callable[[], tuple[Headline, ...]] | None = headlines.MODELS.get(name)
    return found


def exhibits_of(name: str) -> Callable[[Experiment], tuple[Exhibit, ...]] | None:
    """What draws a workload's own tables from its experiment; None where it has none."""
    from chopper.workloads import headlines

    found: Callable[[Experiment], tuple[Exhibit, ...]] | None = headlines.EXHIBITS.get(name)
    return found


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

    device: str
    """``cpu`` or ``cuda``."""

    words: tuple[str, ...]
    """The module's options."""

    options: dict[str, Any]
    """The same, read."""

    variants: tuple[Variant, ...]
    """Those that were asked for; none when the workload runs in one way."""

    repeats: int

    notes: tuple[str, ...]
    """What the user should know before it starts: automatic choices with their reasons."""

    @property
    def workload(self) -> Workload:
        """Its declaration."""
        return WORKLOADS[self.name]

    def command(self, variant: Variant | None = None) -> list[str]:
        """What starts the ranks, or the process that starts them."""
        module = (variant and variant.module) or self.workload.module
        words = [*self.words]
        if variant is not None:
            own = ["--variant", variant.name] if variant.words is None else variant.words
            words = [*own, *words]  # the user's come last, and win
        starter = (str(os.getpid()), self.workload.starter, str(self.ranks))
        return own_python("chopper.experiments.start", *starter, module, *words)

    @property
    def expected_s(self) -> float | None:
        """About how long all of it takes; None when the size is not the default one."""
        workload = self.workload
        declared = {o.name: o.default for o in options_of(self.name)}
        changed = any(declared[k] != v for k, v in self.options.items() if k in declared)
        if changed or self.ranks != workload.ranks or self.device != "cpu":
            return None
        of_all = sum(v.default and not v.needs_gpu for v in workload.variants) or 1
        share = (len(self.variants) or 1) / of_all * self.repeats / workload.repeats
        return workload.seconds * share

    def run(
        self, output: Path, variant: Variant | None = None, *, output_to: Output | None = None
    ) -> int:
        """Run it to its end, recorded into ``output``, and return its exit code.

        All output of the ranks goes to stderr, or is given to ``output_to``. Signals are passed on, and no process is left
        behind: see ``chopper.experiments.launch.launch``. Must be called from the main thread.
        """
        from chopper.experiments.launch import launch

        env = dict(os.environ)
        # Each rank would take all cores. The user's own number stands.
        env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.ranks)))
        env[OUTPUT_VARIABLE] = str(output.resolve())
        env[LAUNCHED_VARIABLE] = "1"
        return launch(self.command(variant), env=env, output=output_to, hold_interrupts=True)


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
) -> Launch:
    """Check a workload's options and this machine, and settle what was left open.

    Args:
        name: one of ``WORKLOADS``.
        ranks: processes; by default one per GPU, or the workload's own number without GPUs.
        steps: optimizer steps; the workload's own number by default.
        options: the workload's command line.
        variants: names, comma-separated, or ``all``; those that run by default otherwise.
        repeats: how often each runs; the workload's own number by default.

    Raises:
        UsageError: no such workload, or options that it does not have.
        WorkloadUnavailable: a package is missing, or the machine has too few GPUs, too little
            memory, or lacks the data type.
    """
    workload = find(name)
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: a run needs at least one rank")
    if repeats is not None and repeats < 1:
        raise UsageError(f"--repeats {repeats}: each variant runs at least once")
    if repeats is not None and not workload.experiment:
        raise UsageError(f"--repeats: {name} is recorded once; it has no variants to compare")
    if any(word in ("-o", "--output") or word.startswith("--output=") for word in options):
        raise UsageError("--output: name the run's directory with -o, before the --")
    words = [*options]
    if steps is not None:
        if all(option.name != "steps" for option in _declared(workload)):
            raise UsageError(
                f"--steps: {name} has no steps; see its options: chopper run {name} --help"
            )
        if any(word == "--steps" or word.startswith("--steps=") for word in options):
            raise UsageError("--steps is given twice, before and after the --: give it once")
        words += ["--steps", str(steps)]
    chosen = _variants(workload, name, variants, words)
    reader = importlib.import_module("chopper.workloads.options")
    parsed = reader.parse(_declared(workload), words, prog=name, parser=_Parser)
    for package in ("torch", *workload.packages):
        if importlib.util.find_spec(package) is None:
            called = "PyTorch" if package == "torch" else package
            raise WorkloadUnavailable(
                f"{name}: needs {called}, which is not installed: pip install {package}"
            )
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as exc:  # OSError: of a library that it loads itself
        raise WorkloadUnavailable(
            f"{name}: needs PyTorch, which is installed and cannot be imported ({exc}): install it "
            "again"
        ) from exc
    # What the check of a workload estimates depends on which of them run.
    parsed.variants = tuple(variant.name for variant in chosen)
    ranks, device, notes, absent = _settle(name, workload, ranks, parsed)
    if device == "cpu":
        absent |= {v.name: "needs a GPU, none is used here" for v in chosen if v.needs_gpu}
    reasons: dict[str, list[str]] = {}
    for variant in chosen:
        if variant.name in absent:
            reasons.setdefault(absent[variant.name], []).append(variant.name)
    lines = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
    chosen = tuple(v for v in chosen if v.name not in absent)
    if reasons and not chosen:
        raise WorkloadUnavailable(f"{name} {'; '.join(lines)}")
    notes += tuple(f"left out: {line}" for line in lines)
    words = [*_without(words, "--device"), "--device", device]
    return Launch(
        name=name,
        ranks=ranks,
        device=device,
        words=tuple(words),
        options={
            key: value if isinstance(value, str | int | float) or value is None else str(value)
            for key, value in sorted(vars(parsed).items())
            if key not in ("output", "device", "variant", "variants", "ranks", "channel")
        },
        variants=chosen,
        repeats=repeats or workload.repeats,
        notes=notes,
    )


def _variants(
    workload: Workload, name: str, asked: str | None, words: Sequence[str]
) -> tuple[Variant, ...]:
    """The variants to run, in the order of their declaration, the baseline first."""
    if not workload.variants:
        if asked is not None:
            raise UsageError(f"--variants: {name} runs in one way only")
        return ()
    if any(word == "--variant" or word.startswith("--variant=") for word in words):
        raise UsageError("--variant: name those to run with --variants, before the --")
    known = {v.name: v for v in workload.variants}
    if asked is None:
        return tuple(v for v in workload.variants if v.default)
    if asked == "all":
        return workload.variants
    names = [part.strip() for part in asked.split(",") if part.strip()]
    for unknown in (n for n in names if n not in known):
        from difflib import get_close_matches

        close = get_close_matches(unknown, known, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"--variants {unknown}: {name} has {', '.join(known)}{guess}")
    if not names:
        raise UsageError(f"--variants: names none of {', '.join(known)}")
    return tuple(v for v in workload.variants if v.name in names)


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
    name: str, workload: Workload, ranks: int | None, options: argparse.Namespace
) -> tuple[int, str, tuple[str, ...], dict[str, str]]:
    """Choose ranks and device, with notes and absent variants; raise when the machine cannot do it."""
    import torch

    from chopper.workloads.machine import choose_device, dtype_problem

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
    problem = dtype_problem(device, getattr(options, "dtype", "float32"))
    if problem is not None:
        raise WorkloadUnavailable(problem)
    cores = usable_cores()
    if device == "cpu" and ranks > cores:
        notes.append(
            f"warning: {ranks} ranks share {cores} cores: they will wait for each other, and the "
            "run will show that instead of the workload"
        )

    module, _, function = workload.check.partition(":")
    try:
        needs: Needs = getattr(importlib.import_module(module), function)(options, ranks, device)
    except ValueError as exc:
        raise WorkloadUnavailable(f"{name}: {exc}") from exc
    notes.extend(needs.notes)
    needed = needs.memory_bytes
    if device == "cpu":
        needed, available, where = ranks * needed, usable_memory_bytes(), f"{ranks} ranks here"
        if ranks == 1:
            where = "one rank here"
    else:
        available = min(torch.cuda.get_device_properties(i).total_memory for i in range(ranks))
        where = "each GPU"
    if needed > available:
        raise WorkloadUnavailable(
            f"{needs.what} needs about {needed / 1e9:.0f} GB, {where} can have "
            f"{available / 1e9:.0f} GB: {needs.remedy}"
        )
    return ranks, device, tuple(notes), dict(needs.absent)
