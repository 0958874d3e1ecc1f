"""Saved activations to the host and back on a side stream, while the GPU computes.

``torch.autograd.graph.save_on_cpu`` copies in the stream that computes: each copy waits its turn,
and backward waits for each. Here forward's copies run beside it, and backward asks for the next
tensors before it needs them.

Memory stays right without making the host wait for the GPU: every tensor here lies in the memory of
the computing stream, and that stream waits for a copy before what the copy reads or writes is given
up. Memory that is free again is then free in the order of that stream, and at most ``AHEAD``
tensors are under way in either direction. (``record_stream`` would give it back when the host gets
to see that the copy is done: a host that runs ahead would take new memory for each tensor instead.)
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

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
    """A context for each forward: what is saved in it lies on the host until backward needs it.

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
            if saved is not None and _same(saved, tensor):
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


def _same(saved: _Saved, tensor: Tensor) -> bool:
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
