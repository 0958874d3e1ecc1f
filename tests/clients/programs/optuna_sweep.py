"""Optuna: a study in two processes that share its storage."""

from __future__ import annotations

import multiprocessing

import optuna
import torch
from torch import nn

STORAGE = "journal.log"


def objective(trial):
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    inputs, targets = torch.randn(256, 128), torch.randn(256, 1)
    for _ in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def work(seed):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(STORAGE))
    study = optuna.load_study(
        study_name="sweep", storage=storage, sampler=optuna.samplers.RandomSampler(seed=seed)
    )
    study.optimize(objective, n_trials=3)


if __name__ == "__main__":
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(STORAGE))
    study = optuna.create_study(study_name="sweep", storage=storage)
    workers = [multiprocessing.get_context("spawn").Process(target=work, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(study.trials)} trials, best loss {study.best_value:.6f}")
