"""Injectors into a training: one class per cause.

In each step an injector does its work when the plan says so, and writes down how long that took by
its own clock, which is all that the score knows of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import checkpoint

from chopper.workloads import link
from tests.known_causes.injections.plan import (
    ARRIVAL,
    BASELINE,
    MEETING,
    VOCABULARY,
    Plan,
    Truth,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_HIGHEST_PRIORITY = -20
_MCL_FUTURE = 2
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4
_MATRIX_ROWS = 512
_COPIED_ELEMENTS = 1 << 23
_ALLOCATED_BYTES = 64 << 20
_REDUCED_ELEMENTS = 1 << 22
_BALLAST_COUNT = 40_000

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_SPIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit()
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    pass
"""


class Injector:
    """Does nothing, and measures nothing: the base of all injectors."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.levels = plan.levels()
        self.sequence = type(self).sequence * plan.scale
        self.step = 0
        self.truth = Truth()

    @property
    def amount(self) -> float:
        """Amount to inject into the current step; 0 for nothing."""
        level = self.levels[self.step]
        return 0.0 if level == BASELINE else self.plan.amounts[level]

    def add(self, name: str, time_ns: int) -> None:
        """Time measured in the current step."""
        per_step = self.truth.injected_ns.setdefault(name, [0] * len(self.levels))
        per_step[self.step] += time_ns

    @contextlib.contextmanager
    def clock(self, name: str = "own") -> Iterator[None]:
        """Measure the block, less its waits for a core, which are a cause of their own."""
        begin_ns = time.perf_counter_ns() - _run_delay_ns()
        try:
            yield
        finally:
            self.add(name, time.perf_counter_ns() - _run_delay_ns() - begin_ns)

    def start(self) -> None:
        """Called once, before the recording."""

    def stop(self) -> None:
        """Called once, after the recording."""

    def loader(self, loader: Any) -> Any:
        """Return what the loop iterates over."""
        return loader

    batch = 2
    sequence = 64
    dim = 128
    layers = 2
    workers = 0
    wraps_feed_forward = False
    on_touched_memory = True
    """Run with pages that were written to before, so that no step pays for fresh ones."""
    by_hand = True
    """Train data-parallel with one collective per step, made by the loop; FSDP2 where False."""

    def item(self, index: int) -> Any:
        """One item of the dataset; called in the process that loads."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (self.batch, self.sequence + 1), generator=generator)

    def before_step(self) -> None:
        """Called before the next batch is asked for."""

    def before_forward(self) -> None:
        """Called between the batch and the forward pass."""

    def before_optimizer(self) -> None:
        """Called between backward and the optimizer."""

    def after_step(self) -> None:
        """Called at the end of a step, before it is marked."""

    def before_reduce(self) -> None:
        """Called before the gradients' collective, of a training by hand."""

    def reduce(self, gradients: Tensor) -> None:
        """Add up the gradients of both ranks, in a training by hand."""
        dist.all_reduce(gradients)

    def feed_forward(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """Call the feed-forward network of a block."""
        return module(*args)


class _SlowDataset(Injector):
    """The dataset sleeps; loaded in the training process. Amounts in seconds."""

    by_hand = False

    def item(self, index: int) -> Any:
        with self.clock():
            time.sleep(self.amount)
            return super().item(index)


class _SlowWorkers(Injector):
    """The dataset sleeps in a worker process; what the loop waits for is what was injected.

    The worker loads the next item while a step runs, so it sleeps for longer than a step takes.
    """

    by_hand = False
    workers = 1

    def start(self) -> None:
        self._step_ns = multiprocessing.Value("q", 0)
        self._began_ns = 0

    def before_forward(self) -> None:
        self._began_ns = time.perf_counter_ns()

    def before_optimizer(self) -> None:
        with self._step_ns.get_lock():
            self._step_ns.value = time.perf_counter_ns() - self._began_ns

    def item(self, index: int) -> Any:
        self.step = index  # of this process, which runs ahead of the loop
        if self.amount:
            time.sleep(self.amount + self._step_ns.value / 1e9)
        return super().item(index)

    def loader(self, loader: Any) -> Any:
        batches = iter(loader)
        for _ in self.levels:
            with self.clock():
                batch = next(batches)
            yield batch


class _LateRank(Injector):
    """Rank 1 comes late to the gradients' collective."""

    def before_reduce(self) -> None:
        self.add(MEETING, time.perf_counter_ns())
        dist.barrier()  # both ranks begin here, so the other one waits for nearly all of it
        with self.clock():
            if self.rank == 1 and self.amount:
                self.hold_up()
        # Ranks of one host share this clock.
        self.add(ARRIVAL, time.perf_counter_ns())

    def hold_up(self) -> None:
        """Take the time by which rank 1 is late."""


class _SlowRank(_LateRank):
    """Rank 1 sleeps. Amounts in seconds."""

    def hold_up(self) -> None:
        time.sleep(self.amount)


class _ExtraWork(_LateRank):
    """Rank 1 multiplies matrices that nobody asked for. Amounts are their number."""

    def start(self) -> None:
        self._matrix = torch.ones(_MATRIX_ROWS, _MATRIX_ROWS)

    def hold_up(self) -> None:
        for _ in range(int(self.amount)):
            torch.mm(self._matrix, self._matrix)


class _Repeated(Injector):
    """Does something again and again before the forward pass. Amounts are how often."""

    def before_forward(self) -> None:
        if self.amount:
            with self.clock():
                for _ in range(int(self.amount)):
                    self.once()

    def once(self) -> None:
        """Do it once."""


class _BlockingCollective(_Repeated):
    """Both ranks reduce a value over the ranks and read it at once."""

    def start(self) -> None:
        self._value = torch.zeros(_REDUCED_ELEMENTS)

    def before_forward(self) -> None:
        dist.barrier()  # of every step: it is not what is injected
        super().before_forward()

    def once(self) -> None:
        dist.all_reduce(self._value)
        self._value[0].item()


class _ExtraCopies(_Repeated):
    """A buffer is copied."""

    def start(self) -> None:
        self._source = torch.ones(_COPIED_ELEMENTS)
        self._target = torch.zeros(_COPIED_ELEMENTS)

    def once(self) -> None:
        self._target.copy_(self._source)


class _Item(_Repeated):
    """A value is read out of a tensor."""

    def start(self) -> None:
        self._value = torch.ones(())

    def once(self) -> None:
        self._value.item()


class _Collections(Injector):
    """Full garbage collections over many live objects. Amounts are their number."""

    def start(self) -> None:
        # What imports made lives forever: a collection walks what the case made, not torch.
        gc.collect()
        gc.freeze()
        self._ballast = [[i] for i in range(_BALLAST_COUNT)]
        self._began_ns = 0
        gc.callbacks.append(self._on_gc)

    def stop(self) -> None:
        gc.callbacks.remove(self._on_gc)
        self._ballast = []
        gc.unfreeze()

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        now_ns = time.perf_counter_ns() - _run_delay_ns()
        if phase == "start":
            self._began_ns = now_ns
        else:
            self.add("own", now_ns - self._began_ns)

    def before_forward(self) -> None:
        for _ in range(int(self.amount)):
            gc.collect()


class _Recomputation(Injector):
    """Blocks' feed-forward networks, so many, are checkpointed: they run again in backward."""

    wraps_feed_forward = True
    # Wide and short: what runs again is products, and what is not kept meanwhile is little memory.
    # Steps that keep more of it than their neighbours would touch fresh pages, and take longer.
    dim = 512
    sequence = 128
    layers = 3

    def start(self) -> None:
        self._checkpointed = 0
        self._hook = getattr(checkpoint, "_checkpoint_hook", None)
        if self._hook is None:
            self.truth.skipped = "this torch's checkpointing has nothing that could be measured"
            return
        clock = self.clock

        class Measured(self._hook):  # type: ignore[misc, name-defined]
            """Its clock runs while backward waits for a tensor that was not kept."""

            def __init__(self, frame: Any) -> None:
                super().__init__(frame)
                unpack: Any = self.unpack_hook  # type: ignore[has-type]

                def measured(holder: Any) -> Any:
                    with clock():
                        return unpack(holder)

                self.unpack_hook = measured

        checkpoint._checkpoint_hook = Measured  # type: ignore[misc]

    def stop(self) -> None:
        checkpoint._checkpoint_hook = self._hook  # type: ignore[misc, assignment]

    def before_forward(self) -> None:
        self._checkpointed = 0

    def feed_forward(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if self._checkpointed >= self.amount:
            return module(*args)
        self._checkpointed += 1
        in_forward, since_ns = True, time.perf_counter_ns()

        def run(*inner: Any) -> Any:
            nonlocal since_ns
            if in_forward:
                self.add("around", time.perf_counter_ns() - since_ns)
            output = module(*inner)
            since_ns = time.perf_counter_ns()
            return output

        # No random numbers are drawn: to keep their state would take as long as the work.
        output = checkpoint.checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        in_forward = False
        self.add("around", time.perf_counter_ns() - since_ns)
        return output


class _BusyNeighbour(Injector):
    """Processes that compute without end share the rank's core. Amounts are their number.

    What a rank lost is the kernel's own count: the run delay of its thread, read between steps.
    """

    def start(self) -> None:
        self._before = os.sched_getaffinity(0)
        self._spinners: list[subprocess.Popen[bytes]] = []
        cores = sorted(self._before)
        if len(cores) < 2:
            self.truth.skipped = "one core: each of the two ranks needs one to share"
        elif not _SCHEDSTAT.exists():
            self.truth.skipped = f"{_SCHEDSTAT}: the kernel counts no run delays"
        if self.truth.skipped:
            return
        os.sched_setaffinity(0, {cores[self.rank]})
        for _ in range(int(max(self.plan.amounts))):
            # It takes the rank's core and priority on, and stops by itself until it is continued.
            self._spinners.append(
                subprocess.Popen([sys.executable, "-P", "-c", _SPIN, str(os.getpid())])
            )
        for spinner in self._spinners:
            os.waitid(os.P_PID, spinner.pid, os.WSTOPPED | os.WNOWAIT)
        for thread in Path("/proc/self/task").iterdir():
            # The backend's threads shall not share the core: what is lost is the loop's alone.
            if int(thread.name) != os.getpid():
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), _HIGHEST_PRIORITY)

    def before_step(self) -> None:
        self._delay_ns = _run_delay_ns()
        for number, spinner in enumerate(self._spinners):
            spinner.send_signal(signal.SIGCONT if number < self.amount else signal.SIGSTOP)
        dist.barrier()

    def after_step(self) -> None:
        self.add("own", _run_delay_ns() - self._delay_ns)

    def stop(self) -> None:
        for spinner in self._spinners:
            spinner.kill()
            spinner.wait()
        os.sched_setaffinity(0, self._before)


class _LockedMemory(Injector):
    """Buffers, so many, are allocated as locked memory, as staging buffers of devices are.

    Pages of locked memory are there when the allocation returns, so the allocator pays for them,
    not the first to write.
    """

    on_touched_memory = False

    def start(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # The ranks' allocator keeps what is freed (see `recordings`): here it shall not.
        self._libc.mallopt(_M_MMAP_MAX, 1 << 16)
        self._libc.mallopt(_M_MMAP_THRESHOLD, _ALLOCATED_BYTES // 2)
        if self._libc.mlockall(_MCL_FUTURE):
            self.truth.skipped = (
                f"memory cannot be locked ({os.strerror(ctypes.get_errno())}): run as root, or "
                "raise `ulimit -l`"
            )
        self._libc.munlockall()

    def stop(self) -> None:
        self._libc.mallopt(_M_MMAP_MAX, 0)

    def before_forward(self) -> None:
        if not self.amount:
            return
        with self.clock("unlock"):
            self._libc.mlockall(_MCL_FUTURE)
        with self.clock():
            buffers = [
                torch.empty(_ALLOCATED_BYTES, dtype=torch.uint8) for _ in range(int(self.amount))
            ]
        with self.clock("unlock"):
            self._libc.munlockall()
            del buffers


class _SlowLink(Injector):
    """The link between the ranks is shaped. Amounts in bits per second."""

    def start(self) -> None:
        self._shaper = link.Shaper()

    def stop(self) -> None:
        self._shaper.close()

    def before_step(self) -> None:
        self._shaper.set(int(self.amount) or None)
        dist.barrier()

    def reduce(self, gradients: Tensor) -> None:
        dist.barrier()
        with self.clock():
            dist.all_reduce(gradients)


INJECTORS: dict[str, type[Injector]] = {
    "slow_dataset": _SlowDataset,
    "slow_workers": _SlowWorkers,
    "slow_rank": _SlowRank,
    "extra_work": _ExtraWork,
    "blocking_collective": _BlockingCollective,
    "garbage_collection": _Collections,
    "extra_copies": _ExtraCopies,
    "recomputation": _Recomputation,
    "locked_memory": _LockedMemory,
    "item": _Item,
    "busy_neighbour": _BusyNeighbour,
    "slow_link": _SlowLink,
}


def _run_delay_ns() -> int:
    """Time in which this thread could run and had no core, as the kernel counts it; 0 where not."""
    tid = threading.get_native_id()
    try:
        if tid not in _schedstats:
            _schedstats[tid] = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(_schedstats[tid], 128, 0).split()[1])
    except (OSError, IndexError):
        return 0


_schedstats: dict[int, int] = {}
"""Open file of each thread that asked: opening it takes longer than some of what is timed."""
