"""Join the other ranks of a distributed run, and leave them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from chopper.hardware.measure import BACKEND
from chopper.workloads.machine import own_device
from chopper.workloads.quiet import STORE_VARIABLE


def join_group(device: torch.device) -> None:
    """Create the process group of all ranks, on ``chopper bench``'s socket or as torchrun says."""
    backend, device_id = BACKEND[device.type], device if device.type == "cuda" else None
    descriptor = os.environ.pop(STORE_VARIABLE, None)
    if descriptor is None:
        dist.init_process_group(backend, device_id=device_id)
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=rank == 0,
        master_listen_fd=int(descriptor) if rank == 0 else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device_id)


@contextlib.contextmanager
def joined(asked: str, *, prog: str) -> Iterator[torch.device]:
    """The device of this rank, inside a process group of all of them; ``prog`` is the workload."""
    # torchrun starts one process per rank and says in the environment which one this is.
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"{prog}: start it with `chopper bench {prog}` or through torchrun")
    device = own_device(asked)
    join_group(device)
    try:
        yield device
        # Gloo's threads need Python's lock to let go of the last tensors. Waiting here leaves it
        # to them; at the interpreter's end, wanting it would abort the process (torch 2.13).
        dist.barrier()
    finally:
        dist.destroy_process_group()
