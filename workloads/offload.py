"""Where a training step's memory lies, and what it costs to put it elsewhere.

    chopper run offload
    chopper run offload --variants ddp,zero3,zero3-param-offload -- --sequence 256
    chopper run offload --ranks 8 -- --size 1b               # on GPUs

One model, one corpus, one seed; the losses of all variants agree. Per rank:

    ddp                      everything on every rank
    zero1, zero2, zero3      DeepSpeed: optimizer states, then gradients, then weights in parts
    zero2-offload            and the optimizer in host memory (ZeRO-Offload, arXiv 2101.06840)
    zero3-offload            the same with weights in parts
    zero3-param-offload      and the weights themselves
    fsdp1-offload            FullyShardedDataParallel with CPUOffload
    fsdp2-offload            fully_shard with CPUOffloadPolicy
    checkpoint               ddp, each block's forward run again in backward
    activation-offload       ddp, saved tensors copied to the host and back, synchronously
    activation-offload-overlap   the same on a side stream (GPUs only)

Stages partition, offload moves: they are independent, but offloading weights needs stage 3. All is in
float32, so that variants can be compared to the last digits: 4 bytes each for weight and gradient, 8
for AdamW's moments, and 4 more where DeepSpeed keeps a second copy of the weights it updates.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import chopper
from chopper.workloads import fsdp1, fsdp2, options
from chopper.workloads.llama import SIZES, Llama, initial_value, parameter_count, training_bytes
from chopper.workloads.machine import Needs, wait
from chopper.workloads.ranks import joined
from chopper.workloads.training import batches

LEARNING_RATE = 3e-4
BUCKET_ELEMENTS = 1_000_000
BYTES_PER_ADAM_UPDATE = 28
"""Read weight, gradient and two moments, write weight and moments, float32 (ZeRO-Offload's bound)."""


def needs(args: argparse.Namespace, _ranks: int, _device: str) -> Needs:
    """What the baseline takes, which keeps everything; on CPUs, what is offloaded stays here."""
    config = SIZES[args.size]
    return Needs(
        memory_bytes=training_bytes(
            config,
            ranks=1,
            batch=args.batch,
            sequence=args.sequence,
            element_bytes=4,
            checkpoint=False,
        )
        + 8 * parameter_count(config),
        what=f"--size {args.size} ({parameter_count(config) / 1e9:.2f} B parameters, batch "
        f"{args.batch}, sequence {args.sequence})",
        remedy="take a smaller size, batch or sequence",
    )


class Trainer:
    """A model and its optimizer behind four calls, so that one loop drives all variants."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(tokens)
        return logits

    def backward(self, loss: Tensor) -> None:
        """Gradients, reduced over the ranks."""
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def states(self) -> Iterable[Tensor]:
        """What the optimizer keeps: its moments, and copies of the weights of its own."""
        for state in self.optimizer.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))

    def weights(self) -> Iterable[Tensor]:
        """What of the model's weights is kept between steps."""
        yield from self.model.parameters()


class DeepSpeedTrainer(Trainer):
    """The same with DeepSpeed's engine."""

    def __init__(self, model: nn.Module, config: dict[str, object]) -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw(model), config=config
        )
        super().__init__(engine, optimizer)
        self.engine: Any = engine
        self.partitioned: Any = optimizer

    def backward(self, loss: Tensor) -> None:
        """Through the engine, which reduces into its partitions."""
        self.engine.backward(loss)

    def update(self) -> None:
        """Through the engine, which gathers the weights again."""
        self.engine.step()

    def states(self) -> Iterable[Tensor]:
        """The wrapped optimizer's states and the partitions of weights that it updates."""
        inner = self.partitioned.optimizer
        for state in inner.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))
        for group in inner.param_groups:
            yield from group["params"]
        # Stage 3 puts its parts into the groups for the update only.
        yield from getattr(self.partitioned, "fp32_partitioned_groups_flat", ())

    def weights(self) -> Iterable[Tensor]:
        """Whole weights, or this rank's parts of them with stage 3."""
        for weight in self.engine.module.parameters():
            part = getattr(weight, "ds_tensor", None)
            yield weight if part is None else part


def main() -> None:
    """Join the other ranks, train, leave."""
    # DeepSpeed calls what torch renamed, once per call.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    args = options.parse(options.OFFLOAD, prog="offload", description="Train, memory elsewhere.")
    with joined(args.device, prog="offload") as device:
        trainer = built(args, device)
        with chopper.profile(args.output) as prof:
            train(args, trainer, device, prof)


def built(args: argparse.Namespace, device: torch.device) -> Trainer:
    """The variant's model and optimizer."""
    variant = args.variant
    args.checkpoint = "full" if variant == "checkpoint" else "none"
    if variant == "fsdp1-offload":
        return Trainer(*fsdp1.sharded_model(args, device, offload=True))
    if variant == "fsdp2-offload":
        return Trainer(*fsdp2.sharded_model(args, device, offload=True))
    model = whole_model(args, device)
    if variant.startswith("zero"):
        return DeepSpeedTrainer(model, deepspeed_config(args))
    if variant == "checkpoint":
        for index, block in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(block)
    # Gradients lie in the buckets that are reduced, not there and in tensors of their own.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(wrapped, adamw(wrapped))


def whole_model(args: argparse.Namespace, device: torch.device) -> Llama:
    """All weights on this rank, the same on each."""
    model = Llama(SIZES[args.size]).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                initial_value(name, weight.shape, model.config, seed=args.seed, device=device)
            )
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every variant."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)


def deepspeed_config(args: argparse.Namespace) -> dict[str, object]:
    """DeepSpeed's configuration of a ``zero…`` variant."""
    zero: dict[str, object] = {
        "stage": int(args.variant[4]),
        # By default 5e8 elements each, which are allocated whatever the model: not for a small one.
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
    }
    if args.variant.endswith("-offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if args.variant == "zero3-param-offload":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": zero,
        # Torch's AdamW, as in all other variants: DeepSpeed's own would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def train(
    args: argparse.Namespace, trainer: Trainer, device: torch.device, prof: chopper.Profile
) -> None:
    """Train ``args.steps`` steps; rank 0 keeps what they took, and where the memory was."""
    saving = Saver(args.variant)
    losses: list[Tensor] = []
    periods_ns: list[int] = []
    updates_ns: list[int] = []
    begin_ns = time.perf_counter_ns()
    for tokens, labels in prof.watch(batches(args, device)):
        tokens, labels = tokens.to(device), labels.to(device)
        with saving:
            logits = trainer.forward(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        trainer.backward(loss)
        losses.append(loss.detach())
        del loss
        if len(losses) == args.steps:
            keep_memory(prof, args, trainer, saving.kept_bytes)
        update_ns = time.perf_counter_ns()
        trainer.update()
        wait(device)
        updates_ns.append(time.perf_counter_ns() - update_ns)
        prof.step(tokens=tokens.numel())
        periods_ns.append(time.perf_counter_ns() - begin_ns)
        begin_ns = time.perf_counter_ns()
    # The first step makes the optimizer's states.
    took_ns = statistics.median(periods_ns[1:] or periods_ns)
    updating_ns = statistics.median(updates_ns[1:] or updates_ns)
    bound_ns = update_bound_ns(trainer)
    if dist.get_rank():
        return
    for step, value in enumerate(torch.stack(losses).tolist()):
        prof.measure("loss", value, step=step)
    prof.measure("median_step_ns", took_ns)
    prof.measure("update_ns", updating_ns)
    prof.measure("update_bound_ns", bound_ns)
    print(f"{args.variant}: {took_ns / 1e9:.3f} s per step", flush=True)


class Saver:
    """What happens to tensors that forward saves for backward; counts them at their largest."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.kept_bytes = 0
        self._seen: set[int] = set()
        self._hooks: object = None

    def __enter__(self) -> None:
        self.kept_bytes = 0
        self._seen = set()
        self._inner: list[object] = []
        if self.variant == "activation-offload":
            self._inner.append(
                torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
            )
        elif self.variant == "activation-offload-overlap":
            from chopper.workloads.overlapped_offload import OverlappedOffload

            self._inner.append(OverlappedOffload())
        else:
            self._inner.append(torch.autograd.graph.saved_tensors_hooks(self._count, _same))
        for context in self._inner:
            context.__enter__()  # type: ignore[attr-defined]

    def __exit__(self, *failure: object) -> None:
        for context in reversed(self._inner):
            context.__exit__(*failure)  # type: ignore[attr-defined]

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.kept_bytes += storage.nbytes()
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def keep_memory(
    prof: chopper.Profile, args: argparse.Namespace, trainer: Trainer, activations_bytes: int
) -> None:
    """Measure what lives between backward and update, beside what the formulas say."""
    gc.collect()
    gradients = storages(w.grad for w in trainer.model.parameters() if w.grad is not None)
    weights = storages(trainer.weights())
    states = storages(trainer.states())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects that answer isinstance with a warning
        everything = storages(o for o in gc.get_objects() if isinstance(o, Tensor)) | gradients
    shared = set(weights) & set(states)  # the optimizer updates the weights themselves
    optimizer = {k: v for k, v in states.items() if k not in shared}
    rest = {k: v for k, v in everything.items() if k not in weights and k not in states}
    measured = {
        "weights": sum(weights.values()),
        "optimizer": sum(optimizer.values()),
        "gradients and buffers": sum(rest.values()),
    }
    if dist.get_rank():
        return
    count = parameter_count(SIZES[args.size])
    for category, per_weight in predicted(args.variant, dist.get_world_size()).items():
        prof.measure("predicted_bytes", per_weight * count, category=category)
        prof.measure("measured_bytes", measured[category], category=category)
    prof.measure("measured_bytes", activations_bytes, category="activations")


def predicted(variant: str, ranks: int) -> dict[str, float]:
    """Bytes per weight that each rank keeps, wherever: ZeRO's formulas (arXiv 1910.02054, table 1).

    In float32, K = 8 for AdamW's moments, and 12 where DeepSpeed updates copies of the weights.
    Gradients are those that a rank still holds when backward ends.
    """
    stage = int(variant[4]) if variant.startswith("zero") else 3 if "fsdp" in variant else 0
    k = 12 if variant.startswith("zero") else 8
    return {
        "weights": 4 / ranks if stage == 3 else 4,
        "optimizer": k / ranks if stage >= 1 else k,
        "gradients and buffers": 4 / ranks if stage >= 2 else 4,
    }


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each storage that tensors lie in, each once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def update_bound_ns(trainer: Trainer) -> float:
    """Least time of an update: its bytes over the bandwidth of the memory that they lie in."""
    size = 16 << 20
    a, b = torch.randn(size), torch.randn(size)
    copy: Callable[[], object] = lambda: b.copy_(a)  # noqa: E731
    copy()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        copy()
        times.append(time.perf_counter() - begin)
    bytes_per_s = 2 * 4 * size / min(times)
    # Two moments for each weight that this rank updates.
    moments = sum(s.numel() for s in trainer.states() if s.numel() > 1) / (
        3 if isinstance(trainer, DeepSpeedTrainer) else 2
    )
    return moments * BYTES_PER_ADAM_UPDATE / bytes_per_s * 1e9


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
