"""Overheads of each operation: how its ideal time became the time that it took.

An operation is an operator within a module, with the indices of its path left out
(`layers.*.ffn.w1`), in one phase; where no module was recorded, an operator with the shapes of its
inputs. One call's time is a product,

    observed = ideal × roofline × instructions × tensor cores × wave quantization × contention
             × clock × CPU contention × rest

exactly: with the time cᵢ that the attribution gives to a cause, the factor is fᵢ = exp(cᵢ / L),
L = (observed − ideal) / ln(observed / ideal). These are the factors of the Chopper paper (arXiv
2512.08242): performed over theoretical FLOP, the inverse of the busy share of the matrix units, the
overlap with communication, and the clock. There the clock's factor is what is left over, here it is
measured, and the rest stands beside it. The ideal of memory-bound work is its bytes over the
memory's bandwidth.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.calls import Calls
from chopper.analyzers.events.device import Events, modules, recorded_arguments
from chopper.analyzers.events.groups import (
    Groups,
    real_or_null,
    text_rows,
    time_by_cause,
    whole_or_null,
)
from chopper.analyzers.views import View, column, optional
from chopper.causes import CAUSES, LEAVES

_COUNTED = "instructions and tensor cores"
_FACTORS = {
    "roofline_ratio": ("compute.roofline", ""),
    "instructions_ratio": ("compute.efficiency.instructions", _COUNTED),
    "tensor_core_ratio": ("compute.efficiency.tensor_core", _COUNTED),
    "wave_quantization_ratio": ("compute.efficiency.wave_quantization", "wave quantization"),
    "contention_ratio": ("compute.contention", "contention"),
    "clock_ratio": ("compute.clock", "clock"),
    "core_wait_ratio": ("compute.core_wait", ""),
    "rest_ratio": ("compute.efficiency.rest", ""),
}
"""Column → the cause that it is made of, and the name under which that is unmeasured."""
_IDEAL = ("compute.ideal", "compute.vector.roofline")
_EXCESS = "compute.vector.excess"
_LAUNCH = ("idle.call", "idle.launch_latency")

VIEW = View(
    "overheads",
    __doc__,
    (
        optional("module", "Module, its indices as *; null where none was recorded."),
        optional("op", "Operator; null where none launched the kernels."),
        column("phase", "Phase: forward, backward, optimizer or another one."),
        optional("ideal_ns", "Ideal time of one call; null with a reason."),
        optional("roofline_ratio", "Factor of a product whose bytes take longer than its FLOP."),
        optional("instructions_ratio", "Performed over theoretical FLOP; null without counters."),
        optional("tensor_core_ratio", "Factor of idle tensor cores; null without counters."),
        optional("wave_quantization_ratio", "Factor of the last wave; null where unknown."),
        optional("contention_ratio", "Factor of overlap with other kernels; null where unknown."),
        optional("clock_ratio", "Factor of a clock below the reference; null where not sampled."),
        optional("core_wait_ratio", "Factor of missing CPU cores; null in runs with a device."),
        optional("rest_ratio", "Factor that nothing measured explains."),
        column("observed_ns", "Time that one call alone accounts for (level 1)."),
        column("launch_ns", "Idle time of the device before one call, while it was launched."),
        column("preparation_ns", "Other idle time of the device before one call."),
        column("call_count", "Number of calls, over all ranks and steps."),
        column("time_ns", "Time that all calls alone account for."),
        optional("reason", "Reason why there is no ideal time; null where there is one.", "text"),
        optional("input_dims", "Shapes of the inputs, JSON; null where a module was recorded."),
    ),
    title="Overheads by operation",
    section="Operators",
    needs="nothing was computed",
)


def overheads(run: Attributed, events: Events, calls: Calls) -> pa.Table:
    """PIECE, EVENT_LINK -> OVERHEADS, most time first."""
    groups, columns = _operations(run, events, calls)
    times = time_by_cause(
        run.pieces, events.rank, events.row, groups.of_row[calls.groups.of_row], len(groups)
    )

    def total(*causes: str) -> np.ndarray:
        above = tuple(f"{cause}." for cause in causes)
        within = [t for leaf, t in times.items() if f"{leaf}.".startswith(above)]
        return np.sum(within, axis=0, dtype=np.int64, initial=0) + np.zeros(len(groups), np.int64)

    count, time_ns, ideal_ns = groups.count, total("compute"), total(*_IDEAL)
    launch_ns = total(*_LAUNCH)
    of_factor = {name: total(cause) for name, (cause, _) in _FACTORS.items()}
    of_factor["rest_ratio"] += total(_EXCESS)
    known = (ideal_ns > 0) & (ideal_ns + sum(of_factor.values()) == time_ns)
    columns |= _factors(run, known, ideal_ns, time_ns, of_factor)
    columns |= {
        "ideal_ns": whole_or_null(np.where(known, ideal_ns / count, np.nan)),
        "observed_ns": np.rint(time_ns / count).astype(np.int64),
        "launch_ns": np.rint(launch_ns / count).astype(np.int64),
        "preparation_ns": np.rint((total("idle") - launch_ns) / count).astype(np.int64),
        "call_count": count,
        "time_ns": time_ns,
        "reason": _reasons(known, times),
    }
    order = np.argsort(-time_ns, kind="stable")
    return VIEW.of(columns).take(order[time_ns[order] > 0])


def _operations(
    run: Attributed, events: Events, calls: Calls
) -> tuple[Groups, dict[str, pa.Array | np.ndarray]]:
    """Group calls by module, operator and phase; by shapes where there is no module."""
    first = calls.groups.first
    of_module, paths = modules(run, events, first)
    dims, shapes = recorded_arguments(run, events, first, "input_dims")
    dims = np.where(of_module >= 0, -1, dims)
    groups = Groups([of_module, events.op[0][first], events.phase[0][first], dims])
    one = first[groups.first]
    return groups, {
        "module": text_rows((of_module, paths), groups.first),
        "op": text_rows(events.op, one),
        "phase": text_rows(events.phase, one),
        "input_dims": text_rows((dims, shapes), groups.first),
    }


def _factors(
    run: Attributed,
    known: np.ndarray,
    ideal_ns: np.ndarray,
    time_ns: np.ndarray,
    of_factor: dict[str, np.ndarray],
) -> dict[str, pa.Array | np.ndarray]:
    """Return the factors, null where there is no ideal time, or where one was not measured."""
    unmeasured = {name for factors in run.factors.values() for name in factors.unmeasured}
    ratio = np.where(known, time_ns / np.maximum(ideal_ns, 1), 1.0)
    # L(t, t₀) / t₀ tends to 1 where both are equal, and no cause has time then.
    mean_ns = ideal_ns * np.divide(
        ratio - 1, np.log(ratio), out=np.ones(len(ratio)), where=ratio > 1
    )
    found: dict[str, pa.Array | np.ndarray] = {}
    for name, (_, measured_as) in _FACTORS.items():
        own_ns = of_factor[name]
        factor = np.exp(np.where(known, own_ns / np.maximum(mean_ns, 1), 0.0))
        absent = measured_as in unmeasured or (name == "core_wait_ratio" and not own_ns.any())
        found[name] = real_or_null(np.where(known & ~(absent & (own_ns == 0)), factor, np.nan))
    return found


def _reasons(known: np.ndarray, times: dict[str, np.ndarray]) -> pa.Array:
    """Name, of each operation without an ideal time, the cause that has most of its time."""
    leaves = [leaf for leaf in LEAVES if leaf.startswith("compute.") and leaf in times]
    plain = [leaf for leaf in leaves if leaf not in _IDEAL]
    if not plain:
        return pa.nulls(len(known), pa.string())
    most = np.argmax([times[leaf] for leaf in plain], axis=0)
    said = [CAUSES[leaf].label for leaf in plain]
    return pa.array(
        [None if ok else f"no ideal time: {said[i]}" for ok, i in zip(known, most, strict=True)]
    )
