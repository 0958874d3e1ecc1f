"""Where a training step's memory lies, and what it costs to put it elsewhere.

    chopper run offload
    chopper run offload --variants all
    chopper run offload --variants ddp,zero3,zero3-param-offload -- --sequence 256
    chopper run offload --ranks 8 -- --size 1b               # on GPUs

One model, one corpus, one seed; the losses of all variants agree. Per rank:

    ddp                      everything on every rank
    zero1, zero2, zero3      DeepSpeed: optimizer states, then gradients, then weights in parts
    zero1-offload, zero2-offload, zero3-offload
                             and the optimizer in host memory (ZeRO-Offload, arXiv 2101.06840)
    zero3-param-offload      and the weights themselves
    fsdp1-offload            FullyShardedDataParallel with CPUOffload
    fsdp2-offload            fully_shard with CPUOffloadPolicy
    checkpoint               ddp, each block's forward run again in backward
    activation-offload       ddp, saved tensors copied to the host and back, synchronously
    activation-offload-overlap   the same on a side stream (GPUs only)
    unified                  ddp, everything in pages that host and device share (GPUs only)

Stages partition, offload moves: they are independent, but offloading weights needs stage 3. All is in
float32, so that variants can be compared to the last digits: 4 bytes each for weight and gradient, 8
for AdamW's moments, and 4 more where DeepSpeed keeps a second copy of the weights it updates.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import chopper
from chopper.analyzers.estimates.memory import Memory
from chopper.analyzers.estimates.memory import memory as estimated_memory
from chopper.models.architectures import Architecture
from chopper.workloads import managed, membw, options, places
from chopper.workloads.llama import SIZES, Llama, LlamaConfig, initial_value, parameter_count
from chopper.workloads.machine import Needs, wait
from chopper.workloads.offload_memory import Saver, live
from chopper.workloads.places import PLACES, Place
from chopper.workloads.ranks import joined
from chopper.workloads.training import batches

LEARNING_RATE = 3e-4
BYTES_PER_ADAM_UPDATE = 28
"""Read weight, gradient and two moments, write weight and moments, float32 (ZeRO-Offload's bound)."""
TRACED = (2, 5)
"""Steps that are traced; those after them are timed."""
STREAM_BYTES = 64 << 20
"""Of each of triad's arrays: more than caches hold."""
STREAM_REPEATS = 5
MIGRATED_BYTES = 256 << 20


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """What the most demanding variant takes; on CPUs, what is offloaded stays here.

    Raises:
        UsageError: ``--fits`` names no device and no size, or ``--host`` no size.
    """
    places.capacity_bytes(args.fits)
    places.host_bytes(args.host)
    config = SIZES[args.size]
    absent = dict.fromkeys((v for v in args.variants if PLACES[v].managed), managed.problem())
    if importlib.util.find_spec("deepspeed") is None:
        lacking = "needs deepspeed, which is not installed: pip install deepspeed"
        absent |= dict.fromkeys((v for v in args.variants if PLACES[v].deepspeed), lacking)
    found = {
        v: estimated(args, PLACES[v], ranks, device) for v in args.variants if absent.get(v) is None
    }
    sizes = {v: m.peak_bytes + (m.host_bytes if device == "cpu" else 0) for v, m in found.items()}
    most = max(sizes, key=lambda v: sizes[v], default="ddp")
    return Needs(
        memory_bytes=sizes.get(most, 0),
        what=f"{most} with --size {args.size} ({parameter_count(config) / 1e9:.2f} B parameters, "
        f"batch {args.batch}, sequence {args.sequence})",
        remedy="take a smaller size, batch or sequence, or --variants that keep less",
        absent={v: why for v, why in absent.items() if why is not None},
    )


def architecture(name: str, config: LlamaConfig) -> Architecture:
    """The model as estimates know it."""
    return Architecture(
        name=name,
        layers_count=config.layer_count,
        width=config.dim,
        heads_count=config.head_count,
        kv_heads_count=config.kv_head_count,
        head_width=config.head_dim,
        ffn_width=config.ffn_dim,
        vocabulary_count=config.vocabulary,
    )


def estimated(args: argparse.Namespace, place: Place, ranks: int, device: str) -> Memory:
    """``chopper estimate memory`` for what a variant runs here."""
    return estimated_memory(
        places.training(
            place,
            architecture(args.size, SIZES[args.size]),
            ranks=ranks,
            batch=args.batch,
            sequence=args.sequence,
            precision="fp32",
            kernels="cpu" if device == "cpu" else "gpu",
            bucket=places.BUCKET_ELEMENTS,
        )
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

    def gradients(self) -> Iterable[Tensor]:
        """What is left of gradients when backward ends."""
        yield from (w.grad for w in self.model.parameters() if w.grad is not None)

    def states(self) -> Iterable[Tensor]:
        """What the optimizer keeps: its moments, and copies of the weights of its own."""
        for state in self.optimizer.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))

    def weights(self) -> Iterable[Tensor]:
        """What of the model's weights is kept between steps."""
        yield from self.model.parameters()

    def staging(self) -> Iterable[Tensor]:
        """Buffers in host memory that tensors travel through."""
        return ()


class DeepSpeedTrainer(Trainer):
    """The same with DeepSpeed's engine."""

    def __init__(self, model: nn.Module, config: dict[str, object]) -> None:
        # One of its optimizers is decorated by torch.compile, which would load Inductor.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # On CPUs it would compile an operator for inference, at each first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        inner = adamw(model)
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
        found = self.partitioned
        for group in getattr(found, "averaged_gradients", {}).values():
            yield from group or ()
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            yield from (p.grad for p in getattr(found, name, ()) if p.grad is not None)
        flat = getattr(found, "grad_partitions_flat_buffer", None)
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


def main() -> None:
    """Join the other ranks, train, leave."""
    # DeepSpeed calls what torch renamed, once per call.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    args = options.parse(options.OFFLOAD, prog="offload", description="Train, memory elsewhere.")
    place = PLACES[args.variant]
    with joined(args.device, prog="offload") as device, memory_of(place, device) as shared:
        trainer = built(args, device)
        traced = TRACED if args.steps > TRACED[1] + 1 else None
        with chopper.profile(args.output, steps=traced, memory=args.allocations == "yes") as prof:
            train(args, trainer, device, prof)
            if shared is not None:
                keep_unified(prof, shared, device)


@contextlib.contextmanager
def memory_of(place: Place, device: torch.device) -> Iterator[managed.Managed | None]:
    """Unified memory for the variant that wants it, else torch's own."""
    if not place.managed:
        yield None
        return
    try:
        with managed.pool(device) as shared:
            yield shared
    except managed.Unavailable as exc:
        raise SystemExit(f"offload: {exc}") from exc


def built(args: argparse.Namespace, device: torch.device) -> Trainer:
    """The variant's model and optimizer."""
    place = PLACES[args.variant]
    args.checkpoint = "full" if place.checkpoint else "none"
    # What only some variants need is loaded for them: it takes as long as their steps.
    if place.strategy == "fsdp1":
        from chopper.workloads import fsdp1

        if device.type == "cpu":
            # FSDP1 pins what it offloads without asking for what, and waits for streams; on the CPU
            # nothing is there to read pinned memory, and torch's stand-in for a stream cannot wait.
            torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
            torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
        return Trainer(*fsdp1.sharded_model(args, device, offload=True))
    if place.strategy == "fsdp2":
        from chopper.workloads import fsdp2

        return Trainer(*fsdp2.sharded_model(args, device, offload=True))
    model = whole_model(args, device)
    if place.deepspeed:
        return DeepSpeedTrainer(model, deepspeed_config(args, place))
    if place.checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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


def deepspeed_config(args: argparse.Namespace, place: Place) -> dict[str, object]:
    """DeepSpeed's configuration of a ``zero…`` variant."""
    zero: dict[str, object] = {
        "stage": place.stage,
        # By default 5e8 elements each, which are allocated whatever the model: not for a small one.
        "reduce_bucket_size": places.BUCKET_ELEMENTS,
        "allgather_bucket_size": places.BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": places.BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": places.PERSISTENT_ELEMENTS,  # its default
    }
    if "optimizer" in place.on_host:
        zero["offload_optimizer"] = {"device": "cpu"}
    if "weights" in place.on_host:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": zero,
        # Torch's AdamW, as in all other variants: DeepSpeed's own would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        # By default 1.0: no other variant clips, and losses would part by 0.6 % within a dozen steps.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }


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


def train(
    args: argparse.Namespace, trainer: Trainer, device: torch.device, prof: chopper.Profile
) -> None:
    """Train ``args.steps`` steps; rank 0 keeps what they took, and where the memory was."""
    place = PLACES[args.variant]
    saving = Saver(place, device)
    clock = UpdateClock(trainer.optimizer, device)
    losses: list[Tensor] = []
    periods_ns: list[int] = []
    updates_ns: list[int] = []
    begin_ns = time.perf_counter_ns()
    for step, (tokens, labels) in enumerate(prof.watch(batches(args, device))):
        clock.running, clock.taken_ns = step >= TRACED[1] or args.steps <= TRACED[1], 0
        tokens, labels = tokens.to(device), labels.to(device)
        if step == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the model was made whole at first
        with saving.forward():
            logits = trainer.forward(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        trainer.backward(loss)
        losses.append(loss.detach())
        del loss
        if step == args.steps - 1:
            keep_memory(prof, args, trainer, saving, device)
        trainer.update()
        wait(device)
        prof.step(tokens=tokens.numel())
        periods_ns.append(time.perf_counter_ns() - begin_ns)
        updates_ns.append(clock.taken_ns)
        begin_ns = time.perf_counter_ns()
    # Traced steps are slow, the first one makes the optimizer's states, the last one's memory is counted.
    timed = slice(TRACED[1], -1) if args.steps > TRACED[1] + 1 else slice(1, None)
    updated_ns = statistics.median(updates_ns[timed] or updates_ns)
    # All ranks at once, as they update: they share the memory's bandwidth.
    dist.barrier()
    triad_bytes_per_s = memory_bytes_per_s(device, place)
    if dist.get_rank():
        return
    for step, value in enumerate(torch.stack(losses).tolist()):
        prof.measure("loss", value, step=step)
    timed_ns = periods_ns[timed] or periods_ns
    period_ns = statistics.median(timed_ns)
    prof.measure("median_step_ns", period_ns)
    if len(timed_ns) > 1:
        prof.measure("step_cv_ratio", statistics.stdev(timed_ns) / statistics.fmean(timed_ns))
    prof.measure("parameters_count", parameter_count(SIZES[args.size]))
    prof.measure("update_ns", updated_ns)
    bound_ns = updated_count(trainer) * BYTES_PER_ADAM_UPDATE / triad_bytes_per_s * 1e9
    prof.measure("update_bound_ns", bound_ns)
    prof.measure("update_over_bound_ratio", updated_ns / bound_ns)
    prof.measure("triad_bytes_per_s", triad_bytes_per_s)
    print(f"{args.variant}: {period_ns / 1e9:.3f} s per step", flush=True)


def memory_bytes_per_s(device: torch.device, place: Place) -> float:
    """Bandwidth of the memory that the optimizer's states lie in: triad's (STREAM), or more in place.

    Triad's stores may read what they only write, which STREAM does not count; an update, as triad in
    place, writes what it has read.
    """
    where = torch.device("cpu") if "optimizer" in place.on_host else device
    a, b, c = (torch.ones(STREAM_BYTES // 4, device=where) for _ in range(3))
    moved = 3 * STREAM_BYTES
    return max(
        moved / membw.median_time_s(call, STREAM_REPEATS, moved, where)
        for call in (
            lambda: torch.add(b, c, alpha=3.0, out=a),
            lambda: torch.add(a, b, alpha=3.0, out=a),
        )
    )


def updated_count(trainer: Trainer) -> int:
    """Weights that this rank updates: each has one first moment."""
    moments = (state["exp_avg"] for state in trainer.optimizer.state.values() if state)
    return sum((m.to_local() if hasattr(m, "to_local") else m).numel() for m in moments)


def keep_memory(
    prof: chopper.Profile,
    args: argparse.Namespace,
    trainer: Trainer,
    saving: Saver,
    device: torch.device,
) -> None:
    """Measure what lives between backward and update, and lived before it, beside what was said."""
    place, ranks = PLACES[args.variant], dist.get_world_size()
    found = live(trainer.weights(), trainer.gradients(), trainer.states(), trainer.staging())
    if dist.get_rank():
        return
    measured: dict[tuple[str, str], int] = {}
    for category, sizes in found.items():
        for kind, size in sizes.items():
            # On a CPU both are the same memory: there it is where the variant means it to be.
            real = "host" if kind == "cpu" else "device"
            where = place.of(category) if device.type == "cpu" else real
            if category == "staging":
                category, where = "buffers", "host"
            measured[category, where] = measured.get((category, where), 0) + size
    measured["activations", "device"] = saving.kept_bytes
    measured["activations", "host"] = saving.moved_bytes
    for (category, where), size in measured.items():
        if size:
            prof.measure("measured_bytes", size, category=category, place=where)
    if device.type == "cuda":
        prof.measure("peak_allocated_bytes", torch.cuda.max_memory_allocated(device))
    keep_predictions(prof, args, place, ranks, device)


def keep_predictions(
    prof: chopper.Profile,
    args: argparse.Namespace,
    place: Place,
    ranks: int,
    device: torch.device,
) -> None:
    """What formulas and estimators say of this variant."""
    config = SIZES[args.size]
    count = parameter_count(config)
    said: dict[tuple[str, str], float] = {
        (category, place.of(category)): per_weight * count
        for category, per_weight in places.states_bytes(place, ranks).items()
    }
    for beyond in places.beyond_formulas(place, weights_of(config), ranks, places.BUCKET_ELEMENTS):
        at = beyond.category, beyond.place
        said[at] = said.get(at, 0.0) + beyond.size_bytes
        labels = {"category": beyond.category, "place": beyond.place, "what": beyond.what}
        prof.measure("beyond_formula_bytes", beyond.size_bytes, **labels)
    said["activations", place.of("activations")] = kept_bytes(args, place, device)
    for (category, where), size in said.items():
        prof.measure("predicted_bytes", size, category=category, place=where)
    prof.measure("predicted_peak_bytes", estimated(args, place, ranks, device.type).allocated_bytes)
    for direction, per_weight in places.link_bytes(place, ranks).items():
        prof.measure("predicted_link_bytes", per_weight * count, direction=direction)
    prof.measure("predicted_collective_bytes", places.collective_bytes(place, ranks) * count)
    outer = config.vocabulary * config.dim  # the largest module with weights of its own
    theirs = places.deepspeed_bytes(place, count, outer, ranks) or {}
    for told, size in theirs.items():
        prof.measure("deepspeed_estimate_bytes", size, place=told)


def kept_bytes(args: argparse.Namespace, place: Place, device: torch.device) -> int:
    """Activations that are kept when backward begins, as ``chopper estimate memory`` counts them.

    Wherever states lie, they are those of one rank with all of its memory on the device: at the loss
    it has states, activations and the logits beside their softmax, which is what is kept of them.
    """
    alone = Place(strategy="ddp", checkpoint=place.checkpoint)
    said = estimated(args, alone, 1, device.type)
    logits = 4 * args.batch * args.sequence * SIZES[args.size].vocabulary
    kept: int = said.phases_bytes["loss"] - said.steady_bytes - logits
    return kept


def weights_of(config: LlamaConfig) -> places.Weights:
    """Sizes of a model's tensors, without its memory."""
    with torch.device("meta"):
        counts = [weight.numel() for weight in Llama(config).parameters()]
    return places.Weights(
        count=sum(counts),
        largest_count=max(counts),
        persistent_count=sum(n for n in counts if n <= places.PERSISTENT_ELEMENTS),
    )


def keep_unified(prof: chopper.Profile, shared: managed.Managed, device: torch.device) -> None:
    """How much was managed memory, and how fast its pages come to the device."""
    if dist.get_rank():
        return
    prof.measure("managed_bytes", shared.peak_bytes)
    for pattern, rate in managed.migration_bytes_per_s(device, MIGRATED_BYTES).items():
        prof.measure("migration_bytes_per_s", rate, pattern=pattern)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
