"""What is injected into the model: one cause at a time in three magnitudes, and five together.

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
_POWER, _THERMAL = 4, 32
_LAST = (1,)


@dataclass(frozen=True, slots=True)
class Injection:
    """One kind of trouble.

    Attributes:
        name, cause: as shown; the cause that it belongs to.
        doc: what is done, in one sentence.
        turns: magnitude → knobs to turn.
        base: knobs that are turned with and without the injection.
        scale_ns: magnitude → what errors are shares of, where the truth is that it costs nothing.
        factor: the factor that an honest attribution may say it did not measure; None: none.
    """

    name: str
    cause: str
    doc: str
    turns: Mapping[str, Mapping[str, Any]]
    base: Mapping[str, Any] = field(default_factory=dict)
    scale_ns: Mapping[str, int] | None = None
    factor: str | None = None

    def plans(self, magnitude: str, *, flavour: str, seed: int) -> tuple[Plan, Plan]:
        """The job without and with it."""
        without = Plan(flavour=flavour, seed=seed, **self.base)
        return without, replace(without, **self.turns[magnitude])


def _three(small: Any, medium: Any, large: Any) -> dict[str, Any]:
    return {"small": small, "medium": medium, "large": large}


def _doses(knob: str, *amounts: float, **how: Any) -> dict[str, dict[str, Any]]:
    small, medium, large = ({knob: Dose(amount, **how)} for amount in amounts)
    return _three(small, medium, large)


def _join(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {m: {k: v for part in parts for k, v in part[m].items()} for m in parts[0]}


def _dips(reason: int, *ratios: float, begin_ms: float = 22.35, end_ms: float = 113.71) -> Any:
    small, medium, large = (
        {
            "clocks": (
                Clock(ratio, reason, begin_ns=round(begin_ms * _MS), end_ns=round(end_ms * _MS)),
            )
        }
        for ratio in ratios
    )
    return _three(small, medium, large)


def _changing(ratio: float, *low_ms: tuple[float, float]) -> dict[str, Any]:
    """The clock is low between these times, which lie anywhere in kernels."""
    return {
        "clocks": tuple(
            Clock(ratio, _POWER, begin_ns=round(begin * _MS), end_ns=round(end * _MS))
            for begin, end in low_ms
        )
    }


_SLOWLY = ((21.37, 68.92), (103.55, 147.21), (181.83, 239.46))
_QUICKLY = tuple(
    (begin, begin + 9.7) for begin in (4.1, 21.9, 41.3, 58.6, 79.9, 97.2, 118.4, 136.3)
)


_PLAIN = (
    Injection(
        "data_stall",
        "idle.preparation.data",
        "The next batch comes late.",
        _doses("data", 0.3 * _MS, 3 * _MS, 15 * _MS),
    ),
    Injection(
        "synchronization",
        "idle.preparation.synchronization",
        "Two more values are read back in each step, and the host comes back late.",
        _join(
            _doses("synchronization", 0.1 * _MS, 0.5 * _MS, 3 * _MS),
            _three(*[{"synchronization_count": 2}] * 3),
        ),
    ),
    Injection(
        "launch_bound",
        "idle.preparation.dispatch",
        "Each operator takes longer on the host.",
        _doses("dispatch", 0.1 * _MS, 0.25 * _MS, 0.6 * _MS),
    ),
    Injection(
        "slow_launch_calls",
        "idle.call",
        "Each launch call takes longer.",
        _doses("call", 0.1 * _MS, 0.25 * _MS, 0.6 * _MS),
    ),
    Injection(
        "runtime_calls",
        "idle.preparation.runtime",
        "A slow query of the runtime before each layer.",
        _doses("query", 0.3 * _MS, 3 * _MS, 8 * _MS),
    ),
    Injection(
        "user_python",
        "idle.preparation.python",
        "Python code before each layer.",
        _doses("python", 0.3 * _MS, 3 * _MS, 8 * _MS),
    ),
    Injection(
        "garbage_collection",
        "idle.preparation.gc",
        "Python's collector runs before each layer.",
        _doses("collection", 0.3 * _MS, 3 * _MS, 8 * _MS),
    ),
    Injection(
        "allocator",
        "idle.preparation.allocator",
        "cudaMalloc or hipMalloc before each layer.",
        _doses("allocator", 0.3 * _MS, 3 * _MS, 8 * _MS),
    ),
    Injection(
        "profiler_overhead",
        "idle.preparation.profiler",
        "The profiler works on its buffers before each layer.",
        _doses("profiler", 0.3 * _MS, 3 * _MS, 8 * _MS),
    ),
    Injection(
        "collective_wait",
        "idle.preparation.collective_wait",
        "A barrier on the host before each forward.",
        _doses("barrier", 0.3 * _MS, 3 * _MS, 10 * _MS),
    ),
    Injection(
        "straggler",
        "communication.wait",
        "Model math is slower on one rank.",
        _doses("slow", 0.02, 0.1, 0.5, ranks=_LAST),
    ),
    Injection(
        "slow_link",
        "communication.transfer.below_peak",
        "Transfers take longer than they need at the link's peak.",
        _doses("link", 0.3, 1.5, 6.0),
    ),
    Injection(
        "exposed_communication",
        "communication.transfer",
        "Parameters are gathered only when they are needed: of one layer, two, three.",
        _three(*({"late_layers": n, "layers": 4} for n in (2, 3, 4))),
        base={"layers": 4},
    ),
    Injection(
        "exposed_copy",
        "copy.host_to_device",
        "The device waits for a copy from the host before each layer.",
        _doses("copy", 0.6 * _MS, 1.5 * _MS, 4 * _MS),
    ),
    Injection(
        "exposed_memset",
        "copy.memset",
        "A memset on the compute stream before each layer.",
        _doses("fill", 0.1 * _MS, 0.5 * _MS, 2 * _MS),
    ),
    Injection(
        "clock_power_cap",
        "compute.clock.power_cap",
        "A power cap lowers the clock for more than half of the run.",
        _dips(_POWER, 0.90, 0.80, 0.60),
        base={"layers": 3, "steps": 6},
    ),
    Injection(
        "clock_thermal",
        "compute.clock.thermal",
        "Heat lowers the clock for more than half of the run.",
        _dips(_THERMAL, 0.90, 0.80, 0.60),
        base={"layers": 3, "steps": 6},
    ),
    Injection(
        "contention",
        "compute.contention",
        "Kernels beside communication take longer.",
        _doses("contention", 0.08, 0.2, 0.6),
        base={"layers": 3, "quiet_every": 2, "steps": 6},
    ),
    Injection(
        "recomputation",
        "compute.recompute",
        "Layers run their forward again in backward: one, two, three.",
        _doses("recompute", 1, 2, 3),
        base={"layers": 3},
    ),
    Injection(
        "vector_excess",
        "compute.vector.excess",
        "Memory-bound work takes longer than its bytes need.",
        _doses("vector", 0.1, 0.5, 2.0),
    ),
    Injection(
        "wave_quantization",
        "compute.efficiency.wave_quantization",
        "The last round of blocks fills only a part of the units.",
        _doses("wave", 0.9, 0.6, 0.1),
        factor="wave quantization",
    ),
    Injection(
        "inefficiency",
        "compute.efficiency.rest",
        "Model math is slower, for no reason that can be measured.",
        _doses("slow", 0.02, 0.1, 0.5),
    ),
    Injection(
        "launch_latency",
        "idle.launch_latency",
        "The device takes longer from one kernel of a stream to the next.",
        _three(*({"stream_gap_ns": n} for n in (2_000, 8_000, 40_000))),
    ),
    Injection(
        "stream_dependency",
        "idle.dependency",
        "The device takes longer to see that another stream is done.",
        _three(*({"event_gap_ns": n} for n in (10_000, 30_000, 100_000))),
        base={"late_layers": 2},
    ),
)

_AHEAD = {"ahead": True}
_HARD = (
    Injection(
        "stall_behind_queue",
        "idle.preparation.data",
        "The batch comes late, but the device has work queued for longer: it costs nothing.",
        _doses("data", 1 * _MS, 4 * _MS, 9 * _MS),
        base=_AHEAD,
        scale_ns=_three(8 * 10**6, 32 * 10**6, 72 * 10**6),
    ),
    Injection(
        "stall_partly_hidden",
        "idle.preparation.data",
        "The batch comes later than the queued work lasts.",
        _doses("data", 24 * _MS, 30 * _MS, 45 * _MS),
        base=_AHEAD,
    ),
    Injection(
        "stall_over_step_end",
        "idle.preparation.data",
        "Python at the end of a step, then a late batch at the beginning of the next: one gap.",
        _join(
            _doses("before_boundary", 0.4 * _MS, 2 * _MS, 9 * _MS),
            _doses("data", 0.3 * _MS, 3 * _MS, 12 * _MS),
        ),
    ),
    Injection(
        "collection_in_data",
        "idle.preparation.gc",
        "The collector runs while a batch is made.",
        _join(
            _doses("data_collection", 0.3 * _MS, 2 * _MS, 10 * _MS),
            _doses("data", 0.2 * _MS, 1 * _MS, 4 * _MS),
        ),
    ),
    Injection(
        "three_at_one_gap",
        "idle.preparation.allocator",
        "Python, the collector and the allocator in the same gaps.",
        _join(
            _doses("allocator", 0.3 * _MS, 3 * _MS, 8 * _MS),
            _doses("python", 0.2 * _MS, 2 * _MS, 5 * _MS),
            _doses("collection", 0.1 * _MS, 1 * _MS, 6 * _MS),
        ),
    ),
    Injection(
        "straggler_by_data",
        "communication.wait",
        "One rank's batch comes late; the others wait for it in a collective.",
        _doses("data", 0.5 * _MS, 3 * _MS, 12 * _MS, ranks=_LAST),
    ),
    Injection(
        "synchronized_then_launch_bound",
        "idle.preparation.dispatch",
        "A value read back empties the queue, and slow operators never fill it again.",
        _join(
            _doses("dispatch", 0.05 * _MS, 0.2 * _MS, 0.5 * _MS),
            _doses("synchronization", 0.05 * _MS, 0.2 * _MS, 0.5 * _MS),
            _three(*[{"synchronization_count": 3}] * 3),
        ),
    ),
    Injection(
        "copy_partly_hidden",
        "copy.host_to_device",
        "Copies start a layer ahead, and are not done in time.",
        _doses("copy", 5 * _MS, 8 * _MS, 12 * _MS),
        base={"copy_ahead": True, "late_layers": 1},
    ),
    Injection(
        "straggler_in_two_groups",
        "communication.wait",
        "Four ranks, sharded in pairs and reduced across pairs; one of them is slow.",
        _doses("slow", 0.03, 0.1, 0.4, ranks=(3,)),
        base={"ranks": 4, "hybrid": True, "layers": 2, "steps": 3},
    ),
    Injection(
        "python_before_graphs",
        "idle.preparation.python",
        "Each layer is one graph launch; Python runs before it.",
        _doses("python", 0.5 * _MS, 4 * _MS, 9 * _MS),
        base={"graph": True},
    ),
    Injection(
        "clock_in_kernels",
        "compute.clock.power_cap",
        "The clock goes down and up in the middle of kernels.",
        _three(*(_changing(ratio, *_SLOWLY) for ratio in (0.90, 0.75, 0.60))),
        base={"layers": 3, "steps": 8},
    ),
    Injection(
        "clock_matters_less",
        "compute.clock.thermal",
        "Kernels depend on the clock less than their place under the roofline says.",
        _dips(_THERMAL, 0.85, 0.75, 0.60),
        base={"layers": 3, "sensitivity": 0.85, "quiet_every": 2, "steps": 8},
    ),
    Injection(
        "clock_low_throughout",
        "compute.clock.power_cap",
        "The clock is low for the whole run and sampled at 10 Hz.",
        _three(*({"clocks": (Clock(ratio, _POWER),)} for ratio in (0.90, 0.75, 0.50))),
        base={"telemetry_hz": 10.0, "steps": 4},
    ),
    Injection(
        "clock_dips_unseen",
        "compute.clock.power_cap",
        "Dips that are shorter than the time between two samples: nobody can know.",
        _three(*(_changing(ratio, *_QUICKLY) for ratio in (0.85, 0.75, 0.60))),
        base={"layers": 3, "telemetry_hz": 87.0},
        factor="clock",
    ),
)

INJECTIONS: dict[str, Injection] = {i.name: i for i in (*_PLAIN, *_HARD)}


@dataclass(frozen=True, slots=True)
class Mix:
    """Five causes at once."""

    name: str
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
    m.name: m
    for m in (
        Mix(
            "mixed_host",
            ("data_stall", "user_python", "garbage_collection", "allocator", "launch_bound"),
        ),
        Mix(
            "mixed_device",
            ("clock_power_cap", "contention", "vector_excess", "slow_link", "data_stall"),
        ),
        Mix(
            "mixed_ranks",
            ("straggler", "exposed_copy", "recomputation", "synchronization", "collective_wait"),
        ),
    )
}
