"""Placement of memory in each variant of ``offload``, and formulas for its size and traffic.

Free of torch, so that the tables of a recorded experiment can be drawn without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.analyzers.estimates.memory import Largest
    from chopper.analyzers.estimates.training import (
        Checkpoint,
        Offload,
        Precision,
        Strategy,
        Training,
        Widths,
    )
    from chopper.models.architectures import Architecture

STATES = ("weights", "gradients", "optimizer")
CATEGORIES = (*STATES, "buffers", "activations")
BUCKET_ELEMENTS = 1_000_000
"""Size of DeepSpeed's buckets here: usual ones would be all that is seen of a small model."""
USUAL_BUCKET_ELEMENTS = 500_000_000
"""By default, and in the largest model that fits."""
LARGEST_SHAPE = "llama3-8b"
"""Whose layers are counted for the largest model that fits."""
LARGEST_SEQUENCE = 2048
PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's stage 3 keeps smaller tensors whole (``stage3_param_persistence_threshold``)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Places in which one variant keeps what a step needs."""

    strategy: Strategy
    summary: str = ""
    on_host: frozenset[str] = frozenset()
    """Categories in host memory."""
    checkpoint: bool = False
    managed: bool = False
    """All of it in pages that host and device share."""
    on_disk: bool = False
    """Layers and their optimizer on disk, two in memory at a time."""
    overlapped: bool = False
    """On a side stream of a GPU."""
    default: bool = False
    """Runs when no variants are named."""

    @property
    def deepspeed(self) -> bool:
        """True where DeepSpeed runs it."""
        return self.strategy.startswith("zero")

    @property
    def stage(self) -> int:
        """ZeRO's; fully sharded data parallelism is the third."""
        return int(self.strategy[-1]) if self.deepspeed else 3 if "fsdp" in self.strategy else 0

    def of(self, category: str) -> Literal["device", "host", "disk"]:
        """Place that a category lies in."""
        if self.on_disk and category in STATES:
            return "disk"
        return "host" if category in self.on_host else "device"


_OPTIMIZER = frozenset(("optimizer", "gradients"))
"""ZeRO-Offload: gradients stream to the host that updates."""
_EVERYTHING = _OPTIMIZER | {"weights"}

_ACTIVATIONS = frozenset(("activations",))

PLACEMENTS: dict[str, Placement] = {
    "ddp": Placement("ddp", "everything on every rank", default=True),
    "zero1": Placement("zero1", "DeepSpeed: optimizer states partitioned"),
    "zero2": Placement("zero2", "and gradients"),
    "zero3": Placement("zero3", "and weights"),
    "zero1-offload": Placement("zero1", "zero1, the optimizer in host memory", on_host=_OPTIMIZER),
    "zero2-offload": Placement(
        "zero2", "zero2, the optimizer in host memory", on_host=_OPTIMIZER, default=True
    ),
    "zero3-offload": Placement("zero3", "zero3, the optimizer in host memory", on_host=_OPTIMIZER),
    "zero3-param-offload": Placement("zero3", "and the weights", on_host=_EVERYTHING, default=True),
    "fsdp1-offload": Placement(
        "fsdp1", "FullyShardedDataParallel with CPUOffload", on_host=_EVERYTHING
    ),
    "fsdp2-offload": Placement("fsdp2", "fully_shard with CPUOffloadPolicy", on_host=_EVERYTHING),
    "checkpoint": Placement(
        "ddp", "each block's forward run again in backward", checkpoint=True, default=True
    ),
    "activation-offload": Placement(
        "ddp", "saved tensors in host memory, synchronously", on_host=_ACTIVATIONS, default=True
    ),
    "activation-offload-overlap": Placement(
        "ddp", "the same on a side stream", on_host=_ACTIVATIONS, overlapped=True, default=True
    ),
    "streamed": Placement(
        "ddp",
        "layers on disk, two in memory at a time, each run again in backward",
        checkpoint=True,
        on_disk=True,
    ),
    "unified": Placement(
        "ddp", "everything in managed memory that host and device share", managed=True
    ),
}


def precision_of(placement: Placement, dtype: str) -> Precision:
    """Name a variant's precision as ``chopper estimate memory`` does.

    In bfloat16, DeepSpeed and FSDP keep float32 masters, DDP computes under autocast, and what is
    on disk is all in 16 bits.
    """
    if dtype == "float32":
        return "fp32"
    if placement.on_disk:
        return "bf16"
    return "autocast" if placement.strategy == "ddp" else "mixed"


@cache
def widths_of(placement: Placement, dtype: str, optimizer: str) -> Widths:
    """Bytes per weight of each state of a variant."""
    from chopper.analyzers.estimates.training import Training, widths
    from chopper.models.architectures import named

    return widths(
        Training(
            architecture=named(LARGEST_SHAPE),
            strategy=placement.strategy,
            precision=precision_of(placement, dtype),
            optimizer="sgd" if optimizer == "sgd" else "adamw",
        )
    )


def states_bytes(placement: Placement, width: Widths, ranks: int) -> dict[str, float]:
    """Bytes per weight that each rank keeps: ZeRO's formulas (arXiv 1910.02054).

    Those on disk are of layers only, and no gradient stays until the update.
    """
    k = width.master + width.moments
    if placement.on_disk:
        return {"weights": width.weight, "optimizer": k}
    return {
        "weights": width.weight / ranks if placement.stage == 3 else width.weight,
        "gradients": width.gradient / ranks if placement.stage >= 2 else width.gradient,
        "optimizer": k / ranks if placement.stage >= 1 else k,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Counts of a model's weights, which DeepSpeed's buffers depend on."""

    count: int
    largest_count: int
    """Elements of the largest tensor."""
    persistent_count: int
    """In tensors of at most `PERSISTENT_ELEMENTS`."""
    layers_count: int
    """In all layers, of which two are in memory when they are on disk."""
    layer_count: int


class Beyond(NamedTuple):
    """Memory of a library that ZeRO's formulas do not know, or that is less than they say."""

    category: str
    place: Literal["device", "host", "disk"]
    size_bytes: float
    """Per rank; negative: less than the formula."""
    what: str


def beyond_formulas(
    placement: Placement, width: Widths, weights: Weights, ranks: int, bucket: int
) -> list[Beyond]:
    """Calculate what a library holds at the update beside ZeRO's states.

    DeepSpeed 0.19 by the sizes in its stage_1_and_2.py and stage3.py; ``bucket``: of
    ``reduce_bucket_size``.
    """
    beyond: list[Beyond] = []
    if placement.on_disk:
        count = weights.count - weights.layers_count + 2 * weights.layer_count
        size = count * (width.weight + width.gradient + width.moments)
        what = "two layers in transfer, embedding and head, with optimizer and gradients"
        return [Beyond("buffers", "device", size, what)]
    if not placement.deepspeed:
        return beyond
    offloads = "optimizer" in placement.on_host
    part, largest = weights.count / ranks, width.gradient * weights.largest_count
    if placement.stage == 1:
        others, where = width.gradient * (part - weights.count), placement.of("gradients")
        freed = "gradients that other ranks update: freed"
        beyond.append(Beyond("gradients", where, others, freed))
    if placement.stage < 3 and offloads:
        updated = width.weight * part
        beyond += [
            Beyond("buffers", "host", updated, "updated weights, before the copy to the device"),
            Beyond("buffers", "host", largest, "the largest gradient, in transfer"),
            Beyond("buffers", "device", largest, "the largest gradient, in transfer"),
        ]
    if placement.stage == 3:
        small = width.weight * weights.persistent_count
        reduced = width.gradient * bucket
        beyond += [
            Beyond("buffers", "device", reduced, "bucket in which gradients are reduced"),
            Beyond("buffers", "device", small, "small weights, not partitioned"),
        ]
        if offloads:
            collected = "gradients where they are collected, beside those that the update reads"
            beyond.append(Beyond("gradients", "host", width.gradient * part, collected))
    if offloads and width.gradient < 4:
        wide = (4 - width.gradient) * part
        beyond.append(Beyond("gradients", "host", wide, "gradients in float32 for the update"))
    return beyond


def collective_bytes(placement: Placement, width: Widths, ranks: int) -> float:
    """Bytes per weight that each rank sends in a step (ZeRO, section 7).

    An all-reduce of gradients sends 2 × their size × (N−1)/N; stage 3 gathers weights twice,
    reduces once.
    """
    gathered = 2 * width.compute if placement.stage == 3 else width.reduce
    return (gathered + width.reduce) * (ranks - 1) / ranks


def link_bytes(placement: Placement, width: Widths, ranks: int) -> dict[str, float]:
    """Bytes of states per weight that cross the link between device and host in a step.

    Gradients go down once. Updated weights come up once, or, where the weights live on the host,
    each rank's part for every gather: in forward and in backward.
    """
    if placement.on_disk:
        return {"to host": width.gradient, "to device": 2 * width.weight}
    if "optimizer" not in placement.on_host:
        return {"to host": 0.0, "to device": 0.0}
    twice = 2 if "weights" in placement.on_host else 1
    return {"to host": width.gradient / ranks, "to device": twice * width.compute / ranks}


def disk_bytes(placement: Placement, width: Widths, layers_count: int) -> int:
    """Bytes that layers of so many weights take on disk."""
    return (width.weight + width.moments) * layers_count if placement.on_disk else 0


def scratch_of(directory: str | None) -> Path:
    """Return the directory for what is on disk: the one named, else the system's (TMPDIR)."""
    return Path(directory or tempfile.gettempdir())


def training(
    placement: Placement,
    architecture: Architecture,
    *,
    ranks: int,
    batch: int,
    sequence: int,
    precision: Precision,
    kernels: Literal["gpu", "cpu"],
    bucket: int = USUAL_BUCKET_ELEMENTS,
    optimizer: Literal["adamw", "sgd"] = "adamw",
    fragmentation: float = 0.15,
) -> Training:
    """The variant as ``chopper estimate memory`` knows it; one rank partitions nothing."""
    from chopper.analyzers.estimates.training import Training

    offload: list[Offload] = []
    if "weights" in placement.on_host:
        offload.append("parameters")
    elif "optimizer" in placement.on_host:
        offload.append("optimizer")
    if "activations" in placement.on_host:
        offload.append("activations")
    checkpoint: Checkpoint = "full" if placement.checkpoint else "none"
    alone = ranks == 1 and placement.strategy == "ddp"
    return Training(
        architecture=architecture,
        batch_count=batch,
        sequence_count=sequence,
        strategy="single" if alone else placement.strategy,
        ranks_count=ranks,
        checkpoint=checkpoint,
        precision=precision,
        offload=tuple(offload),
        loss="native" if precision == "fp32" else "fp32",
        kernels=kernels,
        optimizer=optimizer,
        fragmentation_ratio=fragmentation,
        bucket_count=bucket,
    )


def capacity_bytes(text: str, option: str = "fits") -> tuple[str, int]:
    """A device's label and what a process can have of it, from its name or a size like ``24GB``."""
    from chopper.hardware.devices import named as device_named
    from chopper.quantities import size_bytes

    if text[:1].isdigit():
        return text, size_bytes(text, option)
    if not text:
        raise UsageError(f"--{option}: is empty, expected a device or a size such as 24GB")
    device = device_named(text)
    if device.usable_bytes is None:
        raise UsageError(
            f"--{option} {text}: memory of {device.label} is not known; name a size: 24GB"
        )
    return device.label, device.usable_bytes


def host_bytes(text: str) -> int:
    """Read a host's memory from a size like ``1500GB``, a DGX-2's (arXiv 2101.06840, section 6)."""
    from chopper.quantities import size_bytes

    return size_bytes(text, "host")


def largest_of(
    variant: str, options: Mapping[str, object], *, ranks: int, checkpoint: bool
) -> Largest | None:
    """Find the largest model of a variant on the device and host that the options name.

    Layers of `LARGEST_SHAPE`, mixed precision with AdamW, batch 1 of `LARGEST_SEQUENCE` tokens.
    """
    from chopper.analyzers.estimates.memory import largest
    from chopper.models.architectures import named

    placement = PLACEMENTS[variant]
    wanted = training(
        replace(placement, checkpoint=True) if checkpoint else placement,
        named(LARGEST_SHAPE),
        ranks=ranks,
        batch=1,
        sequence=LARGEST_SEQUENCE,
        precision="mixed",
        kernels="gpu",
    )
    _, capacity = capacity_bytes(str(options["fits"]))
    return largest(wanted, capacity, host_bytes(str(options.get("host") or "1500GB")))
