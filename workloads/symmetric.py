"""Symmetric memory: places that every rank of a host has, and that the others read and write.

On CPUs it is anonymous memory that all ranks map, and that is gone with them; on GPUs it is torch's
symmetric memory over NVLink or Infinity Fabric (NVSHMEM's with ``TORCH_SYMMMEM=NVSHMEM``). Kernels
reach it by `workloads.tiles`.

Nothing is acknowledged and no signal is reset. Each step writes the other of two buffers and sets
signals to its own number. A rank begins step s + 2 when it has heard of all others in step s + 1,
and they began that when they had finished step s: nobody reads what step s + 2 overwrites. This
holds where every rank sends to every other in every step, and has finished with a step's buffer
when it begins the next.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chopper.hardware.measure import wait

DEADLINE_S = 60.0
"""Longest that a step may wait for other ranks."""
_LOOK_S = 0.05
"""Between two looks at whether a step is over."""
_PLACE_BYTES = 256
"""Places begin on multiples of it: what a GPU moves at once divides it."""


class RankLost(RuntimeError):
    """A rank did not send in time, or has ended; the message is one line."""


class Place(NamedTuple):
    """Shape and data type of the data received in one step."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Size of one buffer, with the gap to the next place."""
        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-size_bytes // _PLACE_BYTES) * _PLACE_BYTES


class SymmetricMemory:
    """Two buffers of each place and the signals of one operation, the same in every rank.

    Args:
        what: the operation, for messages.
        places: name → what is received there.
        signals: that each rank sets in each other rank, in every step.
    """

    def __init__(
        self,
        what: str,
        device: torch.device,
        places: Mapping[str, Place],
        *,
        signals: int,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.what, self.device, self.deadline_s = what, device, deadline_s
        self.step = 0
        self._places = places
        signalled = Place((self.ranks, signals), torch.int32)
        size_bytes = signalled.size_bytes + 2 * sum(p.size_bytes for p in places.values())
        on_host = device.type == "cpu"
        self.memories = (_mapped if on_host else _torch_symmetric)(size_bytes, device)
        self.signals = self._view(0, signalled)
        """int32 [ranks, signals]: step of which each part of each rank has come."""
        self.signals.zero_()
        self._offsets, end = {}, signalled.size_bytes
        for name, buffer in places.items():
            self._offsets[name], end = end, end + 2 * buffer.size_bytes
        stops = torch.zeros(2, dtype=torch.int32)
        self._stops = stops if on_host else stops.pin_memory()  # the host writes, the kernel reads
        self.team = team(self.rank, [m.data_ptr() for m in self.memories], self._stops, device)
        """What the primitives know the ranks by."""
        self._pids: list[int] = [0] * self.ranks
        dist.all_gather_object(self._pids, os.getpid())
        self._processes = _descriptors(self._pids, self.rank)
        weakref.finalize(self, _close, list(self._processes))
        wait(device)
        dist.barrier()

    def __getitem__(self, name: str) -> Tensor:
        """Own memory of a place, where this step's data come."""
        buffer = self._places[name]
        return self._view(self._offsets[name] + self.step % 2 * buffer.size_bytes, buffer)

    def _view(self, offset_bytes: int, buffer: Place) -> Tensor:
        size_bytes = math.prod(buffer.shape) * buffer.dtype.itemsize
        memory = self.memories[self.rank][offset_bytes : offset_bytes + size_bytes]
        return memory.view(buffer.dtype).view(buffer.shape)

    @contextlib.contextmanager
    def next_step(self) -> Iterator[int]:
        """Run the next step's kernels in the block; yield its number for their signals.

        When it ends, they have: all has come. RankLost where it has not by the deadline, or cannot
        because a rank has ended that had not sent all.
        """
        if self._stops[0]:
            raise RankLost(f"{self.what}: step {self.step} failed, there is none after it")
        self.step += 1
        watch = _Watch(self)
        if self.device.type == "cpu":
            with watch.in_thread():
                yield self.step
        else:
            yield self.step
            over = torch.cuda.Event()
            over.record()
            watch.until(over.query)
            wait(self.device)
        if self._stops[1]:
            raise RankLost(watch.found)
        self._stops[0] = 0  # late, and yet in time

    def missing(self) -> dict[int, int]:
        """Count for each rank the signals that this step still waits for."""
        if self.device.type == "cpu":
            signals = self.signals.clone()
        else:  # not behind the kernel that waits for them
            side = torch.cuda.Stream(self.device)
            with torch.cuda.stream(side):
                signals = self.signals.cpu()
        behind = (signals - self.step < 0).sum(dim=1).tolist()
        return {rank: count for rank, count in enumerate(behind) if count and rank != self.rank}

    def gone(self) -> set[int]:
        """Return the ranks whose process has ended; none where that cannot be seen."""
        poll = select.poll()
        for descriptor in self._processes:
            poll.register(descriptor, select.POLLIN)
        return {self._processes[descriptor] for descriptor, _ in poll.poll(0)}

    def stop(self) -> None:
        """End all waits of this rank's kernels."""
        self._stops[0] = 1

    def described(self, rank: int, gone: set[int], missing: int) -> str:
        """Describe the missing signals of a rank."""
        state = "has ended" if rank in gone else "still runs"
        parts = f"{missing} of {self.signals.shape[1]} parts have not come"
        return f"rank {rank} (process {self._pids[rank]}, which {state}): {parts}"


class _Watch:
    """Ends the waits of a step whose data cannot come any more."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self.memory, self.begin_s = memory, time.monotonic()
        self.found = ""

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Watch from a thread of its own, while the kernel runs in this one."""
        over = threading.Event()
        thread = threading.Thread(target=self.until, args=(lambda: over.wait(_LOOK_S),))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def until(self, over: Callable[[], bool]) -> None:
        """Watch until the step is over, or stop it."""
        while not over():
            waited_s = time.monotonic() - self.begin_s
            gone = self.memory.gone()
            if waited_s < self.memory.deadline_s and not gone:
                continue
            missing = self.memory.missing()
            # A rank that has sent all of its part may end.
            if missing.keys() & gone or (missing and waited_s >= self.memory.deadline_s):
                self._stop(missing, gone, waited_s)
                return

    def _stop(self, missing: dict[int, int], gone: set[int], waited_s: float) -> None:
        memory = self.memory
        lost = "; ".join(memory.described(rank, gone, n) for rank, n in missing.items())
        self.found = (
            f"{memory.what}: rank {memory.rank} waited {waited_s:.1f} s in step {memory.step} for "
            f"{lost}. Look for the first error among the ranks"
        )
        memory.stop()


def team(rank: int, bases: list[int], stops: Tensor, device: torch.device) -> Tensor:
    """Return what `workloads.tiles` knows the ranks by: int64 [3 + ranks].

    Args:
        bases: address of each rank's symmetric memory, in this process.
        stops: int32 [2] that the kernel reaches.
    """
    entries = [rank, len(bases), stops.data_ptr(), *bases]
    return torch.tensor(entries, dtype=torch.int64, device=device)


def _mapped(size_bytes: int, _device: torch.device) -> list[Tensor]:
    """Map anonymous memory of every rank, uint8; the kernel frees it with the last that has it."""
    mine = os.memfd_create("chopper-symmetric")
    try:
        os.ftruncate(mine, size_bytes)
        places = [""] * dist.get_world_size()
        dist.all_gather_object(places, f"/proc/{os.getpid()}/fd/{mine}")
        memories = []
        for path in places:
            descriptor = os.open(path, os.O_RDWR)
            try:
                memories.append(mmap.mmap(descriptor, size_bytes))
            finally:
                os.close(descriptor)
        dist.barrier()  # all have opened it
    finally:
        os.close(mine)
    return [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]


def _torch_symmetric(size_bytes: int, device: torch.device) -> list[Tensor]:
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    mine = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(mine, dist.group.WORLD.group_name)
    # Older torch has get_buffer alone, which is the same for memory that is no part of a pool.
    of_rank = getattr(handle, "get_remote_tensor", handle.get_buffer)
    return [
        mine if rank == dist.get_rank() else of_rank(rank, (size_bytes,), torch.uint8)
        for rank in range(dist.get_world_size())
    ]


def _descriptors(pids: list[int], own_rank: int) -> dict[int, int]:
    """Open the processes of the other ranks: descriptor, which becomes readable at its end → rank.

    Unlike a number, a descriptor never comes to mean another process.
    """
    if sys.platform != "linux":
        return {}
    return {os.pidfd_open(pid): rank for rank, pid in enumerate(pids) if rank != own_rank}


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
