"""What lives between backward and update, and what forward kept for backward, in bytes."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from chopper.workloads.overlapped_offload import OverlappedOffload, is_weight
from chopper.workloads.places import Place


class Saver:
    """What happens to the tensors that forward saves for backward, and how many bytes they are."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.kept_bytes = 0
        """Of the last forward, on the device; each storage once, weights not."""
        self.moved_bytes = 0
        """Of the last forward, to the host."""
        self._place = place
        self._overlapped = OverlappedOffload(device) if place.overlapped else None
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
        if "activations" in self._place.on_host:
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
) -> dict[str, dict[str, int]]:
    """Category → kind of device → bytes of all storages that live, each counted once.

    What the optimizer updates in place is a weight; what is none of the four is a buffer.
    """
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
    sums: dict[str, dict[str, int]] = {}
    for category, of in found.items():
        by_kind = sums.setdefault(category, {})
        for (kind, _), size in of.items():
            by_kind[kind] = by_kind.get(kind, 0) + size
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
