"""The command-line options of the reference workloads.

Kept apart from the workloads, and free of torch, so that ``chopper workloads`` can list them
and ``chopper run`` can refuse a wrong one before any process is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_MOST = 10**15
"""More than there are bytes in any memory; a product of some such numbers is still a number."""
_MOST_SEED = 2**32 - 1


def _whole(text: str, *, least: int, most: int = _MOST) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most}, the most that it can be")
    return value


def positive(text: str) -> int:
    """Read a whole number of at least one."""
    return _whole(text, least=1)


def not_negative(text: str) -> int:
    """Read a whole number of at least zero."""
    return _whole(text, least=0)


def seed(text: str) -> int:
    """Read what every random generator takes for its seed."""
    return _whole(text, least=0, most=_MOST_SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a workload: what it means, what it may be, what it is by default."""

    name: str
    """Without the dashes."""

    help: str
    """What it sets, in a few words."""

    default: str | int | None
    """Used when it is not given."""

    type: Callable[[str], str | int | Path] = str
    """Reads the text of the command line."""

    choices: tuple[str, ...] | None = None
    """All that it may be, or None."""


STEPS = Option(name="steps", help="optimizer steps", default=12, type=positive)
DTYPE = Option(
    name="dtype",
    help="type of computation; weights and optimizer stay float32",
    default="float32",
    choices=("float32", "bfloat16"),
)
SEED = Option(name="seed", help="of weights, data and order", default=0, type=seed)
DEVICE = Option(
    name="device",
    help="auto takes the GPUs when there is one for each rank, else the CPU",
    default="auto",
    choices=("auto", "cpu", "cuda"),
)
OUTPUT = Option(
    name="output",
    help="directory of the recorded run; CHOPPER_OUTPUT, or a new one, by default",
    default=None,
    type=Path,
)

TRAINING: tuple[Option, ...] = (
    Option(
        name="size",
        help="shape of the Llama model",
        default="debug",
        choices=("debug", "1b", "8b"),
    ),
    STEPS,
    Option(name="batch", help="sequences per rank and step", default=4, type=positive),
    Option(name="sequence", help="tokens per sequence", default=256, type=positive),
    DTYPE,
    Option(
        name="checkpoint",
        help="activation checkpointing: full recomputes each block in backward",
        default="none",
        choices=("none", "full"),
    ),
    Option(
        name="workers",
        help="data loading processes per rank; 0 loads in the training process",
        default=0,
        type=not_negative,
    ),
    SEED,
    DEVICE,
    Option(
        name="allocations",
        help="record each allocation of memory in the trace",
        default="no",
        choices=("no", "yes"),
    ),
    OUTPUT,
)
"""Of every workload that trains the Llama model."""

FSDP: tuple[Option, ...] = tuple(
    replace(o, default="yes") if o.name == "allocations" else o for o in TRAINING
)
"""Those of training; allocations are what two ways of sharding differ in."""

INTERCONNECT: tuple[Option, ...] = (
    Option(
        name="variant",
        help="rate of the link",
        default="unshaped",
        choices=("unshaped", "1gbit", "300mbit", "100mbit"),
    ),
    *(
        replace(o, default={"steps": 5, "batch": 2}.get(o.name, o.default))
        for o in TRAINING
        if o.name != "allocations"
    ),
    Option(name="channel", help="set by what starts the ranks", default=None, type=int),
)
"""Those of training, over a link."""

OVERLAP: tuple[Option, ...] = (
    Option(
        name="variant",
        help="how product and transfer are ordered",
        default="chunked",
        choices=(
            *("library", "sequential", "chunked", "unswizzled", "symmetric"),
            *("triton", "triton-unswizzled"),
        ),
    ),
    Option(name="m", help="rows of the product, over all ranks", default=1024, type=positive),
    Option(name="k", help="inner dimension", default=2048, type=positive),
    Option(name="n", help="columns", default=1024, type=positive),
    Option(name="chunks", help="pieces that each rank's rows travel in", default=8, type=positive),
    Option(
        name="rate",
        help="of the link between two ranks on the CPU; none: the loopback",
        default="1gbit",
        choices=("none", "unshaped", "1gbit", "300mbit", "100mbit"),
    ),
    replace(STEPS, help="timed repetitions of each operation", default=9),
    replace(DTYPE, help="type of computation"),
    SEED,
    DEVICE,
    Option(name="channel", help="set by what starts the ranks", default=None, type=int),
    OUTPUT,
)

OFFLOAD: tuple[Option, ...] = (
    Option(
        name="variant",
        help="where weights, gradients, optimizer and activations lie",
        default="ddp",
        choices=(
            "ddp",
            "zero1",
            "zero2",
            "zero3",
            "zero1-offload",
            "zero2-offload",
            "zero3-offload",
            "zero3-param-offload",
            "fsdp1-offload",
            "fsdp2-offload",
            "checkpoint",
            "activation-offload",
            "activation-offload-overlap",
            "unified",
        ),
    ),
    *(
        replace(o, default={"steps": 10, "batch": 2, "sequence": 128}.get(o.name, o.default))
        for o in TRAINING
        if o.name not in ("checkpoint", "dtype")
    ),
    Option(
        name="fits",
        help="device, or a size like 24GB, that the largest model is estimated for",
        default="v100-sxm2-32gb",
    ),
    Option(
        name="host",
        help="memory of the host that the largest model may take",
        default="1500GB",
    ),
    Option(name="dtype", help="type of computation", default="float32", choices=("float32",)),
)
"""Those of training, in float32."""

COLLECTIVES: tuple[Option, ...] = (
    Option(name="smallest", help="bytes of the smallest message", default=1024, type=positive),
    Option(name="largest", help="bytes of the largest message", default=16 << 20, type=positive),
    Option(name="factor", help="from one size to the next", default=4, type=positive),
    Option(name="repeats", help="timed rounds through all sizes", default=30, type=positive),
    SEED,
    DEVICE,
    OUTPUT,
)

GEMM: tuple[Option, ...] = (
    Option(
        name="variant",
        help="what the matrices hold",
        default="random",
        choices=("random", "zeros"),
    ),
    Option(name="shapes", help="MxNxK, comma-separated; or a sweep", default="sweep"),
    Option(
        name="dtypes",
        help="comma-separated torch names; or those the device computes",
        default="all",
    ),
    Option(name="seconds", help="whole seconds per shape and type", default=1, type=positive),
    SEED,
    DEVICE,
    OUTPUT,
)

MEMBW: tuple[Option, ...] = (
    Option(
        name="variant",
        help="what the arrays hold",
        default="random",
        choices=("random", "zeros"),
    ),
    Option(name="smallest", help="bytes of the smallest array", default=256 << 10, type=positive),
    Option(name="largest", help="bytes of the largest array", default=256 << 20, type=positive),
    Option(name="factor", help="from one size to the next", default=4, type=positive),
    Option(name="repeats", help="timed rounds through all sizes", default=20, type=positive),
    SEED,
    DEVICE,
    OUTPUT,
)


DATALOADER: tuple[Option, ...] = (
    Option(
        name="variant",
        help="who reads the samples",
        default="loader",
        choices=("loader", "tuned", "concurrent", "disaggregated", "balanced"),
    ),
    Option(
        name="steps",
        help="measured steps of a DataLoader in each repetition, at least; actors take 6 times "
        "as many, which take about as long; traced ones come on top",
        default=18,
        type=positive,
    ),
    Option(
        name="repetitions",
        help="times that the loader is started anew, measured and ended in a run",
        default=3,
        type=positive,
    ),
    Option(name="batch", help="samples per rank and step", default=12, type=positive),
    Option(name="sources", help="that are mixed", default=32, type=positive),
    Option(name="state", help="MB of an open source, on average", default=14, type=positive),
    Option(name="latency", help="ms of storage per read, on average", default=200, type=positive),
    Option(name="documents", help="in each source, on average", default=20_000, type=positive),
    Option(name="tokens", help="median of a document", default=40, type=positive),
    Option(name="longest", help="tokens of any document, and of a row", default=256, type=positive),
    Option(name="width", help="of the model", default=32, type=positive),
    Option(name="workers", help="per rank, as people use them", default=8, type=positive),
    Option(
        name="tuned", help="workers per rank of the tuned DataLoader", default=18, type=positive
    ),
    Option(
        name="loaders", help="loader actors to start with, and at least", default=2, type=positive
    ),
    Option(
        name="most",
        help="loader actors that autoscaling may have; no fewer than --loaders",
        default=2,
        type=positive,
    ),
    Option(name="threads", help="reads in flight per loader actor", default=256, type=positive),
    Option(
        name="rows",
        help="what a DataLoader makes of documents: rows packed as the actors do it, or one "
        "padded row for each",
        default="packed",
        choices=("packed", "padded"),
    ),
    Option(name="prefetch", help="steps that actors load ahead", default=64, type=positive),
    Option(
        name="balance",
        help="how the balanced variant gives samples to ranks",
        default="kk",
        choices=("random", "greedy", "kk"),
    ),
    Option(
        name="ramp",
        help="steps over which the mixture turns around; 0: it stays",
        default=0,
        type=not_negative,
    ),
    Option(
        name="first", help="step to begin with, as after a restart", default=0, type=not_negative
    ),
    Option(
        name="fault",
        help="what goes wrong, to see what happens then",
        default="none",
        choices=("none", "raises", "empty", "endless", "hangs", "killed-loader"),
    ),
    Option(
        name="sweep",
        help="measure, untraced, at storage latencies from 1 to 200 ms",
        default="none",
        choices=("none", "latency"),
    ),
    Option(
        name="address",
        help="of a running Ray cluster; one is started here by default",
        default=None,
    ),
    SEED,
    DEVICE,
    OUTPUT,
)


def parse(
    declared: Sequence[Option],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    parser: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.Namespace:
    """Read a workload's command line; attributes are named as the options are.

    Args:
        declared: the workload's options.
        argv: words to read; those of the process by default.
        prog: name in usage and errors.
        description: shown by ``--help``.
        parser: class that does it; its ``error`` decides what happens to wrong words.
    """
    reader = parser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        # Else "--s 3" means --size, --steps, --sequence or --seed by luck.
        allow_abbrev=False,
    )
    for option in declared:
        reader.add_argument(
            f"--{option.name}",
            help=option.help,
            default=option.default,
            type=option.type,
            choices=option.choices,
        )
    return reader.parse_args(argv)
