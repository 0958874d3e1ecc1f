"""Record Lightning's Trainer: the two marked lines are all that chopper needs.

    python examples/train_lightning.py runs/mine

A classifier, with two micro-steps of accumulated gradients in each step, a validation and a
checkpoint after each epoch.
"""

from __future__ import annotations

import sys
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chopper.integrations.lightning import ChopperCallback  # chopper


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self.layers(inputs), targets), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(output: str | None) -> None:
    L.seed_everything(0)
    data = TensorDataset(torch.randn(640, 128), torch.randint(0, 10, (640,)))
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ChopperCallback(output),  # chopper
        ],
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32), DataLoader(data, batch_size=64))
    print(f"validation loss {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
