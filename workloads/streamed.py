"""Training of a model that no memory holds whole: its layers stay on disk and come one by one.

    forward:  read a layer, run it without a graph, keep its input
    backward: read a layer, run it again, backpropagate, update it on the host, write it back

A thread reads the next layer, and writes the last one, while this one computes (after
ZeRO-Infinity, arXiv 2104.07857; the update is part of backward). Embedding, last norm and head stay
in memory. With several ranks each has its own copy on disk, and gradients are averaged.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chopper.errors import reason_of
from chopper.models.architectures import Architecture
from chopper.workloads.llama import SIZES, Llama, initial_value, optimizer_of, rotary_table
from chopper.workloads.offload_trainers import Trainer
from chopper.workloads.placement import scratch_of

PAGE_BYTES = 4096
"""Direct transfers to disk begin and end at its multiples, in the file and in memory."""
MOST_BYTES = 1 << 30
"""Of one system call."""


class Store:
    """A file without a name, gone with the process however that ends; past the page cache."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.read_bytes = self.written_bytes = 0
        self._directory = directory
        self._file, name = tempfile.mkstemp(prefix="chopper-weights-", dir=directory)
        Path(name).unlink()
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        with contextlib.suppress(OSError):  # a file system without: through the page cache
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.truncate(self._file, size_bytes)  # what was never written is zero, as moments begin

    def read(self, into: memoryview, at: int) -> None:
        """Fill a buffer from a place in the file."""
        self._transfer(os.preadv, into, at)
        self.read_bytes += len(into)

    def write(self, data: memoryview, at: int) -> None:
        """Write a buffer at a place in the file."""
        self._transfer(os.pwritev, data, at)
        self.written_bytes += len(data)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], data: memoryview, at: int
    ) -> None:
        done = 0
        try:
            while done < len(data):
                done += call(self._file, [data[done : done + MOST_BYTES]], at + done)
        except OSError as exc:  # full, say
            raise SystemExit(
                f"offload: {self._directory}: layers cannot be kept there ({reason_of(exc)}); "
                "choose another --scratch"
            ) from exc


def padded(size_bytes: int) -> int:
    """Return a size rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Slot:
    """Memory of one module: weights, then moments, in one piece on the host; the device's weights.

    On a CPU host and device are the same memory: the module's weights are views of that piece.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype, moments: int, device: torch.device
    ) -> None:
        self.module = module
        self.layer = -1
        """Which is here; -1: none."""
        self.whole = False
        """Its moments are here, too."""
        self.arrival: Future[None] | None = None
        """Of what is here, when it comes from disk."""
        self.shapes = {name: weight.shape for name, weight in module.named_parameters()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        own_bytes = sum(sizes) * dtype.itemsize
        self.weights_bytes = padded(own_bytes)
        self.whole_bytes = padded((1 + moments) * own_bytes)
        # Direct transfers need memory that begins with a page.
        raw = torch.zeros(
            self.whole_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.piece = raw[-raw.data_ptr() % PAGE_BYTES :][: self.whole_bytes]
        weights, *self.moments = (
            self.piece[: (1 + moments) * own_bytes].view(dtype).chunk(1 + moments)
        )
        self.flat = nn.Parameter(weights, requires_grad=False)
        """What the optimizer updates."""
        self.on_device = weights.to(device)
        self.gradient = torch.zeros_like(self.on_device)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        parts = zip(self.on_device.split(sizes), self.gradient.split(sizes), strict=True)
        for (name, shape), (weight, gradient) in zip(self.shapes.items(), parts, strict=True):
            owner, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(weight.view(shape))
            setattr(module.get_submodule(owner), leaf, parameter)
            self._gradients.append((parameter, gradient.view(shape)))

    def parts(self) -> Iterable[tuple[str, Tensor]]:
        """Names of the weights, and where they are on the host."""
        pieces = self.flat.detach().split([shape.numel() for shape in self.shapes.values()])
        for (name, shape), part in zip(self.shapes.items(), pieces, strict=True):
            yield name, part.view(shape)

    def view(self, *, whole: bool) -> memoryview:
        """The part that is transferred: weights with moments, or weights alone."""
        piece: memoryview = self.piece.numpy().data
        return piece[: None if whole else self.weights_bytes]

    def to_device(self) -> None:
        """Copy the weights there; the piece may be written again when it returns."""
        if self.on_device.is_cuda:
            self.on_device.copy_(self.flat)
            torch.cuda.synchronize(self.on_device.device)

    def ready(self) -> None:
        """Let backward add up gradients in their piece, from zero."""
        self.gradient.zero_()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class StreamedTrainer(Trainer):
    """A model whose layers are on disk, behind the calls of the other variants."""

    def __init__(
        self,
        config: Architecture,
        device: torch.device,
        *,
        dtype: torch.dtype,
        optimizer: str,
        directory: Path,
        seed: int,
    ) -> None:
        self.config, self._device = config, device
        moments = 2 if optimizer == "adamw" else 0
        with torch.device("meta"):
            ends = Llama(config)
        modules = (ends, *ends.layers[:2])
        ends.layers = nn.ModuleList()
        slots = [Slot(m, dtype=dtype, moments=moments, device=device) for m in modules]
        self._llama, self._ends, self._slots = ends, slots[0], slots[1:]
        super().__init__(ends, optimizer_of(optimizer, [slot.flat for slot in slots]))
        for slot in slots if moments else ():
            self.optimizer.state[slot.flat] = {
                "step": torch.zeros(()),
                "exp_avg": slot.moments[0],
                "exp_avg_sq": slot.moments[1],
            }
        self._steps_count = 0
        layer = self._slots[0]
        self.on_disk_bytes = {
            "weights": config.layers_count * layer.flat.nbytes,
            "optimizer": config.layers_count * moments * layer.flat.nbytes,
        }
        self.kept_bytes = 0
        """Inputs of the last forward's layers."""
        self._inputs: list[Tensor] = []
        self.store = Store(directory, config.layers_count * layer.whole_bytes)
        self._worker = ThreadPoolExecutor(1, "disk")
        self._under_way: list[Future[None]] = []
        self._initialize(seed)

    def _initialize(self, seed: int) -> None:
        """Draw the same values as the other variants do, several tensors at a time."""

        def fill(slot: Slot, prefix: str) -> None:
            def draw(part: tuple[str, Tensor]) -> None:
                name, into = part
                into.copy_(
                    initial_value(
                        prefix + name,
                        into.shape,
                        self.config,
                        seed=seed,
                        device=self._device,
                    )
                )

            for _ in pool.map(draw, slot.parts()):
                pass

        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            fill(self._ends, "")
            self._ends.to_device()
            for layer in range(self.config.layers_count):
                slot = self._slots[layer % 2]
                self._wait(1)
                fill(slot, f"layers.{layer}.")
                slot.layer, slot.whole = layer, False
                self._submit(self.store.write, layer, whole=False)
        self._wait()
        self.store.written_bytes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, through all layers from disk."""
        self._tokens, self._inputs = tokens, []
        with torch.no_grad():
            x: Tensor = self._llama.embedding(tokens)
            self._tables = rotary_table(
                self.config, tokens.shape[1], device=tokens.device, dtype=x.dtype
            )
            for layer in range(self.config.layers_count):
                block = self._loaded(layer, layer + 1, whole=False).module
                self._inputs.append(x)
                x = block(x, *self._tables)
        self.kept_bytes = sum(each.nbytes for each in self._inputs)
        self._last = x.requires_grad_()
        self._ends.ready()
        logits: Tensor = self._llama.head(self._llama.norm(self._last))
        return logits

    def backward(self, loss: Tensor) -> None:
        """Gradients of one layer after the other, each followed by its update."""
        loss.backward()
        gradient = self._last.grad
        del self._last
        for layer in reversed(range(self.config.layers_count)):
            slot = self._loaded(layer, layer - 1, whole=True)
            slot.ready()
            x = self._inputs.pop().requires_grad_()
            slot.module(x, *self._tables).backward(gradient)
            gradient = x.grad
            self._update(slot)
            self._submit(self.store.write, layer, whole=True)
        self._llama.embedding(self._tokens).backward(gradient)
        self._update(self._ends)
        self._ends.to_device()

    def update(self) -> None:
        """Wait for the disk: every layer was updated within backward."""
        self._wait()
        self._steps_count += 1

    def gradients(self) -> Iterable[Tensor]:
        """None is left when backward ends: layers share their buffers."""
        return ()

    def states(self) -> Iterable[Tensor]:
        """None is in memory but those in transfer, and those of the ends."""
        return ()

    def weights(self) -> Iterable[Tensor]:
        """None is in memory but those in transfer, and those of the ends."""
        return ()

    def _update(self, slot: Slot) -> None:
        if dist.get_world_size() > 1:
            dist.all_reduce(slot.gradient)
            slot.gradient /= dist.get_world_size()
        state = self.optimizer.state.get(slot.flat, {})
        if "step" in state:
            state["step"].fill_(self._steps_count)
        slot.flat.grad = slot.gradient.to(slot.flat.device)
        # Of the slots, only this one has a gradient.
        self.optimizer.step()
        slot.flat.grad = None

    def _loaded(self, layer: int, following: int, *, whole: bool) -> Slot:
        """Return the slot that holds a layer; the following one is read meanwhile."""
        self._read(layer, whole=whole)
        slot = self._slots[layer % 2]
        if slot.arrival is not None:
            slot.arrival.result()
        slot.to_device()
        if 0 <= following < self.config.layers_count:
            self._read(following, whole=whole)
        return slot

    def _read(self, layer: int, *, whole: bool) -> None:
        slot = self._slots[layer % 2]
        if slot.layer != layer or slot.whole < whole:
            slot.layer, slot.whole = layer, whole
            slot.arrival = self._submit(self.store.read, layer, whole=whole)

    def _submit(
        self, transfer: Callable[[memoryview, int], None], layer: int, *, whole: bool
    ) -> Future[None]:
        """Queue a transfer of a layer: one after the other, in this order."""
        slot = self._slots[layer % 2]
        piece, at = slot.view(whole=whole), layer * slot.whole_bytes
        self._under_way.append(self._worker.submit(transfer, piece, at))
        return self._under_way[-1]

    def _wait(self, but: int = 0) -> None:
        """Wait for the transfers, but for the last so many."""
        while len(self._under_way) > but:
            self._under_way.pop(0).result()


def built(args: argparse.Namespace, device: torch.device) -> StreamedTrainer:
    """The variant's model and optimizer."""
    return StreamedTrainer(
        SIZES[args.size],
        device,
        dtype=getattr(torch, args.dtype),
        optimizer=args.optimizer,
        directory=scratch_of(args.scratch),
        seed=args.seed,
    )
