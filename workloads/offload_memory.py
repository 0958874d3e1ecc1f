"""Memory of a step of ``offload``: kept by forward, alive at the update, and predicted."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import Parameter

import chopper
from chopper.analyzers.estimates.memory import Memory
from chopper.analyzers.estimates.memory import memory as estimated_memory
from chopper.hardware.measure import wait
from chopper.workloads import placement as formulas
from chopper.workloads.llama import SIZES
from chopper.workloads.offload_trainers import Trainer
from chopper.workloads.placement import PLACEMENTS, Placement

if TYPE_CHECKING:
    from chopper.analyzers.estimates.training import Precision


SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay: their copies cost more than they free."""
AHEAD = 3
"""Tensors that wait for their copy out; that are back before their use; that stay after it."""


@dataclass(eq=False, kw_only=True)
class _Saved:
    """One tensor on its way to the host, there, or on its way back."""

    host: Tensor
    stream: torch.cuda.Stream
    """That computes, and whose memory the tensor lies in."""
    out: torch.cuda.Event
    """The copy to the host is done."""
    source: Tensor | None
    """Until the computing stream has waited for ``out``."""
    version: int
    peers: list[weakref.ref[_Saved]]
    at: int
    back: Tensor | None = None
    home: torch.cuda.Event | None = None
    """The copy to ``back`` is done; None when the computing stream has waited for it."""

    def __del__(self) -> None:
        # Fetched for a backward that never came: the copy may still write into memory that is
        # about to be somebody else's.
        if self.home is not None:
            self.stream.wait_event(self.home)


class OverlappedOffload:
    """A context for each forward: saved activations go to the host and back on a side stream.

    ``torch.autograd.graph.save_on_cpu`` copies in the stream that computes: each copy waits its
    turn, and backward waits for each. Here forward's copies run beside it, and backward asks for
    the next tensors before it needs them.

    Memory stays right without making the host wait for the GPU: every tensor here lies in the
    memory of the computing stream, and that stream waits for a copy before what the copy reads or
    writes is given up. Memory that is free again is then free in the order of that stream, and at
    most ``AHEAD`` tensors are under way in either direction. (``record_stream`` would give it back
    when the host gets to see that the copy is done: a host that runs ahead would take new memory
    for each tensor instead.)

    Make one and enter it for every forward: its stream is one of few that CUDA keeps. Weights and
    their views stay, as do tensors of other devices. ``moved_bytes`` counts what went to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.moved_bytes = 0
        self._device = device
        self._side = torch.cuda.Stream(device)
        # Weak, all three: what a tensor occupies goes with the graph that it was saved for.
        self._order: list[weakref.ref[_Saved]] = []
        self._leaving: deque[weakref.ref[_Saved]] = deque()
        self._used: deque[weakref.ref[_Saved]] = deque()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        self._order = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def __exit__(self, *failure: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*failure)
        self._hooks = None

    def _stays(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is not Tensor  # of a subclass, that may be no plain memory
            or is_weight(tensor)
            or tensor.layout is not torch.strided
            or tensor.device != self._device
            or tensor.nbytes < SMALLEST_BYTES
        )

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if self._stays(tensor):
            return tensor
        # Three projections of one input save it three times. Only while the first is still here:
        # later its address may be another tensor's.
        for leaving in self._leaving:
            saved = leaving()
            if saved is not None and _is_same_memory(saved, tensor):
                return saved
        stream = torch.cuda.current_stream(self._device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            _copy(host, tensor)
            out = torch.cuda.Event()
            out.record(self._side)
        self.moved_bytes += tensor.nbytes
        saved = _Saved(
            host=host,
            stream=stream,
            out=out,
            source=tensor,
            version=tensor._version,
            peers=self._order,
            at=len(self._order),
        )
        self._order.append(weakref.ref(saved))
        self._leaving.append(self._order[-1])
        if len(self._leaving) > AHEAD:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                _let_go(oldest)
        return saved

    def _unpack(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # What forward saved last is still here.
        if packed.source is not None:
            _check(packed)
            return packed.source
        self._fetch(packed)
        # Backward runs against forward's order: what was saved before comes next.
        for ref in reversed(packed.peers[max(0, packed.at - AHEAD) : packed.at]):
            before = ref()
            if before is not None and before.source is None:
                self._fetch(before)
        if packed.home is not None:
            packed.stream.wait_event(packed.home)
            packed.home = None
        back = packed.back
        assert back is not None
        # Others may have saved the same tensor, and come next; after that it would only take room.
        if all(used() is not packed for used in self._used):
            self._used.append(weakref.ref(packed))
            if len(self._used) > AHEAD:
                oldest = self._used.popleft()()
                # Unless it was asked for again: then its memory is being written.
                if oldest is not None and oldest.home is None:
                    oldest.back = None
        return back

    def _fetch(self, saved: _Saved) -> None:
        if saved.back is not None:
            return
        saved.back = torch.empty_like(saved.host, device=self._device, pin_memory=False)
        # That memory may have been another tensor's a moment ago.
        self._side.wait_stream(saved.stream)
        with torch.cuda.stream(self._side):
            _copy(saved.back, saved.host)
            saved.home = torch.cuda.Event()
            saved.home.record(self._side)


def is_weight(tensor: Tensor) -> bool:
    """Tell a parameter, also one gathered for its use, and a view of one from other tensors."""
    return isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)


def _copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source, non_blocking=True)


def _let_go(saved: _Saved) -> None:
    """Give the tensor's memory up; what the computing stream does next comes after the copy."""
    _check(saved)
    saved.stream.wait_event(saved.out)
    saved.source = None


def _check(saved: _Saved) -> None:
    source = saved.source
    if source is not None and source._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(source.shape)} that backward needs was changed in place "
            "while it was copied to the host: write into a new tensor instead"
        )


def _is_same_memory(saved: _Saved, tensor: Tensor) -> bool:
    """Tell that a tensor that is still here is this memory, seen in the same way, unchanged."""
    held = saved.source
    return (
        held is not None
        and held.data_ptr() == tensor.data_ptr()
        and held.dtype == tensor.dtype
        and held.shape == tensor.shape
        and held.stride() == tensor.stride()
        and held.is_conj() == tensor.is_conj()
        and held.is_neg() == tensor.is_neg()
        and tensor._version == saved.version
    )


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
    by_category = {"weights": storages(weights)}
    taken = set(by_category["weights"])
    for category, tensors in (
        ("gradients", gradients),
        ("optimizer", states),
        ("staging", staging),
    ):
        by_category[category] = {k: v for k, v in storages(tensors).items() if k not in taken}
        taken |= set(by_category[category])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects that answer isinstance with a warning
        everything = storages(o for o in gc.get_objects() if isinstance(o, Tensor))
    by_category["buffers"] = {k: v for k, v in everything.items() if k not in taken}
    sums: dict[str, Counter[str]] = {category: Counter() for category in by_category}
    for category, of in by_category.items():
        for (kind, _), size in of.items():
            sums[category][kind] += size
    return sums


def storages(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """Map (kind of device, address) to the bytes of each storage of the tensors."""
    sizes_bytes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.layout is not torch.strided or local.device.type == "meta" or is_fake(local):
            continue
        storage = local.untyped_storage()
        if storage.nbytes():
            sizes_bytes[local.device.type, storage.data_ptr()] = storage.nbytes()
    return sizes_bytes


class UpdateClock:
    """Time of the optimizer's own updates, without gathering weights around them."""

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
    """Measure memory at the update and activations at backward, beside the prediction."""
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
    memory = estimated(args, alone, 1, device.type, precision)
    logits = 4 * args.batch * args.sequence * SIZES[args.size].vocabulary_count
    activations: int = memory.phases_bytes["loss"] - memory.steady_bytes - logits
    return activations


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
        layers_on_disk = config.layers_count - resident.layers_count
        width = formulas.widths_of(placement, args.dtype, args.optimizer).compute
        inputs_bytes = layers_on_disk * args.batch * args.sequence * config.width * width
    memory = estimated_memory(
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
        memory,
        peak_bytes=memory.peak_bytes + inputs_bytes,
        allocated_bytes=memory.allocated_bytes + inputs_bytes,
    )
