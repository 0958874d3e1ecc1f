"""Hardware counters of single kernels, joined to the kernels of a trace.

Counters come from another run of the program: no clock and no id joins the two. What joins them is
the order of kernels of one name, and that only where both runs have as many of them; else nobody
can tell which of them a counter is of, and nothing is said.

Sources of the formulas: AMD's performance counter reference (MFMA operations are counted in units
of 512; vector instructions work on 64 lanes), rocprofiler-compute (MFMA utilization), NVIDIA's
metrics reference (``pct_of_peak_sustained_elapsed``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace.columns import ints, strings
from chopper.kernel_names import base_name, plain
from chopper.storage.manifest import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

    from chopper.storage.manifest import Severity

_MATRIX_OPERATIONS = re.compile(r"SQ_INSTS_VALU_MFMA_MOPS_(?:F16|BF16|F32|F64|F8|BF8|XF32|F6F4)$")
_PER_MATRIX_OPERATION = 512
_VECTOR = re.compile(r"SQ_INSTS_VALU_(ADD|MUL|FMA|TRANS)_(F16|F32|F64)$")
_LANES = 64
_TENSOR_OPERATIONS = re.compile(r"sm__ops_path_tensor_src_[a-z0-9_]+\.sum$")
_SPARSITY = re.compile(r"_sparsity_(?:on|off)")
_SCALAR = re.compile(r"smsp?__sass_thread_inst_executed_op_([hfd])(add|mul|fma)_pred_on\.sum$")
_BUSY_PERCENT = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    "MfmaUtil",
)
"""Busy share of the matrix units over the kernel's whole time, in percent; the first one counts."""
_BUSY_PERCENT_OF_ACTIVE = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
)
_ACTIVE, _ELAPSED = "sm__cycles_active.avg", "sm__cycles_elapsed.avg"
_SIMDS_PER_UNIT = 4


@dataclass(frozen=True)
class EventCounters:
    """Per device event, in the order of the table; NaN where no counter tells.

    Attributes:
        performed_flop: floating-point operations that the kernel did: of the matrix units where
            it used them, else of the vector units where all that count were recorded.
        tensor_busy_ratio: share of the kernel's time in which the matrix units were busy, all of
            them; idle units (a last wave that is not full) count as not busy.
        matched: whether any counter was joined to the event.
        findings: what was matched and what was not.
    """

    performed_flop: np.ndarray
    tensor_busy_ratio: np.ndarray
    matched: np.ndarray
    findings: list[Finding] = field(default_factory=list)

    def inst_factor(self, flop: np.ndarray) -> np.ndarray:
        """Return the FLOP that each kernel did as a multiple of its operator's.

        Args:
            flop: FLOP of the operator's model for each device event; NaN or 0 where not known.

        Returns:
            Performed over needed FLOP, NaN where either is unknown. Below 1 where the algorithm
            needs fewer than the model counts (Winograd, structured sparsity).
        """
        needed = np.asarray(flop, dtype=np.float64)
        known = np.isfinite(needed) & (needed > 0) & (self.performed_flop > 0)
        out = np.full(len(needed), np.nan)
        out[known] = self.performed_flop[known] / needed[known]
        return out


def join_counters(
    events: pa.Table,
    counters: pa.Table,
    *,
    rank: int | None = None,
    unit_count: int | None = None,
    die_count: int | None = None,
) -> EventCounters:
    """Counters of each device event of one rank. DEVICE_EVENT, KERNEL_COUNTER -> EventCounters.

    Each file of counters is matched for itself (a tool that cannot measure all counters at once
    runs the program several times). Kernels of one name, as written or by its base name, are
    joined in order where both sides have as many of them.

    Args:
        events: table `device_event`.
        counters: table `kernel_counter`.
        rank: named in the findings.
        unit_count: compute units of the device, for counters in cycles of AMD's.
        die_count: dies (XCD) whose cycles GRBM_GUI_ACTIVE adds up.
    """
    nothing = np.full(events.num_rows, np.nan)
    if not counters.num_rows:
        return EventCounters(nothing, nothing.copy(), np.zeros(events.num_rows, dtype=bool))
    row, findings = _match(events, counters, rank)
    values = _Values(counters, row, events.num_rows)
    busy = _tensor_busy(values, unit_count, die_count)
    return EventCounters(_performed(values), busy, values.any, findings)


def _match(
    events: pa.Table, counters: pa.Table, rank: int | None
) -> tuple[np.ndarray, list[Finding]]:
    """Row of the device event that each counter row is of, -1 where none; and what to say."""
    row = np.full(counters.num_rows, -1, dtype=np.int64)
    kind_codes, kinds = strings(events, "kind")
    name_codes, names = strings(events, "name")
    kernels = np.flatnonzero(
        np.isin(kind_codes, [i for i, kind in enumerate(kinds) if kind == "kernel"])
    )
    source, sources = strings(counters, "source")
    kernel, kernel_names = strings(counters, "kernel")
    device, devices = strings(counters, "device")
    dispatch = ints(counters, "dispatch_id")
    findings: list[Finding] = []
    for file in np.unique(source):
        mine = np.flatnonzero(source == file)
        several = np.unique(device[mine])
        if len(several) > 1:
            findings.append(
                _finding(
                    "counters.several_devices",
                    f"{sources[file]}: holds kernels of {len(several)} devices "
                    f"({', '.join(str(devices[d]) for d in several[:4] if d >= 0)}); not used: "
                    "give each rank a file of its own",
                    rank,
                )
            )
            continue
        ids, first = np.unique(dispatch[mine], return_index=True)
        theirs = kernel[mine][first]
        found = _pair(names, name_codes[kernels], kernel_names, theirs)
        at = np.where(found >= 0, kernels[np.maximum(found, 0)] if len(kernels) else -1, -1)
        row[mine] = at[np.searchsorted(ids, dispatch[mine])]
        findings += _say(sources[file], found, theirs, kernel_names, len(kernels), rank)
    return row, findings


def _pair(
    names: list[str], ours: np.ndarray, their_names: list[str], theirs: np.ndarray
) -> np.ndarray:
    """For each kernel of a file the place among ours that it is, -1 where nobody can tell."""
    found = np.full(len(theirs), -1, dtype=np.int64)
    taken = np.zeros(len(ours), dtype=bool)
    for form in (plain, base_name):
        left, right = np.flatnonzero(~taken), np.flatnonzero(found < 0)
        codes: dict[str, int] = {}
        a = _recode(names, ours[left], form, codes)
        b = _recode(their_names, theirs[right], form, codes)
        size = len(codes)
        same = np.bincount(a, minlength=size) == np.bincount(b, minlength=size)
        # Stable sorting keeps the order of each name's kernels.
        a_rows = left[np.argsort(a, kind="stable")]
        b_rows = right[np.argsort(b, kind="stable")]
        a_rows = a_rows[same[np.sort(a)]]
        b_rows = b_rows[same[np.sort(b)]]
        found[b_rows] = a_rows
        taken[a_rows] = True
    return found


def _recode(
    names: list[str], codes: np.ndarray, form: Callable[[str], str], into: dict[str, int]
) -> np.ndarray:
    """Codes of the names' forms; ``into`` grows by those that it lacks."""
    table = np.zeros(max(len(names), 1), dtype=np.int64)
    for code in np.unique(codes):
        table[code] = into.setdefault(form(names[code]), len(into))
    coded: np.ndarray = table[codes]
    return coded


def _say(
    source: str,
    found: np.ndarray,
    theirs: np.ndarray,
    their_names: list[str],
    kernels: int,
    rank: int | None,
) -> list[Finding]:
    left = np.flatnonzero(found < 0)
    if not len(left):
        missing = kernels - len(found)
        if not missing:
            return []
        return [
            _finding(
                "counters.partial",
                f"{source}: counters of {len(found)} of {kernels} kernels; those of other names "
                "have none",
                rank,
                missing,
                severity="info",
            )
        ]
    codes, counts = np.unique(theirs[left], return_counts=True)
    worst = their_names[codes[np.argmax(counts)]]
    return [
        _finding(
            "counters.not_matched",
            f"{source}: {len(left)} of {len(found)} kernels are of names that the trace does not "
            f"have as often ({base_name(worst)[:60]} most of all), so that nobody can tell which "
            "is which: not used; record the same steps in both",
            rank,
            len(left),
            withholds=("compute.counters",) if len(left) == len(found) else (),
        )
    ]


def _finding(
    code: str,
    message: str,
    rank: int | None,
    count: int | None = None,
    *,
    severity: Severity = "warning",
    withholds: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        code=code, severity=severity, message=message, rank=rank, count=count, withholds=withholds
    )


class _Values:
    """Values of counters per device event."""

    def __init__(self, counters: pa.Table, row: np.ndarray, count: int) -> None:
        self._codes, self.names = strings(counters, "counter")
        self._value = counters["value"].to_numpy(zero_copy_only=False).astype(np.float64)
        self._row = row
        self._count = count
        self.any = np.zeros(count, dtype=bool)
        self.any[row[row >= 0]] = True

    def of(self, name: str) -> np.ndarray:
        """One counter, NaN where it was not measured."""
        out = np.full(self._count, np.nan)
        if name in self.names:
            mine = (self._codes == self.names.index(name)) & (self._row >= 0)
            out[self._row[mine]] = self._value[mine]
        return out

    def total(self, weights: Iterable[tuple[str, float]]) -> np.ndarray:
        """Weighted sum of counters, NaN where one of them was not measured."""
        out = np.zeros(self._count)
        some = False
        for name, weight in weights:
            out += weight * self.of(name)
            some = True
        return out if some else np.full(self._count, np.nan)


def _performed(values: _Values) -> np.ndarray:
    names = values.names
    matrix = _measured_sum(
        values, [(n, _PER_MATRIX_OPERATION) for n in names if _MATRIX_OPERATIONS.match(n)]
    )
    matrix = _first(
        matrix,
        _measured_sum(
            values,
            [(n, 1.0) for n in names if _TENSOR_OPERATIONS.match(n) and not _SPARSITY.search(n)],
        ),
    )
    vector = np.full(len(matrix), np.nan)
    for dtype in ("F16", "F32", "F64"):
        parts = [(n, m[1]) for n in names if (m := _VECTOR.match(n)) and m[2] == dtype]
        if {"ADD", "MUL", "FMA"} <= {kind for _, kind in parts}:
            weights = [(n, _LANES * (2.0 if kind == "FMA" else 1.0)) for n, kind in parts]
            vector = _plus(vector, values.total(weights))
    for letter in "hfd":
        parts = [(n, m[2]) for n in names if (m := _SCALAR.match(n)) and m[1] == letter]
        if {"add", "mul", "fma"} <= {kind for _, kind in parts}:
            weights = [(n, 2.0 if kind == "fma" else 1.0) for n, kind in parts]
            vector = _plus(vector, values.total(weights))
    return np.where(matrix > 0, matrix, np.where(vector > 0, vector, np.nan))


def _measured_sum(values: _Values, weights: list[tuple[str, float]]) -> np.ndarray:
    """Weighted sum of the counters that were measured: a type that was not is taken for unused."""
    out = np.full(len(values.any), np.nan)
    for name, weight in weights:
        out = _plus(out, weight * values.of(name))
    return out


def _plus(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Sum where both are known, else the one that is."""
    return np.where(np.isnan(one), other, np.where(np.isnan(other), one, one + other))


def _first(*choices: np.ndarray) -> np.ndarray:
    """The first of several arrays that is known."""
    out = choices[0]
    for other in choices[1:]:
        out = np.where(np.isnan(out), other, out)
    return out


def _tensor_busy(values: _Values, unit_count: int | None, die_count: int | None) -> np.ndarray:
    busy = _first(*(values.of(name) / 100 for name in _BUSY_PERCENT))
    active = values.of(_ACTIVE) / values.of(_ELAPSED)
    busy = _first(busy, *(values.of(name) / 100 * active for name in _BUSY_PERCENT_OF_ACTIVE))
    if unit_count and die_count:
        cycles = values.of("GRBM_GUI_ACTIVE") / die_count * unit_count * _SIMDS_PER_UNIT
        with np.errstate(divide="ignore", invalid="ignore"):
            busy = _first(busy, values.of("SQ_VALU_MFMA_BUSY_CYCLES") / cycles)
    # Counters of different passes may disagree a little; a share is not above 1.
    return np.where((busy >= 0) & (busy <= 1.05), np.minimum(busy, 1.0), np.nan)
