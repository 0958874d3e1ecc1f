"""pytorch-ignite: a supervised trainer, and an evaluator that runs after each epoch."""

from __future__ import annotations

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(1280, 256), torch.randint(0, 10, (1280,)))
trainer = create_supervised_trainer(model, optimizer, criterion)
evaluator = create_supervised_evaluator(
    model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)}
)


@trainer.on(Events.ITERATION_COMPLETED)
def log_loss(engine):
    print(f"step {engine.state.iteration} loss {engine.state.output:.6f}")


@trainer.on(Events.EPOCH_COMPLETED)
def log_evaluation(engine):
    evaluator.run(DataLoader(data, batch_size=64))
    print(f"epoch {engine.state.epoch} loss {evaluator.state.metrics['loss']:.6f}")


trainer.run(DataLoader(data, batch_size=64, shuffle=True), max_epochs=3)
