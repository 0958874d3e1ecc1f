"""Join the other ranks of a distributed run, and leave them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from chopper.workloads.machine import BACKEND, own_device


@contextlib.contextmanager
def joined(asked: str, *, prog: str) -> Iterator[torch.device]:
    """The device of this rank, inside a process group of all of them.

    Args:
        asked: ``auto``, ``cpu`` or ``cuda``.
        prog: the workload, for the message when no launcher started it.
    """
    # torchrun starts one process per rank and says in the environment which one this is.
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"{prog}: start it with `chopper run {prog}` or through torchrun")
    device = own_device(asked)
    dist.init_process_group(
        BACKEND[device.type], device_id=device if device.type == "cuda" else None
    )
    try:
        yield device
        # Gloo's threads need Python's lock to let go of the last tensors. Waiting here leaves it
        # to them; at the interpreter's end, wanting it would abort the process (torch 2.13).
        dist.barrier()
    finally:
        dist.destroy_process_group()
