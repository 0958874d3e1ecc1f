"""What ranks do in the tests of loading; each function is run in all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.distributed as dist

from chopper.workloads.loading_trainer import broadcast
from chopper.workloads.planning import Batch, batch_of


def broadcast_to_groups(tensor: int, steps: int) -> list[object]:
    """Read as a rank of a tensor-parallel group; return what was read, and what came."""
    rank, read = dist.get_rank(), []
    reader = rank - rank % tensor

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            read.append(step)
            tokens = np.arange(1, 4 + rank, dtype=np.uint16)
            yield batch_of([(rank, step)], [tokens], width=8, step=step)

    got = list(broadcast(batches() if reader == rank else iter(()), reader, tensor, steps))
    return [read, [[batch.samples, batch.tokens.tolist()] for batch in got]]
