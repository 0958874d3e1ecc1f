"""Record the workers of Ray Train: the two marked lines are all that chopper needs.

    python examples/train_ray.py runs/mine

Two workers train a classifier, and report a checkpoint at the end of each epoch. Each worker
writes its part of the run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chopper.integrations.ray import ChopperCallback  # chopper


def train_loop() -> None:
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(640, 128), torch.randint(0, 10, (640,)))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    for epoch in range(2):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save(model.state_dict(), Path(directory, "model.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            train.report({"epoch": epoch, "loss": loss.item()}, checkpoint=checkpoint)


def main(output: str | None) -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() >= 2),
        run_config=RunConfig(
            storage_path=tempfile.mkdtemp(),
            callbacks=[
                ChopperCallback(output),  # chopper
            ],
        ),
    )
    print(f"last loss {trainer.fit().metrics['loss']:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
