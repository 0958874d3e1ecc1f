"""Lightning: Trainer with a validation after each of four epochs."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, inputs):
        return self.layers(inputs)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs), targets)
        self.log("loss", loss)
        print(f"step {self.global_step} loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(0)
train = TensorDataset(torch.randn(1280, 128), torch.randint(0, 10, (1280,)))
valid = TensorDataset(torch.randn(1280, 128), torch.randint(0, 10, (1280,)))
trainer = L.Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False)
trainer.fit(
    Classifier(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(valid, batch_size=64)
)
