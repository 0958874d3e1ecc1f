"""torch.multiprocessing: two processes train one shared model, as in PyTorch's Hogwild example."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(rank, model):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(2560, 128), torch.randint(0, 10, (2560,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    model.train()
    for inputs, targets in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    mp.set_start_method("spawn")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
