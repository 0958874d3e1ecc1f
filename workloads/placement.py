"""Placement of memory in each variant of ``offload``, and formulas for its size and traffic.

Free of torch, so that the tables of a recorded experiment can be drawn without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
V100, HOST = "v100-sxm2-32gb", "1500GB"
"""A DGX-2's device and host memory (arXiv 2101.06840, section 6), for the largest model."""
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
    core: bool = False
    """ZeRO-Offload's own update, DeepSpeedCPUAdam, and gradients that leave beside backward."""
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
        """Return the place of a category."""
        if self.on_disk and category in STATES:
            return "disk"
        return "host" if category in self.on_host else "device"


_OPTIMIZER = frozenset(("optimizer", "gradients"))
"""ZeRO-Offload: gradients stream to the host that updates."""
_EVERYTHING = _OPTIMIZER | {"weights"}

_ACTIVATIONS = frozenset(("activations",))

PLACEMENTS: dict[str, Placement] = {
    "ddp": Placement("ddp", "everything on every rank", default=True),
    "zero2": Placement("zero2", "DeepSpeed: optimizer states and gradients partitioned"),
    "zero3": Placement("zero3", "and weights"),
    "zero2-offload": Placement(
        "zero2", "zero2, the optimizer in host memory", on_host=_OPTIMIZER, default=True
    ),
    "zero2-offload-core": Placement(
        "zero2",
        "and updated by DeepSpeedCPUAdam, gradients copied beside backward",
        on_host=_OPTIMIZER,
        core=True,
        default=True,
    ),
    "zero3-offload": Placement("zero3", "zero3, the optimizer in host memory", on_host=_OPTIMIZER),
    "zero3-param-offload": Placement("zero3", "and the weights", on_host=_EVERYTHING, default=True),
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

    Plus what DeepSpeed 0.19 keeps of gradients for an update on the host: stage 3 collects them in
    a second buffer, and 16-bit gradients are converted to float32 (stage_1_and_2.py, stage3.py).
    Layers on disk: bytes per weight of the layers; no gradient stays until the update.
    """
    k = width.master + width.moments
    if placement.on_disk:
        return {"weights": width.weight, "optimizer": k}
    gradients = float(width.gradient)
    if placement.deepspeed and "optimizer" in placement.on_host:
        gradients = max(4, width.gradient) + (width.gradient if placement.stage == 3 else 0)
    return {
        "weights": width.weight / ranks if placement.stage == 3 else width.weight,
        "gradients": gradients / ranks if placement.stage >= 2 else gradients,
        "optimizer": k / ranks if placement.stage else k,
    }


def disk_bytes(placement: Placement, width: Widths, layers_count: int) -> int:
    """Bytes on disk of layers with ``layers_count`` weights in all."""
    return (width.weight + width.moments) * layers_count if placement.on_disk else 0


def scratch_of(directory: str | None) -> Path:
    """Return the named directory for layers on disk, or the system's (TMPDIR)."""
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
    """Read a host's memory from a size like ``1500GB``."""
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
    return largest(wanted, capacity, host_bytes(str(options.get("host") or HOST)))
