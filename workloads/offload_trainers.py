"""Models and optimizers of the workload ``offload``, each variant's behind the same few calls."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chopper.errors import reason_of
from chopper.models.architectures import Architecture
from chopper.workloads import placement as formulas
from chopper.workloads.llama import (
    SIZES,
    Llama,
    initial_value,
    optimizer_of,
    recompute,
    rotary_table,
)
from chopper.workloads.placement import PLACEMENTS, Placement, scratch_of

PAGE_BYTES = 4096
"""Direct transfers to disk begin and end at its multiples, in the file and in memory."""
MOST_BYTES = 1 << 30
"""Of one system call."""


class Trainer:
    """A model and its optimizer behind four calls, so that one loop drives all variants."""

    autocast = False
    """Products of forward are in bfloat16, their weights in float32."""
    on_disk_bytes: Mapping[str, int] = MappingProxyType({})
    """Category → bytes of states on disk."""
    kept_bytes = 0
    """Activations of the last forward that autograd does not know of."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits: Tensor = self.model(tokens)
        return logits

    def backward(self, loss: Tensor) -> None:
        """Gradients, reduced over the ranks."""
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> Iterable[Tensor]:
        """Gradients that are left when backward ends."""
        yield from (w.grad for w in self.model.parameters() if w.grad is not None)

    def states(self) -> Iterable[Tensor]:
        """Tensors that the optimizer keeps: its moments, and copies of the weights of its own."""
        for state in self.optimizer.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))

    def weights(self) -> Iterable[Tensor]:
        """Weights of the model that are kept between steps."""
        yield from self.model.parameters()

    def staging(self) -> Iterable[Tensor]:
        """Buffers in host memory that tensors travel through."""
        return ()


class DeepSpeedTrainer(Trainer):
    """The same with DeepSpeed's engine."""

    def __init__(
        self, model: nn.Module, optimizer: str, config: dict[str, object], *, core: bool
    ) -> None:
        # One of its optimizers is decorated by torch.compile, which would load Inductor.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # On CPUs it would compile an operator for inference, at each first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        weights = model.parameters()
        inner = host_adam(weights) if core else optimizer_of(optimizer, weights)
        engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=inner, config=config)
        super().__init__(engine, inner)
        self.engine: Any = engine
        self.partitioned: Any = optimizer

    def backward(self, loss: Tensor) -> None:
        """Through the engine, which reduces into its partitions."""
        self.engine.backward(loss)

    def update(self) -> None:
        """Through the engine, which gathers the weights again."""
        self.engine.step()

    def gradients(self) -> Iterable[Tensor]:
        """Whole ones, and this rank's partitions, on the device and for the host's update."""
        yield from super().gradients()
        optimizer = self.partitioned
        for group in getattr(optimizer, "averaged_gradients", {}).values():
            yield from group or ()
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            yield from (p.grad for p in getattr(optimizer, name, ()) if p.grad is not None)
        flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
        yield from () if flat is None else (flat,)

    def states(self) -> Iterable[Tensor]:
        """The wrapped optimizer's states and the partitions of weights that it updates."""
        yield from super().states()
        for group in self.optimizer.param_groups:
            yield from group["params"]
        # Stage 3 puts its parts into the groups for the update only.
        yield from getattr(self.partitioned, "fp32_partitioned_groups_flat", ())

    def weights(self) -> Iterable[Tensor]:
        """Whole weights, or this rank's parts of them with stage 3."""
        for weight in self.engine.module.parameters():
            part = getattr(weight, "ds_tensor", None)
            yield weight if part is None else part

    def staging(self) -> Iterable[Tensor]:
        """Stages 1 and 2: one for updated weights, one for a gradient."""
        yield from getattr(self.partitioned, "param_buffer_of_bit16_for_cpu_offload_groups", ())
        gradient = getattr(self.partitioned, "temp_grad_buffer_for_cpu_offload", None)
        yield from () if gradient is None else (gradient,)


def host_adam(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam with AdamW's numbers; compiled when it is first used on a machine."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        made: torch.optim.Optimizer = DeepSpeedCPUAdam(
            weights, lr=3e-4, weight_decay=0.1, adamw_mode=True
        )
    except (RuntimeError, OSError) as exc:
        why = str(exc).splitlines()[0]
        raise SystemExit(f"offload: DeepSpeedCPUAdam cannot be built here: {why}") from exc
    return made


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
        self.with_moments = False
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

    def view(self, *, with_moments: bool) -> memoryview:
        """The part that is transferred: weights with moments, or weights alone."""
        piece: memoryview = self.piece.numpy().data
        return piece[: None if with_moments else self.weights_bytes]

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
    """A model that no memory holds whole: its layers stay on disk and come one by one.

        forward:  read a layer, run it without a graph, keep its input
        backward: read a layer, run it again, backpropagate, update it on the host, write it back

    A thread reads the next layer, and writes the last one, while this one computes (after
    ZeRO-Infinity, arXiv 2104.07857; the update is part of backward). Embedding, last norm and head
    stay in memory. With several ranks each has its own copy on disk, and gradients are averaged.
    """

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
                slot.layer, slot.with_moments = layer, False
                self._submit(self.store.write, layer, with_moments=False)
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
                block = self._loaded(layer, layer + 1, with_moments=False).module
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
            slot = self._loaded(layer, layer - 1, with_moments=True)
            slot.ready()
            x = self._inputs.pop().requires_grad_()
            slot.module(x, *self._tables).backward(gradient)
            gradient = x.grad
            self._update(slot)
            self._submit(self.store.write, layer, with_moments=True)
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

    def _loaded(self, layer: int, following: int, *, with_moments: bool) -> Slot:
        """Return the slot that holds a layer; the following one is read meanwhile."""
        self._read(layer, with_moments=with_moments)
        slot = self._slots[layer % 2]
        if slot.arrival is not None:
            slot.arrival.result()
        slot.to_device()
        if 0 <= following < self.config.layers_count:
            self._read(following, with_moments=with_moments)
        return slot

    def _read(self, layer: int, *, with_moments: bool) -> None:
        slot = self._slots[layer % 2]
        if slot.layer != layer or slot.with_moments < with_moments:
            slot.layer, slot.with_moments = layer, with_moments
            slot.arrival = self._submit(self.store.read, layer, with_moments=with_moments)

    def _submit(
        self, transfer: Callable[[memoryview, int], None], layer: int, *, with_moments: bool
    ) -> Future[None]:
        """Queue a transfer of a layer: one after the other, in this order."""
        slot = self._slots[layer % 2]
        piece, at = slot.view(with_moments=with_moments), layer * slot.whole_bytes
        self._under_way.append(self._worker.submit(transfer, piece, at))
        return self._under_way[-1]

    def _wait(self, but: int = 0) -> None:
        """Wait for all transfers but the last ``but``."""
        while len(self._under_way) > but:
            self._under_way.pop(0).result()


def built(args: argparse.Namespace, device: torch.device) -> Trainer:
    """The variant's model and optimizer."""
    placement = PLACEMENTS[args.variant]
    if placement.on_disk:
        return StreamedTrainer(
            SIZES[args.size],
            device,
            dtype=getattr(torch, args.dtype),
            optimizer=args.optimizer,
            directory=scratch_of(args.scratch),
            seed=args.seed,
        )
    args.checkpoint = "full" if placement.checkpoint else "none"
    if placement.strategy == "fsdp2":
        # Loaded for this variant alone: it takes as long as its steps.
        from chopper.workloads import fsdp2

        sharded, _ = fsdp2.sharded_model(args, device, offload=True)
        return Trainer(sharded, optimizer_of(args.optimizer, sharded.parameters()))
    model = whole_model(args, device)
    if placement.deepspeed:
        config = deepspeed_config(args, placement)
        return DeepSpeedTrainer(model, args.optimizer, config, core=placement.core)
    if placement.checkpoint:
        recompute(model)
    # Gradients lie in the buckets that are reduced, not there and in tensors of their own.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    trainer = Trainer(wrapped, optimizer_of(args.optimizer, wrapped.parameters()))
    trainer.autocast = args.dtype == "bfloat16"
    return trainer


def whole_model(args: argparse.Namespace, device: torch.device) -> Llama:
    """All weights on this rank, the same on each."""
    model = Llama(SIZES[args.size]).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                initial_value(name, weight.shape, model.config, seed=args.seed, device=device)
            )
    return model


def deepspeed_config(args: argparse.Namespace, placement: Placement) -> dict[str, object]:
    """DeepSpeed's configuration of a ``zero…`` variant."""
    zero: dict[str, object] = {
        "stage": placement.stage,
        # By default 5e8 elements each, which are allocated whatever the model: not for a small one.
        "reduce_bucket_size": formulas.BUCKET_ELEMENTS,
        "allgather_bucket_size": formulas.BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": formulas.BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": formulas.PERSISTENT_ELEMENTS,  # its default
    }
    if "optimizer" in placement.on_host:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if placement.core:
        zero["overlap_comm"] = True
    if "weights" in placement.on_host:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": zero,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        # The optimizer that it is given, also on the host.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        # By default 1.0: no other variant clips, and losses would part by 0.6 % in a dozen steps.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
