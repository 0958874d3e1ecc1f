"""Models and optimizers of the workload ``offload``, each variant's behind the same few calls."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chopper.workloads import placement as formulas
from chopper.workloads.llama import SIZES, Llama, initial_value, optimizer_of, recompute
from chopper.workloads.placement import PLACEMENTS, Placement


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

    def __init__(self, model: nn.Module, optimizer: str, config: dict[str, object]) -> None:
        # One of its optimizers is decorated by torch.compile, which would load Inductor.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # On CPUs it would compile an operator for inference, at each first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        inner = optimizer_of(optimizer, model.parameters())
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


def built(args: argparse.Namespace, device: torch.device) -> Trainer:
    """The variant's model and optimizer."""
    placement = PLACEMENTS[args.variant]
    args.checkpoint = "full" if placement.checkpoint else "none"
    if placement.strategy == "fsdp2":
        # Loaded for this variant alone: it takes as long as its steps.
        from chopper.workloads import fsdp2

        sharded, _ = fsdp2.sharded_model(args, device, offload=True)
        return Trainer(sharded, optimizer_of(args.optimizer, sharded.parameters()))
    model = whole_model(args, device)
    if placement.deepspeed:
        return DeepSpeedTrainer(model, args.optimizer, deepspeed_config(args, placement))
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
        zero["offload_optimizer"] = {"device": "cpu"}
    if "weights" in placement.on_host:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": zero,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        # Torch's AdamW, as in all other variants: DeepSpeed's own would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        # By default 1.0: no other variant clips, and losses would part by 0.6 % in a dozen steps.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
