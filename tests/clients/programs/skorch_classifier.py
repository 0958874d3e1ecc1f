"""skorch: a scikit-learn classifier over a torch module, with its validation split."""

from __future__ import annotations

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
inputs = rng.standard_normal((1600, 256)).astype(np.float32)
targets = (inputs.sum(1) > 0).astype(np.int64)
net = NeuralNetClassifier(
    nn.Sequential(
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 2),
        nn.Softmax(-1),
    ),
    max_epochs=3,
    lr=0.1,
    batch_size=64,
    iterator_train__shuffle=True,
)
net.fit(inputs, targets)
for epoch in net.history:
    print(f"train loss {epoch['train_loss']:.6f} valid loss {epoch['valid_loss']:.6f}")
