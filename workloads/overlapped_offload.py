"""Saved activations to the host and back on a side stream, while the GPU computes.

``torch.autograd.graph.save_on_cpu`` copies in the stream that computes: each copy waits its turn, and
backward waits for each. Here forward's copies run beside it, and backward asks for the next tensors
before it needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay: their copies cost more than they free."""
AHEAD = 3
"""Tensors that backward has brought, or asked for, before it uses them."""


@dataclass(eq=False)
class _Saved:
    """One tensor on its way to the host, there, or on its way back."""

    host: Tensor
    out: torch.cuda.Event
    source: Tensor | None
    """Kept until the copy out is done."""
    back: Tensor | None = None
    home: torch.cuda.Event | None = None


class OverlappedOffload:
    """A context for forward: tensors saved in it live on the host until backward needs them.

    The stash is bounded: at most ``AHEAD`` tensors wait for their copy out, and at most ``AHEAD``
    have come back before they are used.
    """

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()
        self._order: list[_Saved] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        """Save what forward saves."""
        self._hooks.__enter__()

    def __exit__(self, *failure: object) -> None:
        """Stop; what was saved stays until backward takes it."""
        self._hooks.__exit__(*failure)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        if small or not tensor.is_cuda or isinstance(tensor, torch.nn.Parameter):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream())
        # Forward may let go of it at once: its memory waits for the copy, too.
        tensor.record_stream(self._side)
        with torch.cuda.stream(self._side):
            host.copy_(tensor, non_blocking=True)
            out = torch.cuda.Event()
            out.record(self._side)
        saved = _Saved(host, out, tensor)
        self._order.append(saved)
        # Memory is free again when the copy is done: an unbounded stash would free none in time.
        for older in self._order[:-AHEAD]:
            if older.source is not None:
                older.out.synchronize()
                older.source = None
        return saved

    def _unpack(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # Backward runs against forward's order: what was saved before comes next.
        at = next((i for i, saved in enumerate(self._order) if saved is packed), None)
        if at is not None:
            for saved in self._order[max(0, at - AHEAD) : at]:
                self._fetch(saved)
            del self._order[at]
        self._fetch(packed)
        assert packed.back is not None
        assert packed.home is not None
        torch.cuda.current_stream().wait_event(packed.home)
        packed.back.record_stream(torch.cuda.current_stream())
        return packed.back

    def _fetch(self, saved: _Saved) -> None:
        """Begin to bring a tensor back, once."""
        if saved.back is not None:
            return
        saved.source = None
        with torch.cuda.stream(self._side):
            saved.back = saved.host.to("cuda", non_blocking=True)
            saved.home = torch.cuda.Event()
            saved.home.record(self._side)
