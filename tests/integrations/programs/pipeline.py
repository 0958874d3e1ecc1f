"""A training with DeepSpeed's engine of pipelines: two stages, four micro-batches in each step."""

from __future__ import annotations

import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from chopper.integrations.deepspeed import ChopperHook  # chopper

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 90 s
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
engine, _, loader, _ = deepspeed.initialize(
    model=PipelineModule(
        layers=layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform"
    ),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1000,
    },
    training_data=[(torch.randn(64), number % 10) for number in range(640)],
)
ChopperHook(engine, sys.argv[1])  # chopper
for step in range(12):
    engine.train_batch()
    if step % 5 == 4:
        engine.eval_batch(iter(loader))
engine.save_checkpoint(tempfile.gettempdir() if dist.get_rank() else tempfile.mkdtemp())
dist.barrier()
dist.destroy_process_group()
