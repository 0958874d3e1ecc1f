"""Microbenchmarks: what this process computes, copies and exchanges per second.

Shared by ``chopper calibrate`` and the workloads gemm, membw, collectives and offload. Needs torch.

A timing is that of many calls behind one another, as in nccl-tests, so many that reading the clock
does not count. Calls are timed in rounds, each in every round, so that a disturbance spoils some
timings of each and not all of one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from chopper.hardware.calibration import STREAM_PASSES, Measured, spread_ratio

LEAST_S = 5e-3
"""Between two readings of the clock."""
_MOST_CALLS = 10_000
"""Between two readings of the clock."""
_LEAST_BYTES = {"cpu": 256 << 20}
_LEAST_FLOP = {"cpu": 10**9}
_DEVICE_BYTES, _DEVICE_FLOP = 4 << 30, 10**12
"""The same of an accelerator."""
_SCALAR = 2**0.5 - 1
"""s with which no array grows: one STREAM kernel after the other makes (2·s + s²)·a of a."""

BACKEND = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""Communication library per kind of device. ROCm builds of torch call their GPUs ``cuda`` and
RCCL ``nccl``."""

# Of one tensor with the parts of all ranks in it. Renamed in torch 2.13, where the old names warn.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SETTLING_S = 0.2
"""No more calls are tried together to settle their number."""
_GAIN = 1.5
"""Times that a call must be quicker among more of its like for these to be timed together."""

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


def wait(device: torch.device) -> None:
    """Wait for all that was issued to a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _fitting_count(call_s: float) -> int:
    return min(max(math.ceil(LEAST_S / call_s - 0.1), 1), _MOST_CALLS)


class Bench(Generic[Key]):
    """Calls to be timed in rounds.

    Args:
        device: they run on.
        ranks: processes that make the same calls, each by itself at the same time; 1: no group.
        together: the calls are collectives: a timing is that of the slowest rank.
    """

    def __init__(self, device: torch.device, *, ranks: int = 1, together: bool = False) -> None:
        self._device, self._in_step, self._together = device, ranks > 1 or together, together
        self._calls: dict[Key, tuple[Call, int]] = {}

    def add(self, key: Key, call: Call, *, flop: int = 0, moved_bytes: int = 0) -> float:
        """Warm a call up and settle how many make a timing; return the seconds that one takes.

        More and more are timed together, until that makes each no quicker and they last long
        enough: on a busy machine, threads that have to be woken are most of what one call takes.
        What a call calculates or moves says how many there are at least.
        """
        kind = self._device.type
        least = 1
        if flop:
            least = _LEAST_FLOP.get(kind, _DEVICE_FLOP) // flop
        elif moved_bytes:
            least = _LEAST_BYTES.get(kind, _DEVICE_BYTES) // moved_bytes
        self._time_s(call, 1, slowest=self._in_step)
        count, steady, quickest_s = 1, 1, math.inf
        while True:
            # All ranks settle on the same, by the slowest of them.
            call_s = self._time_s(call, count, slowest=self._in_step)
            gained = call_s < quickest_s / _GAIN
            steady = count if gained else steady
            quickest_s = min(quickest_s, call_s)
            enough = not gained and count >= _fitting_count(quickest_s)
            if enough or count >= _MOST_CALLS or 4 * count * call_s > _SETTLING_S:
                break
            count *= 4
        # A type that the device emulates takes seconds for the least.
        least = min(least, int(_SETTLING_S / quickest_s))
        self._calls[key] = call, max(steady, least, _fitting_count(quickest_s))
        return quickest_s

    def run(
        self, rounds: int, *, budget_s: float = 0.0, after_round: tuple[Call, ...] = ()
    ) -> dict[Key, list[float]]:
        """Time all calls for ``rounds``, each for ``budget_s``, at least once; seconds per call."""
        times_s: dict[Key, list[float]] = {key: [] for key in self._calls}
        for _ in range(rounds):
            for key, (call, count) in self._calls.items():
                if self._in_step:
                    dist.barrier()
                if count > 1:
                    # The call before worked on other memory, and left it in the caches.
                    self._time_s(call, 1, slowest=self._together)
                left_s = budget_s
                while True:
                    call_s = self._time_s(call, count, slowest=self._together)
                    times_s[key].append(call_s)
                    left_s -= count * call_s
                    if count * call_s < 0.9 * LEAST_S:  # it was settled on a busy machine
                        count = max(count, _fitting_count(call_s))
                        self._calls[key] = call, count
                    if left_s <= 0:
                        break
            for call in after_round:
                call()
        return times_s

    def _time_s(self, call: Call, count: int, *, slowest: bool) -> float:
        """Seconds of one of ``count`` calls behind one another; of the slowest rank if asked."""
        if slowest:
            # Without it, one rank's lateness would count as the collective's slowness.
            dist.barrier()
            wait(self._device)
        begin_s = time.perf_counter()
        for _ in range(count):
            call()
        wait(self._device)
        call_s = (time.perf_counter() - begin_s) / count
        if not slowest:
            return call_s
        most = torch.tensor(call_s, device=self._device, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return float(most)


def rate(what: str, amount: float, times_s: list[float], size_bytes: int | None = None) -> Measured:
    """Return the best and the median rate of calls that each process ``amount`` FLOP or bytes."""
    return Measured(
        what=what,
        best_per_s=amount / min(times_s),
        median_per_s=amount / statistics.median(times_s),
        spread_ratio=spread_ratio(times_s),
        repeats_count=len(times_s),
        size_bytes=size_bytes,
    )


def product(values: Tensor, out: Tensor, m: int, n: int, k: int) -> Call:
    """Return a call that multiplies [m, k] by [k, n], both from ``values``, into ``out``."""
    first, right = values[: m * k].view(m, k), values[-k * n :].view(k, n)
    into = out[: m * n].view(m, n)
    return lambda: torch.mm(first, right, out=into)


def stream(arrays: list[Tensor]) -> dict[str, tuple[int, Call]]:
    """STREAM's kernels on three arrays: how many each passes over, and a call that runs it once."""
    a, b, c = arrays
    calls: dict[str, Call] = {
        "copy": lambda: c.copy_(a),
        "scale": lambda: torch.mul(c, _SCALAR, out=b),
        "add": lambda: torch.add(a, b, out=c),
        "triad": lambda: torch.add(b, c, alpha=_SCALAR, out=a),
    }
    return {name: (STREAM_PASSES[name], call) for name, call in calls.items()}


def bus_factors(ranks: int) -> dict[str, float]:
    """Bus bandwidth over algorithm bandwidth of each collective (nccl-tests, PERFORMANCE.md)."""
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "broadcast": 1.0,
        "send_receive": 1.0,
    }


class Collectives:
    """Collectives of the default group on the same memory; a size is that of the whole array."""

    def __init__(self, largest_bytes: int, ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        self.after, self.before = ((dist.get_rank() + step) % ranks for step in (1, -1))
        # Zeros, because the sum of anything else grows with each call, beyond all bounds; and
        # written, so that no page is touched first while it is timed.
        self.sent, self.received = (
            torch.empty(largest_bytes // 4, device=device).zero_() for _ in range(2)
        )
        self.part = torch.empty(largest_bytes // 4 // ranks, device=device).zero_()

    def call(self, name: str, size_bytes: int) -> Call:
        """A call that runs the collective once, on whole elements of each rank."""
        count = size_bytes // 4 // self.ranks * self.ranks
        sent, received = self.sent[:count], self.received[:count]
        part = self.part[: count // self.ranks]
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(received),
            "all_gather": lambda: gather_into(received, part),
            "reduce_scatter": lambda: scatter_sum(part, sent),
            "all_to_all": lambda: dist.all_to_all_single(received, sent),
            "broadcast": lambda: dist.broadcast(received, src=0),
            "send_receive": lambda: self._pass_on(received, sent),
        }
        return calls[name]

    def _pass_on(self, received: Tensor, sent: Tensor) -> None:
        pair = [
            dist.P2POp(dist.irecv, received, self.before),
            dist.P2POp(dist.isend, sent, self.after),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()


def launch_times_ns(device: torch.device) -> tuple[int, int]:
    """Time that the host takes to issue the smallest operator, and to see that it has run."""
    one, other = torch.ones(1, device=device), torch.ones(1, device=device)

    def batch_ns(calls: int, *, finish: bool) -> float:
        begin_ns = time.perf_counter_ns()
        for _ in range(calls):
            one.add_(other)
        if finish:
            wait(device)
        took_ns = time.perf_counter_ns() - begin_ns
        wait(device)
        return took_ns / calls

    return (
        round(statistics.median(batch_ns(100, finish=False) for _ in range(30))),
        round(statistics.median(batch_ns(1, finish=True) for _ in range(100))),
    )
