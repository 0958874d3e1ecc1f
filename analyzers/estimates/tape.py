"""A symbolic forward and backward pass: allocated, saved and freed bytes.

Operators are declared with the tensors that they read, write and keep for backward. Running them
forward and backward in order, with reference counts as an eager framework has them, gives the
peak and what it is made of; no tensor exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "temporary",
)
"""Purposes of bytes at the peak; temporary: gradients of activations, and workspaces."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory with a number of owners; freed with the last."""

    category: str
    size_bytes: int
    owners: int = 1
    stream: str = ""
    """That asked for it; a GPU's allocator gives its memory to no other."""


class Ledger:
    """Bytes by category now, and at the peak so far."""

    def __init__(self) -> None:
        self.now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.total_bytes = 0
        self.peak_bytes = 0
        self.peak: dict[str, int] = dict(self.now)
        self.peak_at = ""
        self.at = ""
        self.phases: dict[str, int] = {}
        """Peak of each phase."""
        self.streams: dict[str, int] = {}
        """Bytes of each other stream now."""
        self.streams_highest: dict[str, int] = {}
        self.streams_at_peak: dict[str, int] = {}

    def take(self, category: str, size_bytes: int, *, stream: str = "") -> Buffer:
        """Allocate, on the stream that computes or another."""
        self.now[category] += size_bytes
        self.total_bytes += size_bytes
        if stream:
            now = self.streams[stream] = self.streams.get(stream, 0) + size_bytes
            self.streams_highest[stream] = max(self.streams_highest.get(stream, 0), now)
        if self.total_bytes > self.phases.get(self.at, -1):
            self.phases[self.at] = self.total_bytes
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes
            self.peak = dict(self.now)
            self.peak_at = self.at
            self.streams_at_peak = dict(self.streams)
        return Buffer(category, size_bytes, stream=stream)

    def retain(self, buffer: Buffer) -> Buffer:
        """Add an owner."""
        buffer.owners += 1
        return buffer

    def drop(self, *buffers: Buffer | None) -> None:
        """Remove an owner of each; the last one frees it."""
        for buffer in buffers:
            if buffer is None:
                continue
            buffer.owners -= 1
            if buffer.owners == 0:
                self.now[buffer.category] -= buffer.size_bytes
                self.total_bytes -= buffer.size_bytes
                if buffer.stream:
                    self.streams[buffer.stream] -= buffer.size_bytes

    def turn(self, buffer: Buffer, category: str, size_bytes: int) -> Buffer:
        """Allocate the result of an operator on a buffer, and drop that."""
        result = self.take(category, size_bytes)
        self.drop(buffer)
        return result

    def apart_bytes(self) -> int:
        """Return bytes that other streams held at their highest but not at the peak of all."""
        highest = sum(self.streams_highest.values())
        return highest - sum(self.streams_at_peak.values())

    def spike(self, category: str, size_bytes: int) -> None:
        """Allocate and free at once."""
        self.drop(self.take(category, size_bytes))

    def retype(self, buffer: Buffer, category: str) -> None:
        """Count a buffer in another category from now on."""
        self.now[buffer.category] -= buffer.size_bytes
        self.now[category] += buffer.size_bytes
        buffer.category = category


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator of a block; sizes in bytes."""

    name: str
    reads: tuple[str, ...]
    writes: str
    size_bytes: int
    keeps: tuple[str, ...] = ()
    """Tensors of the block that backward needs."""
    keeps_extra_bytes: int = 0
    """Kept besides: statistics, copies in another type."""
    weights_count: int = 0
    """Parameters whose gradient backward makes."""
    forward_bytes: int = 0
    """Workspace of the forward."""
    backward_bytes: int = 0
    """Workspace of the backward."""
    passes: bool = False
    """Backward hands its gradient on without a copy (an addition)."""
    view: bool = False
    """The output is the input's memory."""
    saved: bool = False
    """Selective recomputation: the output is kept rather than computed again."""
    expert: bool = False
    """The weights are experts'."""
    category: str = ""
    """Of the output; none: as the block's."""


@dataclass(slots=True)
class Kept:
    """Tensors that the forward of a block left for its backward."""

    tensors: dict[str, Buffer] = field(default_factory=dict)
    extra: dict[int, Buffer] = field(default_factory=dict)


def forward(
    ledger: Ledger,
    ops: Sequence[Op],
    inputs: Mapping[str, Buffer],
    *,
    keep: bool,
    have: Mapping[str, Buffer] | None = None,
) -> tuple[Buffer, Kept]:
    """Run operators in order; tensors live until their last reader, or for backward.

    The caller owns the `inputs`. With `keep`, what backward needs is held. `have`
    are outputs that were kept by selective recomputation and are not made again; taken over.

    Returns:
        The result, owned by the caller, and what is kept.
    """
    readers = Counter(name for op in ops for name in op.reads)
    live: dict[str, Buffer] = {name: ledger.retain(b) for name, b in inputs.items()}
    saved = Kept()
    have = have or {}
    for i, op in enumerate(ops):
        if op.writes in have:
            live[op.writes] = have[op.writes]
        elif op.view:
            live[op.writes] = ledger.retain(live[op.reads[0]])
        else:
            if op.forward_bytes:
                ledger.spike("temporary", op.forward_bytes + op.size_bytes)
            live[op.writes] = ledger.take(op.category or "activations", op.size_bytes)
        if keep:
            for name in op.keeps:
                if name not in saved.tensors:
                    saved.tensors[name] = ledger.retain(live[name])
            if op.keeps_extra_bytes:
                saved.extra[i] = ledger.take("activations", op.keeps_extra_bytes)
        for name in op.reads:
            readers[name] -= 1
            if readers[name] == 0:
                ledger.drop(live.pop(name))
    result = live.pop(ops[-1].writes)
    # Given but never read.
    ledger.drop(*(buffer for name, buffer in live.items() if name in inputs))
    return result, saved


def backward(
    ledger: Ledger,
    ops: Sequence[Op],
    saved: Kept,
    gradient: Buffer,
    *,
    x_bytes: int,
    gradient_bytes: int = 0,
    arrived: Callable[[int, Buffer], None] | None = None,
) -> tuple[Buffer, list[Buffer]]:
    """Run the operators' backward in reverse; saved tensors are freed after their last use.

    The `gradient` of the result is taken over. `x_bytes` are those of the gradient of x, the
    block's input, `gradient_bytes` those of one parameter's. `arrived` takes over each weight's
    gradient as it is made, with its operator's number.

    Returns:
        Gradients of x, and of the weights that were not taken over.
    """
    last_use: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in op.keeps:
            last_use.setdefault(name, i)
    sizes = {"x": x_bytes} | {op.writes: op.size_bytes for op in ops}
    gradients: dict[str, Buffer] = {ops[-1].writes: gradient}
    weights: list[Buffer] = []
    for i, op in reversed(list(enumerate(ops))):
        incoming = gradients.pop(op.writes)
        if op.backward_bytes:
            ledger.spike("temporary", op.backward_bytes)
        for name in op.reads:
            if name not in sizes:
                continue
            if op.passes or op.view:
                outgoing = ledger.retain(incoming)
            else:
                outgoing = ledger.take("temporary", sizes[name])
            before = gradients.get(name)
            if before is None:
                gradients[name] = outgoing
            else:
                # Two readers: their gradients are added into a new tensor.
                gradients[name] = ledger.turn(before, "temporary", sizes[name])
                ledger.drop(outgoing)
        weight = None
        if op.weights_count:
            weight = ledger.take("gradients", op.weights_count * gradient_bytes)
        ledger.drop(incoming, saved.extra.pop(i, None))
        for name in op.keeps:
            if last_use[name] == i:
                ledger.drop(saved.tensors.pop(name, None))
        if weight is not None and arrived is not None:
            arrived(i, weight)
        elif weight is not None:
            weights.append(weight)
    return gradients["x"], weights
