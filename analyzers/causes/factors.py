"""The measured factors of each kernel's time: clock, contention, wave quantization, counters.

A factor is the logarithm of how many times longer the kernel took for that reason, 0 where nothing
is claimed. What could not be measured is named with the reason; it stays in the rest.

Wave quantization: a unit (SM) that is given two of a kernel's blocks takes twice as long as one
that is given one. With g blocks on u units the fullest unit has ⌈g/u⌉ of them where an even spread
would have g/u, so the kernel takes at least ⌈g/u⌉ ÷ (g/u) times as long as its blocks need. Where
each resident block would take as long beside others as alone, the loss is larger, up to ⌈w⌉ ÷ w
with w = g ÷ (u · resident) waves (NVIDIA, Matrix Multiplication Background, wave quantization).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.causes.clock import (
    CLOCK_LABELS,
    NO_OVERLAP,
    NO_SAMPLES,
    SPARSE,
    EventClocks,
    Held,
    join_clocks,
)
from chopper.analyzers.causes.clock_sensitivity import (
    Averaged,
    Sensitivity,
    UnknownWork,
    averaged_readings,
    estimate,
)
from chopper.analyzers.causes.contention import (
    MIN_ALONE,
    Contention,
    contend,
    ran_alone,
    shared_time,
)
from chopper.analyzers.causes.counters import join_counters
from chopper.analyzers.causes.event_work import EventWork
from chopper.analyzers.causes.states import States
from chopper.analyzers.trace.columns import distinct_rows, ints, pick, strings
from chopper.analyzers.trace.join import COMPUTE, Links
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.tables import RankTables
from chopper.errors import JSON_ERRORS
from chopper.hardware.ceilings import Ceiling, UnitLimits
from chopper.storage.manifest import Finding
from chopper.tables import TABLES

VECTOR_DTYPE = "fp32_vector"
"""Work without a product runs on the units that this peak counts: its clock is the reference."""


@dataclass(frozen=True)
class Factors:
    """Per device event, in the order of the table; logarithms are at least 0.

    Attributes:
        clock_ln: clock below the reference, weighted by the sensitivity.
        reference_hz: clock that the event's peak is quoted at, NaN where not known.
        boost_ln: ln(reference ÷ clock) where the clock was above the reference, else 0: how much
            faster than its peak a product may be.
        signature: number of the distinct work, -1 where the event was not compared.
        by_signature: sensitivity of each signature.
        slope, slope_error: dependence on the clock of events of unknown work, as measured in this
            run; NaN where it was not, and of all others.
        averaged: how the clock's readings contradict the kernels; None where they do not.
        contention: slowdowns by signature, of the events with one.
        unmeasured: factor → why it was not measured, in words.
        findings: how counters were matched.
    """

    clock_ln: np.ndarray
    contention_ln: np.ndarray
    wave_ln: np.ndarray
    instructions_ln: np.ndarray
    tensor_ln: np.ndarray
    clocks: EventClocks
    reference_hz: np.ndarray
    boost_ln: np.ndarray
    signature: np.ndarray
    by_signature: Sensitivity
    slope: np.ndarray
    slope_error: np.ndarray
    averaged: Averaged | None
    contention: Contention
    unmeasured: dict[str, str]
    findings: list[Finding]

    @property
    def sensitivity(self) -> np.ndarray:
        """Dependence of each event on the SM clock; NaN where nothing tells."""
        known = pick(self.by_signature.value, self.signature, np.nan)
        return np.where(np.isnan(known), self.slope, known)

    @property
    def sensitivity_error(self) -> np.ndarray:
        """Standard error of it."""
        known = pick(self.by_signature.error, self.signature, np.nan)
        return np.where(np.isnan(known), self.slope_error, known)

    def blame(self, links: Links, rows: np.ndarray) -> np.ndarray:
        """(rows, CLOCK_LABELS): weights by which the clock loss of some events is labelled."""
        weights = np.zeros((len(rows), len(CLOCK_LABELS)))
        events = links.events
        for device, series in self.clocks.readers.items():
            at = np.flatnonzero(events.device_id[rows] == device)
            of = rows[at]
            interval = series.locate(events.start_ns[of], events.end_ns[of])
            weights[at] = series.blame(interval, self.reference_hz[of])
        return weights


def measure(joined: JoinedRank, links: Links, states: States, work: EventWork) -> Factors:
    """The factors of one rank's device events. DEVICE_CLOCK, KERNEL_COUNTER, DEVICE_LIMIT."""
    count, ceiling, samples = len(links.events), joined.ceiling, joined.inputs.device_clock
    duration = links.events.dur_ns.astype(np.float64)
    reference = _reference(work, ceiling, count)
    clocks = join_clocks(
        links.events,
        TABLES["device_clock"].empty() if samples is None else samples,
        _held(joined.inputs, reference),
    )
    shared = np.zeros(count, dtype=np.int64)
    for device in np.unique(links.events.device_id):
        mine = np.flatnonzero(links.events.device_id == device)
        shared[mine] = shared_time(links.events.start_ns[mine], links.events.end_ns[mine])
    rows, group, kinds = _compared(links, work)
    signature = np.full(count, -1, dtype=np.int64)
    signature[rows] = group
    alone = ran_alone(duration[rows], shared[rows])
    by_signature = estimate(
        group,
        kinds,
        duration[rows],
        clocks.clock_hz[rows],
        clocks.error_hz[rows],
        alone & clocks.known[rows],
        # 1 for work that only the units limit, 0 where memory does.
        np.divide(
            np.where(work.math[rows], work.ideal_ns[rows], 0.0),
            work.roofline_ns[rows],
            out=np.zeros(len(rows)),
            where=work.roofline_ns[rows] > 0,
        ),
        clocks.reading[rows],
    )
    sensitivity = pick(by_signature.value, signature, np.nan)
    slower = np.log(np.divide(reference, clocks.clock_hz))
    loose = _of_unknown_work(links, work, clocks, shared)
    fits = [(by_signature, group, duration[rows]), (loose.fit, loose.group, duration[loose.rows])]
    averaged = averaged_readings(fits)
    slope, slope_error = loose.of_events(count)
    signed = np.where(np.isnan(sensitivity), slope, sensitivity) * slower
    if averaged is not None:
        signed, slope, slope_error = np.zeros(count), *np.full((2, count), np.nan)
    compared = _corrected(sensitivity, slower, clocks)[rows]
    contention = contend(
        group, kinds, duration[rows], compared, shared[rows], _divided(states, count)[rows]
    )
    contention_ln = np.zeros(count)
    contention_ln[rows] = contention.factor_ln
    wave_ln, no_waves = _waves(links, work, ceiling, rows)
    instructions_ln, tensor_ln, counter_findings, no_counters = _counters(
        links, work, ceiling, wave_ln, joined
    )
    reasons = {
        "clock": _no_clock(clocks, reference, np.concatenate([rows, loose.rows]), ceiling)
        if averaged is None
        else "its readings are averages over a time in which it changed",
        "contention": _no_contention(contention, compared),
        "wave quantization": no_waves,
        "instructions and tensor cores": no_counters,
    }
    return Factors(
        clock_ln=np.maximum(np.nan_to_num(signed), 0.0),
        contention_ln=contention_ln,
        wave_ln=wave_ln,
        instructions_ln=instructions_ln,
        tensor_ln=tensor_ln,
        clocks=clocks,
        reference_hz=reference,
        boost_ln=np.minimum(np.nan_to_num(slower), 0.0),
        signature=signature,
        by_signature=by_signature,
        slope=slope,
        slope_error=slope_error,
        averaged=averaged,
        contention=contention,
        unmeasured={factor: reason for factor, reason in reasons.items() if reason},
        findings=counter_findings,
    )


def _compared(links: Links, work: EventWork) -> tuple[np.ndarray, np.ndarray, int]:
    """Choose the events that are compared with their like -> rows, distinct work of each, count."""
    rows = np.flatnonzero(_of_a_kind(links, work) & (_base_ns(work) >= 0))
    return rows, *_numbered(links, work, rows)


def _base_ns(work: EventWork) -> np.ndarray:
    return np.where(work.vector, work.roofline_ns, work.ideal_ns)


def _of_a_kind(links: Links, work: EventWork) -> np.ndarray:
    """Mask of the events that are known to be model math or memory-bound work."""
    computes = (links.work_class == COMPUTE) & (links.events.dur_ns > 0)
    return computes & (work.math | work.vector)


def _of_unknown_work(
    links: Links, work: EventWork, clocks: EventClocks, shared_ns: np.ndarray
) -> UnknownWork:
    """Fit the dependence on the clock of events whose FLOP or bytes are not known."""
    unknown = _of_a_kind(links, work) & np.isnan(_base_ns(work))
    rows = np.flatnonzero(unknown & clocks.known)
    group, kinds = _numbered(links, work, rows)
    duration = links.events.dur_ns[rows].astype(np.float64)
    fit = estimate(
        group,
        kinds,
        duration,
        clocks.clock_hz[rows],
        clocks.error_hz[rows],
        ran_alone(duration, shared_ns[rows]),
        np.full(len(rows), np.nan),
        clocks.reading[rows],
    )
    return UnknownWork(rows, group, fit)


def _numbered(links: Links, work: EventWork, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Number the distinct work of events -> number of each, count.

    The work is the operator's name, shapes, types and scalar inputs, the kernel's name, its grid
    and block, and the device.
    """
    op, like = links.op_row[rows], work.like_row[rows]
    op = np.where(op < 0, pick(links.op_row, like), op)
    events, host = links.events, links.host
    of_host = (host.names, host.input_dims, host.input_types, host.concrete_inputs)
    first, number = distinct_rows(
        [
            events.names[0][rows],
            strings(events.table, "grid")[0][rows],
            strings(events.table, "block")[0][rows],
            events.device_id[rows],
            *(pick(codes, op) for codes, _ in of_host),
        ]
    )
    return number, len(first)


def _no_contention(contention: Contention, compared: np.ndarray) -> str | None:
    """Return why contention was not measured; None where it was."""
    if not (contention.alone_count > 0).any():
        return (
            "contention cannot be separated from a clock that changes faster than it is sampled"
            if np.isnan(compared).all() and len(compared)
            else "no instance of the same work ran alone"
        )
    overlapped = contention.overlapped_count > 0
    if overlapped.any() and np.isnan(contention.baseline_ns[overlapped]).all():
        return f"fewer than {MIN_ALONE} instances of any work with overlap also ran alone"
    return None


_BELOW_RATIO = 0.99


_COOLER_C = 3.0
"""A sensor so far below the limit was below it: readings are rounded, and 100 ms apart."""


def _held(inputs: RankTables, reference_hz: np.ndarray) -> Held:
    """What the reasons of a rank's readings are checked by. DEVICE_LIMIT, DEVICE_COUNTER.

    The clock that it was set to, None where nothing says that it was, is an application clock
    below the largest; else a largest clock below the one that the peak is quoted at: where a limit
    is set, AMD's driver tells it as the largest.
    """
    limits, counters = inputs.device_limit, inputs.device_counter
    if limits is None or not limits.num_rows:
        return Held()
    row = limits.slice(limits.num_rows - 1).to_pylist()[0]
    application, most = row["sm_clock_application_hz"], row["sm_clock_max_hz"]
    known = reference_hz[np.isfinite(reference_hz)]
    reference = float(np.median(known)) if len(known) else None
    set_hz = None
    if application and application < _BELOW_RATIO * (most or reference or 0):
        set_hz = float(application)
    elif most and reference and most < _BELOW_RATIO * reference:
        set_hz = float(most)

    def is_below(sensor: str, limit_c: Any) -> bool:
        hottest_c = None if counters is None else pc.max(counters[sensor]).as_py()
        known = limit_c is not None and hottest_c is not None
        return known and bool(hottest_c <= limit_c - _COOLER_C)

    return Held(
        set_hz,
        row["power_limit_w"] if row["power_basis"] == "instant" else None,
        is_below("temperature_c", row["temperature_limit_c"])
        and is_below("memory_temperature_c", row["memory_temperature_limit_c"]),
    )


def _corrected(sensitivity: np.ndarray, slower: np.ndarray, clocks: EventClocks) -> np.ndarray:
    """Return how much longer (ln) each event took for its clock; 0 where the run has no clock.

    Without a reference, clocks are compared with their median: only their ratios matter here. NaN
    where the clock changed faster than it was sampled: what is slow there may be slow for that.
    """
    if not clocks.known.any():
        return np.where(clocks.state == SPARSE, np.nan, 0.0)
    middle = np.log(np.nanmedian(clocks.clock_hz) / clocks.clock_hz)
    return sensitivity * np.where(np.isnan(slower), middle, slower)


def _reference(work: EventWork, ceiling: Ceiling | None, count: int) -> np.ndarray:
    """Clock at which the peak of each event's arithmetic is quoted, NaN where not known."""
    if ceiling is None:
        return np.full(count, np.nan)
    clocks = [ceiling.reference_clock_hz.get(dtype) for dtype in (*work.dtypes, VECTOR_DTYPE)]
    # Of an unknown type (code -1, the last one) where all types are quoted at one clock.
    distinct = {*ceiling.reference_clock_hz.values()}
    common = distinct.pop() if len(distinct) == 1 else None
    # None becomes NaN.
    table = np.array([*clocks, common], dtype=np.float64)
    code = np.where(work.math, work.dtype, -1)
    code[work.vector] = len(work.dtypes)
    return np.where(work.math | work.vector, table[code], np.nan)


def _divided(states: States, count: int) -> np.ndarray:
    """Logarithm of each event's own part of its time, which kernels that overlap divide."""
    share_ns = np.bincount(states.event_row, weights=states.share_ns, minlength=count)
    span_ns = np.bincount(states.event_row, weights=states.length_ns, minlength=count)
    usable = (share_ns > 0) & (span_ns > 0)
    part = np.divide(share_ns, span_ns, out=np.ones(count), where=usable)
    return np.log(np.minimum(part, 1.0))


def _no_clock(
    clocks: EventClocks, reference: np.ndarray, rows: np.ndarray, ceiling: Ceiling | None
) -> str | None:
    """Return why the clock of no kernel is known, None where that of some is."""
    if ceiling is None or not len(rows):
        return "no kernel has a known peak"
    if np.isnan(reference[rows]).all():
        return "the reference clock of the peak is unknown"
    state = clocks.state[rows]
    if (clocks.known[rows] & ~np.isnan(reference[rows])).any():
        return None
    if (state == SPARSE).any():
        return "the clock changes faster than it was sampled"
    if (state == NO_OVERLAP).any():
        return "no clock samples before and after the kernels"
    if (state == NO_SAMPLES).all():
        return "the device's clock was not sampled"
    return "no kernel has both a sampled clock and a reference clock"


def _waves(
    links: Links, work: EventWork, ceiling: Ceiling | None, rows: np.ndarray
) -> tuple[np.ndarray, str | None]:
    """Logarithm of the wave quantization of each event; and why it is not known of any.

    A last round that is not full lengthens the arithmetic, not the traffic: the bound of a product
    is the longer of both, and what the roofline has already is not counted again.
    """
    events = links.events
    wave_ln = np.zeros(len(events))
    if ceiling is None or ceiling.units_count is None:
        return wave_ln, "the number of SMs or CUs of the device is unknown"
    codes, grids = strings(events.table, "grid")
    # ROCm's grid counts blocks or threads, by the call that launched: only CUDA's traces, which
    # also record registers, mean blocks.
    counted = (ints(events.table, "registers_count") >= 0) & (codes >= 0) & work.math
    math = rows[counted[rows]]
    if not len(math):
        return wave_ln, "grid sizes were not recorded"
    blocks = np.array([extent(grid) or 0 for grid in grids], dtype=np.float64)
    loss = np.log(loss_ratio(blocks[codes[math]], ceiling.units_count))
    wave_ln[math] = np.maximum(loss - _memory_ln(work)[math], 0.0)
    return wave_ln, None


def _memory_ln(work: EventWork) -> np.ndarray:
    """Logarithm of roofline over ideal time of each event; 0 where either is not known."""
    ratio = np.divide(
        work.roofline_ns, work.ideal_ns, out=np.ones(len(work.ideal_ns)), where=work.ideal_ns > 0
    )
    return np.nan_to_num(np.log(ratio))


def _counters(
    links: Links,
    work: EventWork,
    ceiling: Ceiling | None,
    wave_ln: np.ndarray,
    joined_rank: JoinedRank,
) -> tuple[np.ndarray, np.ndarray, list[Finding], str | None]:
    """Logarithms of the instruction and tensor-core factors of each event; findings; why not known.

    At its peak's clock a kernel takes ideal · (performed ÷ needed FLOP) ÷ busy share of the matrix
    units. They also stand still for memory and on units without blocks: what the roofline and the
    last wave explain is not counted again.
    """
    zero = np.broadcast_to(0.0, len(links.events))
    counters = joined_rank.inputs.kernel_counter
    if counters is None or not counters.num_rows:
        return zero, zero, [], "no hardware counters were recorded"
    joined = join_counters(
        links.events.table,
        counters,
        event_step=joined_rank.event_step,
        unit_count=None if ceiling is None else ceiling.units_count,
        die_count=None if ceiling is None else ceiling.dies_count,
    )
    needed = np.where(work.work_flop > 0, work.work_flop, np.nan)
    # Below 1 where the algorithm needs fewer than the model counts (Winograd, sparsity).
    performed = np.log(joined.performed_flop / needed)
    busy = joined.tensor_busy_ratio
    idle = -np.log(np.where(busy > 0, busy, np.nan))
    # A kernel that needs fewer FLOP than the model counts gains what its units lose.
    idle += np.minimum(np.nan_to_num(performed), 0.0) - _memory_ln(work) - wave_ln
    known = work.math & ~(np.isnan(performed) & np.isnan(idle))
    return (
        np.where(work.math, np.maximum(np.nan_to_num(performed), 0.0), 0.0),
        np.where(work.math, np.maximum(np.nan_to_num(idle), 0.0), 0.0),
        joined.findings,
        None if known.any() else "the counters match no kernel of the model math",
    )


_WARP = 32
_REGISTERS_ROUNDED_TO = 256
"""Registers are handed out per warp in units of so many."""
_SHARED_MEMORY_TAKEN = 1024
"""Bytes of shared memory that the system takes per block (compute capability 8 and later)."""


def extent(text: str | None) -> int | None:
    """Product of a recorded grid or block (JSON, ``[x, y, z]``), None when it is none."""
    try:
        sides = msgspec.json.decode(text, type=list[int]) if text else []
    except JSON_ERRORS:
        return None
    return int(np.prod(sides)) if sides and all(side > 0 for side in sides) else None


def loss_ratio(blocks: np.ndarray, units: int) -> np.ndarray:
    """⌈g/u⌉ ÷ (g/u); 1 where the grid does not exceed the units.

    A grid of at most one block per unit may be a persistent kernel, whose blocks take their work
    as they go: nothing is claimed.
    """
    even = blocks / units
    return np.where(blocks > units, np.ceil(even) / np.maximum(even, 1e-9), 1.0)


def resident_blocks(
    limits: UnitLimits, threads: np.ndarray, registers: np.ndarray, shared_memory: np.ndarray
) -> np.ndarray:
    """Blocks of a kernel that one unit holds at a time, at least 1.

    Of its threads per block, registers per thread and bytes of shared memory per block.
    """
    warps = np.ceil(threads / _WARP)
    rounded = np.ceil(registers * _WARP / _REGISTERS_ROUNDED_TO) * _REGISTERS_ROUNDED_TO
    fits = np.minimum(limits.threads_count // np.maximum(warps * _WARP, 1), limits.blocks_count)
    fits = np.minimum(fits, limits.registers_count // np.maximum(warps * rounded, 1))
    taken = np.where(shared_memory > 0, shared_memory + _SHARED_MEMORY_TAKEN, 1)
    return np.maximum(np.minimum(fits, limits.shared_memory_bytes // taken), 1)
