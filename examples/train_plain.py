"""A DistributedDataParallel training script that knows nothing of chopper.

    torchrun --standalone --nproc-per-node 2 examples/train_plain.py
    chopper record -o runs/plain -- torchrun --standalone --nproc-per-node 2 examples/train_plain.py

A convolutional network learns to tell apart four synthetic textures, on GPUs when there is one
for each process, else on the CPU.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Textures(Dataset):
    """Stripes in one of four directions, at random phase and pitch, under noise."""

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        axis = torch.linspace(-1, 1, size)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = index % 4
        pitch, phase = torch.rand(2, generator=generator).tolist()
        angle = label * math.pi / 4
        across = self.x * math.cos(angle) + self.y * math.sin(angle)
        stripes = torch.sin(across * (10 + 10 * pitch) + 2 * math.pi * phase)
        return (stripes + torch.randn(stripes.shape, generator=generator))[None], label


def network() -> nn.Module:
    def stage(channels_in: int, channels_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )

    return nn.Sequential(
        stage(1, 32),
        stage(32, 64),
        stage(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with DDP.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per process and step")
    parser.add_argument("--size", type=int, default=64, help="pixels along each edge")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(network().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data = Textures(args.steps * args.batch * dist.get_world_size(), args.size)
        loader = DataLoader(
            data, batch_size=args.batch, sampler=DistributedSampler(data), pin_memory=on_gpu
        )
        for step, (images, labels) in enumerate(loader):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step:4d}   loss {loss.item():.4f}", flush=True)
        # Gloo's threads need Python's lock to let go of the last tensors. Waiting here leaves it
        # to them; at the interpreter's end, wanting it would abort the process (torch 2.13).
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
