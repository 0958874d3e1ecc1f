"""Ray Train: two workers with TorchTrainer."""

from __future__ import annotations

import ray
import torch
import torch.nn.functional as F
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(2560, 256), torch.randint(0, 10, (2560,)))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    for epoch in range(2):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        train.report({"epoch": epoch, "loss": loss.item()})


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2, use_gpu=False)).fit()
ray.shutdown()
