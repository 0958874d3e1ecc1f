"""A workload's rank: choice of its device, process group of all ranks, lines of progress."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from chopper.hardware.measure import BACKEND
from chopper.workloads.processes import STORE_VARIABLE

PROGRESS_S = 5.0
"""Time between two lines of progress."""


def choose_device(requested: str, *, local_ranks: int) -> tuple[str, str]:
    """Choose the kind of device for ``local_ranks`` ranks on this host, and say why.

    Raises:
        ValueError: GPUs were asked for, and there is not one for each.
    """
    gpus = torch.cuda.device_count()
    visible = f"{gpus} GPU{'' if gpus == 1 else 's'} visible to torch {torch.__version__}"
    if requested == "cpu":
        return "cpu", "requested"
    if gpus >= local_ranks:
        return "cuda", f"{visible}, one for each of {local_ranks} ranks"
    need = f"{local_ranks} ranks need {local_ranks} GPUs"
    if local_ranks == 1:
        need = "a rank needs a GPU"
    if requested == "cuda":
        raise ValueError(f"{need}, found {visible}: ask for fewer ranks, or for --device cpu")
    return "cpu", f"{visible}, {need}"


def own_device(requested: str) -> torch.device:
    """The device of this rank, or of the only process, that ``choose_device`` chose."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind, _ = choose_device(requested, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device(f"cuda:{local_rank}")


def dtype_problem(device_type: str, dtype: str) -> str | None:
    """Say what this kind of device lacks to compute in ``dtype``, or None."""
    if device_type == "cpu" or dtype != "bfloat16":
        return None
    # Emulated bfloat16 is slower than float32: nobody wants to measure that.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return f"{torch.cuda.get_device_name()} does not compute in bfloat16: use --dtype float32"


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
def joined(requested: str, *, prog: str) -> Iterator[torch.device]:
    """The device of this rank, inside a process group of all of them; ``prog`` is the workload."""
    # torchrun starts one process per rank and says in the environment which one this is.
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"{prog}: start it with `chopper bench {prog}` or through torchrun")
    device = own_device(requested)
    join_group(device)
    try:
        yield device
        # Gloo's threads need Python's lock to let go of the last tensors. Waiting here leaves it
        # to them; at the interpreter's end, wanting it would abort the process (torch 2.13).
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Progress:
    """Prints a line from rank 0 every five seconds; nothing in shorter work."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0
        self._printed_s = self._began_s = time.monotonic()

    def advance(self) -> None:
        """A part is done; free of synchronization with the device."""
        self.done += 1
        now_s = time.monotonic()
        if now_s - self._printed_s < PROGRESS_S or self.done == self.total:
            return
        self._printed_s = now_s
        if os.environ.get("RANK", "0") == "0":
            left_s = (now_s - self._began_s) / self.done * (self.total - self.done)
            # Of the first parts alone, what it took to begin would be multiplied.
            remaining = f", about {left_s:.0f} s left" if 20 * self.done >= self.total else ""
            print(f"{self.unit} {self.done} of {self.total}{remaining}", flush=True)
