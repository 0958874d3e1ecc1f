"""Memory of a step of ``offload``: kept by forward, alive at the update, and predicted."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

import chopper
from chopper.analyzers.estimates.memory import Memory
from chopper.analyzers.estimates.memory import memory as estimated_memory
from chopper.hardware.measure import wait
from chopper.workloads import placement as formulas
from chopper.workloads.llama import SIZES
from chopper.workloads.offload_trainers import Trainer
from chopper.workloads.overlapped_offload import OverlappedOffload, is_weight
from chopper.workloads.placement import PLACEMENTS, Placement

if TYPE_CHECKING:
    from chopper.analyzers.estimates.training import Precision


class Saver:
    """Counts the tensors that forward saves for backward, and moves them as the variant wants."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self.kept_bytes = 0
        """Bytes of the last forward on the device; each storage once, weights not."""
        self.moved_bytes = 0
        """Bytes of the last forward that went to the host."""
        self._placement = placement
        self._overlapped = OverlappedOffload(device) if placement.overlapped else None
        self._seen: set[int] = set()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around each forward."""
        self.kept_bytes = self.moved_bytes = 0
        self._seen = set()
        if self._overlapped is not None:
            before = self._overlapped.moved_bytes
            with self._overlapped:
                yield
            self.moved_bytes = self._overlapped.moved_bytes - before
            return
        if "activations" in self._placement.on_host:
            moving = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())

            def to_host(tensor: Tensor) -> object:
                self.moved_bytes += tensor.nbytes
                return moving.pack_hook(tensor)

            hooks = torch.autograd.graph.saved_tensors_hooks(to_host, moving.unpack_hook)
        else:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._count, _same)
        with hooks:
            yield

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not is_weight(tensor) and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.kept_bytes += storage.nbytes()
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def live(
    weights: Iterable[Tensor],
    gradients: Iterable[Tensor],
    states: Iterable[Tensor],
    staging: Iterable[Tensor] = (),
) -> dict[str, Counter[str]]:
    """Category → kind of device → bytes of all storages that live, each once; others: buffers."""
    gc.collect()
    found = {"weights": storages(weights)}
    taken = set(found["weights"])
    for category, tensors in (
        ("gradients", gradients),
        ("optimizer", states),
        ("staging", staging),
    ):
        found[category] = {k: v for k, v in storages(tensors).items() if k not in taken}
        taken |= set(found[category])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects that answer isinstance with a warning
        everything = storages(o for o in gc.get_objects() if isinstance(o, Tensor))
    found["buffers"] = {k: v for k, v in everything.items() if k not in taken}
    sums: dict[str, Counter[str]] = {category: Counter() for category in found}
    for category, of in found.items():
        for (kind, _), size in of.items():
            sums[category][kind] += size
    return sums


def storages(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """Kind of device and address → bytes of each storage that tensors lie in."""
    found: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.layout is not torch.strided or local.device.type == "meta" or is_fake(local):
            continue
        storage = local.untyped_storage()
        if storage.nbytes():
            found[local.device.type, storage.data_ptr()] = storage.nbytes()
    return found


class UpdateClock:
    """Time that the optimizer itself takes: of the updates, not of what is gathered around them."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.taken_ns = 0
        """Since it was last set to zero; stage 3 updates in several calls."""
        self.running = False
        """It waits for the device, which a traced step is spared."""
        self._device = device
        self._begin_ns = 0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        if self.running:
            wait(self._device)
            self._begin_ns = time.perf_counter_ns()

    def _end(self, *_: object) -> None:
        if self.running:
            wait(self._device)
            self.taken_ns += time.perf_counter_ns() - self._begin_ns


def keep_memory(
    prof: chopper.Profile,
    args: argparse.Namespace,
    trainer: Trainer,
    saving: Saver,
    device: torch.device,
) -> None:
    """Measure what lives at the update, what lived at backward, and what was predicted."""
    placement, ranks = PLACEMENTS[args.variant], dist.get_world_size()
    live_bytes = live(trainer.weights(), trainer.gradients(), trainer.states(), trainer.staging())
    if dist.get_rank():
        return
    measured: Counter[tuple[str, str]] = Counter()
    for category, sizes in live_bytes.items():
        for kind, size in sizes.items():
            # On a CPU both are the same memory: the place is the one that the variant intends.
            real = "host" if kind == "cpu" else "device"
            where = placement.of(category) if device.type == "cpu" else real
            if category == "staging":
                category, where = "buffers", "host"
            measured[category, where] += size
    for category, size in trainer.on_disk_bytes.items():
        measured[category, "disk"] = size
    measured["activations", "device"] = saving.kept_bytes + trainer.kept_bytes
    measured["activations", "host"] = saving.moved_bytes
    for (category, where), size in measured.items():
        if size:
            prof.measure("measured_bytes", size, category=category, place=where)
    if device.type == "cuda":
        prof.measure("peak_allocated_bytes", torch.cuda.max_memory_allocated(device))
    keep_predictions(prof, args, placement, ranks, device)


def keep_predictions(
    prof: chopper.Profile,
    args: argparse.Namespace,
    placement: Placement,
    ranks: int,
    device: torch.device,
) -> None:
    """Measure what formulas and estimators say of this variant."""
    config = SIZES[args.size]
    width = formulas.widths_of(placement, args.dtype, args.optimizer)
    count = config.parameters_count - (config.outer_count if placement.on_disk else 0)
    predicted: dict[str, float] = {
        category: per_weight * count
        for category, per_weight in formulas.states_bytes(placement, width, ranks).items()
    }
    predicted["activations"] = kept_bytes(args, placement, device)
    for category, size in predicted.items():
        prof.measure("predicted_bytes", size, category=category, place=placement.of(category))
    memory = estimated(args, placement, ranks, device.type)
    prof.measure("predicted_peak_bytes", memory.allocated_bytes)


def kept_bytes(args: argparse.Namespace, placement: Placement, device: torch.device) -> int:
    """Activations that are kept when backward begins, as ``chopper estimate memory`` counts them.

    At the loss a rank with all of its memory on the device has states, activations and the logits
    beside their softmax, which is what is kept of them.
    """
    alone = replace(placement, strategy="ddp", on_host=frozenset(), on_disk=False)
    precision = formulas.precision_of(placement, args.dtype)
    said = estimated(args, alone, 1, device.type, precision)
    logits = 4 * args.batch * args.sequence * SIZES[args.size].vocabulary_count
    kept: int = said.phases_bytes["loss"] - said.steady_bytes - logits
    return kept


def estimated(
    args: argparse.Namespace,
    placement: Placement,
    ranks: int,
    device: str,
    precision: Precision | None = None,
) -> Memory:
    """``chopper estimate memory`` for what a variant runs here.

    With layers on disk: of two layers, and the inputs of all others.
    """
    config = SIZES[args.size]
    resident, inputs_bytes = config, 0
    if placement.on_disk:
        resident = msgspec.structs.replace(config, layers_count=min(2, config.layers_count))
        others = config.layers_count - resident.layers_count
        width = formulas.widths_of(placement, args.dtype, args.optimizer).compute
        inputs_bytes = others * args.batch * args.sequence * config.width * width
    found = estimated_memory(
        formulas.training(
            placement,
            resident,
            ranks=ranks,
            batch=args.batch,
            sequence=args.sequence,
            precision=precision or formulas.precision_of(placement, args.dtype),
            kernels="cpu" if device == "cpu" else "gpu",
            bucket=formulas.BUCKET_ELEMENTS,
            optimizer=args.optimizer,
            fragmentation=0.0,
        )
    )
    return msgspec.structs.replace(
        found,
        peak_bytes=found.peak_bytes + inputs_bytes,
        allocated_bytes=found.allocated_bytes + inputs_bytes,
    )
