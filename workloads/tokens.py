"""A synthetic token corpus that takes real work to produce and never differs between runs.

Each sequence is generated when it is asked for, from the seed and its index alone: no download,
no file, the same tokens whichever rank or worker process asks. Ids follow Zipf's law, as words
do, and half of them are a function of the id before, so that a model has something to learn and
a falling loss means that training works.
"""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class SyntheticTokens(Dataset[tuple[Tensor, Tensor]], Sized):
    """Pairs (tokens, next tokens), each int64 [sequence]."""

    def __init__(self, *, length: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.length = length
        self.sequence = sequence
        self.seed = seed
        # Zipf: the r-th most frequent id has a probability proportional to 1/r.
        weight = 1.0 / np.arange(1, vocabulary + 1)
        self.cumulative = np.cumsum(weight / weight.sum())
        self.successor = np.random.default_rng(seed).permutation(vocabulary)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"sequence {index} of {self.length}")
        generator = np.random.default_rng((self.seed, index))
        drawn = np.searchsorted(self.cumulative, generator.random(self.sequence + 1))
        # The last sum may fall short of 1 by a rounding error.
        ids = np.minimum(drawn, len(self.successor) - 1)
        ids[1::2] = self.successor[ids[:-1:2]] if len(ids) % 2 else self.successor[ids[::2]]
        text = torch.from_numpy(ids)
        return text[:-1], text[1:]


def token_loader(
    *,
    steps: int,
    batch: int,
    sequence: int,
    vocabulary: int,
    seed: int,
    rank: int,
    ranks: int,
    workers: int,
    pin_memory: bool,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Serve ``steps`` batches of ``batch`` sequences to each of ``ranks`` ranks, none twice."""
    data = SyntheticTokens(
        length=steps * batch * ranks, sequence=sequence, vocabulary=vocabulary, seed=seed
    )
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        data, num_replicas=ranks, rank=rank, shuffle=True, seed=seed, drop_last=True
    )
    return DataLoader(
        data,
        batch_size=batch,
        sampler=sampler,
        num_workers=workers,
        pin_memory=pin_memory,
        drop_last=True,
    )
