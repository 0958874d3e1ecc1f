"""Injections into the model: one cause at a time in three magnitudes, and five together.

Beside the plain ones stand those that are easily booked wrongly: hidden behind a queue, across the
end of a step, inside one another, two at one gap, late because of another rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chopper.validation.model.plan import Clock, Dose, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

_MS = 1e6
_MAGNITUDES = ("small", "medium", "large")
_POWER, _THERMAL = 4, 32
_LAST = (1,)


@dataclass(frozen=True, slots=True)
class Injection:
    """One kind of trouble.

    Attributes:
        cause: the cause that it belongs to.
        turns: magnitude → knobs of the plan to turn.
        base: knobs that are turned with and without the injection.
        scale_ns: magnitude → what errors are shares of, where the truth is that it costs nothing.
        factor: the factor that an honest attribution may say it did not measure; None: none.
    """

    cause: str
    turns: Mapping[str, Mapping[str, Any]]
    base: Mapping[str, Any] = field(default_factory=dict)
    scale_ns: Mapping[str, int] | None = None
    factor: str | None = None

    def plans(self, magnitude: str, *, flavour: str, seed: int) -> tuple[Plan, Plan]:
        """The job without and with it."""
        without = Plan(flavour=flavour, seed=seed, **self.base)
        return without, replace(without, **self.turns[magnitude])


def _values(**knobs: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """Magnitude → knobs, each given as its (small, medium, large) values."""
    return {m: {k: v[i] for k, v in knobs.items()} for i, m in enumerate(_MAGNITUDES)}


def _doses(
    ranks: tuple[int, ...] | None = None, unit: float = 1, **knobs: tuple[float, float, float]
) -> dict[str, dict[str, Any]]:
    small, medium, large = (
        {k: Dose(v[i] * unit, ranks=ranks) for k, v in knobs.items()} for i in range(3)
    )
    return {"small": small, "medium": medium, "large": large}


def _ms(
    ranks: tuple[int, ...] | None = None, **knobs: tuple[float, float, float]
) -> dict[str, dict[str, Any]]:
    return _doses(ranks, _MS, **knobs)


def _join(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {m: {k: v for part in parts for k, v in part[m].items()} for m in _MAGNITUDES}


def _dips(
    reason: int, *ratios: float, low_ms: tuple[tuple[float, float], ...] = ((22.35, 113.71),)
) -> dict[str, dict[str, Any]]:
    """The clock is low between these times, which lie anywhere in kernels."""
    small, medium, large = (
        tuple(
            Clock(ratio, reason, begin_ns=round(begin * _MS), end_ns=round(end * _MS))
            for begin, end in low_ms
        )
        for ratio in ratios
    )
    return _values(clocks=(small, medium, large))


_SLOWLY = ((21.37, 68.92), (103.55, 147.21), (181.83, 239.46))
_QUICKLY = tuple(
    (begin, begin + 9.7) for begin in (4.1, 21.9, 41.3, 58.6, 79.9, 97.2, 118.4, 136.3)
)
_CLOCK_BASE = {"layers": 3, "steps": 6}
_AHEAD = {"ahead": True}

INJECTIONS: dict[str, Injection] = {
    # The next batch comes late.
    "data_stall": Injection("idle.preparation.data", _ms(data=(0.3, 3, 15))),
    # Two more values are read back in each step, and the host comes back late.
    "synchronization": Injection(
        "idle.preparation.synchronization",
        _join(_ms(synchronization=(0.1, 0.5, 3)), _values(synchronization_count=(2, 2, 2))),
    ),
    # Each operator takes longer on the host.
    "launch_bound": Injection("idle.preparation.dispatch", _ms(dispatch=(0.1, 0.25, 0.6))),
    # Each launch call takes longer.
    "slow_launch_calls": Injection("idle.call", _ms(call=(0.1, 0.25, 0.6))),
    # Before each layer: a slow query of the runtime, Python, its collector, cudaMalloc or
    # hipMalloc, the profiler's work on its buffers.
    "runtime_calls": Injection("idle.preparation.runtime", _ms(query=(0.3, 3, 8))),
    "user_python": Injection("idle.preparation.python", _ms(python=(0.3, 3, 8))),
    "garbage_collection": Injection("idle.preparation.gc", _ms(collection=(0.3, 3, 8))),
    "allocator": Injection("idle.preparation.allocator", _ms(allocator=(0.3, 3, 8))),
    "profiler_overhead": Injection("idle.preparation.profiler", _ms(profiler=(0.3, 3, 8))),
    # A barrier on the host before each forward.
    "collective_wait": Injection("idle.preparation.collective_wait", _ms(barrier=(0.3, 3, 10))),
    # Model math is slower on one rank.
    "straggler": Injection("communication.wait", _doses(_LAST, slow=(0.02, 0.1, 0.5))),
    # Transfers take longer than they need at the link's peak.
    "slow_link": Injection("communication.transfer.below_peak", _doses(link=(0.3, 1.5, 6.0))),
    # Parameters are gathered only when they are needed: of two layers, three, four.
    "exposed_communication": Injection(
        "communication.transfer",
        _values(late_layers=(2, 3, 4), layers=(4, 4, 4)),
        base={"layers": 4},
    ),
    # The device waits for a copy from the host, or for a memset, before each layer.
    "exposed_copy": Injection("copy.host_to_device", _ms(copy=(0.6, 1.5, 4))),
    "exposed_memset": Injection("copy.memset", _ms(fill=(0.1, 0.5, 2))),
    # A power cap, or heat, lowers the clock for more than half of the run.
    "clock_power_cap": Injection(
        "compute.clock.power_cap", _dips(_POWER, 0.90, 0.80, 0.60), base=_CLOCK_BASE
    ),
    "clock_thermal": Injection(
        "compute.clock.thermal", _dips(_THERMAL, 0.90, 0.80, 0.60), base=_CLOCK_BASE
    ),
    # Kernels beside communication take longer.
    "contention": Injection(
        "compute.contention",
        _doses(contention=(0.08, 0.2, 0.6)),
        base={"layers": 3, "quiet_every": 2, "steps": 6},
    ),
    # Layers run their forward again in backward: one, two, three.
    "recomputation": Injection(
        "compute.recompute", _doses(recompute=(1, 2, 3)), base={"layers": 3}
    ),
    # Memory-bound work takes longer than its bytes need.
    "vector_excess": Injection("compute.vector.excess", _doses(vector=(0.1, 0.5, 2.0))),
    # The last round of blocks fills only a part of the units.
    "wave_quantization": Injection(
        "compute.efficiency.wave_quantization",
        _doses(wave=(0.9, 0.6, 0.1)),
        factor="wave quantization",
    ),
    # Model math is slower, for no reason that can be measured.
    "inefficiency": Injection("compute.efficiency.rest", _doses(slow=(0.02, 0.1, 0.5))),
    # The device takes longer from one kernel of a stream to the next.
    "launch_latency": Injection(
        "idle.launch_latency", _values(stream_gap_ns=(2_000, 8_000, 40_000))
    ),
    # The device takes longer to see that another stream is done.
    "stream_dependency": Injection(
        "idle.dependency",
        _values(event_gap_ns=(10_000, 30_000, 100_000)),
        base={"late_layers": 2},
    ),
    # The batch comes late, but the device has work queued for longer: it costs nothing.
    "stall_behind_queue": Injection(
        "idle.preparation.data",
        _ms(data=(1, 4, 9)),
        base=_AHEAD,
        scale_ns={"small": 8_000_000, "medium": 32_000_000, "large": 72_000_000},
    ),
    # The batch comes later than the queued work lasts.
    "stall_partly_hidden": Injection("idle.preparation.data", _ms(data=(24, 30, 45)), base=_AHEAD),
    # Python at the end of a step, then a late batch at the beginning of the next: one gap.
    "stall_over_step_end": Injection(
        "idle.preparation.data", _ms(before_boundary=(0.4, 2, 9), data=(0.3, 3, 12))
    ),
    # The collector runs while a batch is made.
    "collection_in_data": Injection(
        "idle.preparation.gc", _ms(data_collection=(0.3, 2, 10), data=(0.2, 1, 4))
    ),
    # Python, the collector and the allocator in the same gaps.
    "three_at_one_gap": Injection(
        "idle.preparation.allocator",
        _ms(allocator=(0.3, 3, 8), python=(0.2, 2, 5), collection=(0.1, 1, 6)),
    ),
    # One rank's batch comes late; the others wait for it in a collective.
    "straggler_by_data": Injection("communication.wait", _ms(_LAST, data=(0.5, 3, 12))),
    # A value read back empties the queue, and slow operators never fill it again.
    "synchronized_then_launch_bound": Injection(
        "idle.preparation.dispatch",
        _join(
            _ms(dispatch=(0.05, 0.2, 0.5), synchronization=(0.05, 0.2, 0.5)),
            _values(synchronization_count=(3, 3, 3)),
        ),
    ),
    # Copies start a layer ahead, and are not done in time.
    "copy_partly_hidden": Injection(
        "copy.host_to_device",
        _ms(copy=(5, 8, 12)),
        base={"copy_ahead": True, "late_layers": 1},
    ),
    # Four ranks, sharded in pairs and reduced across pairs; one of them is slow.
    "straggler_in_two_groups": Injection(
        "communication.wait",
        _doses((3,), slow=(0.03, 0.1, 0.4)),
        base={"ranks": 4, "hybrid": True, "layers": 2, "steps": 3},
    ),
    # Each layer is one graph launch; Python runs before it.
    "python_before_graphs": Injection(
        "idle.preparation.python", _ms(python=(0.5, 4, 9)), base={"graph": True}
    ),
    # The clock goes down and up in the middle of kernels.
    "clock_in_kernels": Injection(
        "compute.clock.power_cap",
        _dips(_POWER, 0.90, 0.75, 0.60, low_ms=_SLOWLY),
        base={"layers": 3, "steps": 8},
    ),
    # Kernels depend on the clock less than their place under the roofline says.
    "clock_matters_less": Injection(
        "compute.clock.thermal",
        _dips(_THERMAL, 0.85, 0.75, 0.60),
        base={"layers": 3, "sensitivity": 0.85, "quiet_every": 2, "steps": 8},
    ),
    # The clock is low for the whole run and sampled at 10 Hz.
    "clock_low_throughout": Injection(
        "compute.clock.power_cap",
        _values(clocks=tuple((Clock(ratio, _POWER),) for ratio in (0.90, 0.75, 0.50))),
        base={"telemetry_hz": 10.0, "steps": 4},
    ),
    # Dips that are shorter than the time between two samples: nobody can know.
    "clock_dips_unseen": Injection(
        "compute.clock.power_cap",
        _dips(_POWER, 0.85, 0.75, 0.60, low_ms=_QUICKLY),
        base={"layers": 3, "telemetry_hz": 87.0},
        factor="clock",
    ),
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Five causes at once."""

    parts: tuple[str, ...]

    def plans(self, magnitude: str, *, flavour: str, seed: int) -> tuple[Plan, Plan]:
        """The job without and with all of them."""
        base: dict[str, Any] = {}
        turns: dict[str, Any] = {}
        for part in self.parts:
            base |= INJECTIONS[part].base
            turns |= INJECTIONS[part].turns[magnitude]
        without = Plan(flavour=flavour, seed=seed, **base)
        return without, replace(without, **turns)


MIXES: dict[str, Mix] = {
    "mixed_host": Mix(
        ("data_stall", "user_python", "garbage_collection", "allocator", "launch_bound")
    ),
    "mixed_device": Mix(
        ("clock_power_cap", "contention", "vector_excess", "slow_link", "data_stall")
    ),
    "mixed_ranks": Mix(
        ("straggler", "exposed_copy", "recomputation", "synchronization", "collective_wait")
    ),
}
