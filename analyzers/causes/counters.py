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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, matching, row_set, strings
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from chopper.wording import base_name, plain

_MATRIX_OPERATIONS = re.compile(r"SQ_INSTS_VALU_MFMA_MOPS_(?:F16|BF16|F32|F64|F8|BF8|XF32|F6F4)$")
_PER_MATRIX_OPERATION = 512
_VECTOR = re.compile(r"SQ_INSTS_VALU_(?P<kind>ADD|MUL|FMA|TRANS)_(?P<type>F16|F32|F64)$")
_LANES = 64
_TENSOR_OPERATIONS = re.compile(r"sm__ops_path_tensor_src_[a-z0-9_]+\.sum$")
_SPARSITY = re.compile(r"_sparsity_(?:on|off)")
_SCALAR = re.compile(
    r"smsp?__sass_thread_inst_executed_op_(?P<type>[hfd])(?P<kind>add|mul|fma)_pred_on\.sum$"
)
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
        findings: what was matched and what was not; of no rank.
    """

    performed_flop: np.ndarray
    tensor_busy_ratio: np.ndarray
    matched: np.ndarray
    findings: list[Finding]


def join_counters(
    events: pa.Table,
    counters: pa.Table,
    *,
    event_step: np.ndarray | None = None,
    unit_count: int | None = None,
    die_count: int | None = None,
) -> EventCounters:
    """Counters of each device event of one rank. DEVICE_EVENT, KERNEL_COUNTER -> EventCounters.

    Each file of counters is matched for itself (a tool that cannot measure all counters at once
    runs the program several times). Kernels of one name, as written or by its base name, are
    joined in order where both sides have as many of them. Counters of one step are matched with
    each step of the trace.

    Args:
        events: table `device_event`.
        counters: table `kernel_counter`, not empty.
        event_step: step of each event, -1 for none; needed for counters of single steps.
        unit_count: compute units of the device, for counters in cycles of AMD's.
        die_count: dies (XCD) whose cycles GRBM_GUI_ACTIVE adds up.
    """
    counters, row, findings = _match(events, counters, event_step)
    values = _Values(counters, row, events.num_rows)
    busy = _tensor_busy(values, unit_count, die_count)
    return EventCounters(_performed(values), busy, row_set(row, events.num_rows), findings)


def _match(
    events: pa.Table, counters: pa.Table, event_step: np.ndarray | None
) -> tuple[pa.Table, np.ndarray, list[Finding]]:
    """Match counters with device events.

    Returns:
        Rows of the counters, those of single steps once for each step of the trace; the row of the
        event that each is of, -1 where none; what to say.
    """
    name_codes, names = strings(events, "name")
    kernels = np.flatnonzero(matching(*strings(events, "kind"), lambda kind: kind == "kernel"))
    source, sources = strings(counters, "source")
    kernel, kernel_names = strings(counters, "kernel")
    device, devices = strings(counters, "device")
    dispatch, step = ints(counters, "dispatch_id"), ints(counters, "step")
    findings: list[Finding] = []
    taken, rows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for file in np.unique(source):
        mine = np.flatnonzero(source == file)
        several = np.unique(device[mine])
        if len(several) > 1:
            findings.append(
                finding(
                    "counters.several_devices",
                    withholds=False,
                    source=sources[file],
                    several=len(several),
                    devices=", ".join(str(devices[d]) for d in several[:4] if d >= 0),
                )
            )
            continue
        ids, first = np.unique(dispatch[mine], return_index=True)
        theirs = kernel[mine][first]
        groups = [kernels]
        if step[mine[0]] >= 0:
            step_of = kernels * 0 - 1 if event_step is None else event_step[kernels]
            groups = [kernels[step_of == one] for one in np.unique(step_of[step_of >= 0])]
        pairs = [_pair(names, name_codes[group], kernel_names, theirs) for group in groups]
        for group, pair in zip(groups, pairs, strict=True):
            taken.append(mine)
            rows.append(np.append(group, -1)[pair][np.searchsorted(ids, dispatch[mine])])
        # Of several steps, the one that matches best speaks for all.
        best = max(range(len(pairs)), key=lambda i: int((pairs[i] >= 0).sum()), default=None)
        if best is not None:
            whole = len(groups[best])
            findings += _say(sources[file], pairs[best], theirs, kernel_names, whole)
    return counters.take(np.concatenate(taken)), np.concatenate(rows), findings


def _pair(
    names: list[str], ours: np.ndarray, their_names: list[str], theirs: np.ndarray
) -> np.ndarray:
    """For each kernel of a file the place among ours that it is, -1 where nobody can tell."""
    pair = np.full(len(theirs), -1, dtype=np.int64)
    for form in (plain, base_name):
        unpaired, right = np.flatnonzero(~row_set(pair, len(ours))), np.flatnonzero(pair < 0)
        forms: dict[str, int] = {}
        a = _recode(names, ours[unpaired], form, forms)
        b = _recode(their_names, theirs[right], form, forms)
        same = np.bincount(a, minlength=len(forms)) == np.bincount(b, minlength=len(forms))
        # Stable sorting keeps the order of each name's kernels.
        a_order, b_order = (np.argsort(codes, kind="stable") for codes in (a, b))
        pair[right[b_order[same[b[b_order]]]]] = unpaired[a_order[same[a[a_order]]]]
    return pair


def _recode(
    names: list[str], codes: np.ndarray, form: Callable[[str], str], into: dict[str, int]
) -> np.ndarray:
    """Codes of the names' forms; ``into`` grows by those that it lacks."""
    table = np.zeros(max(len(names), 1), dtype=np.int64)
    for code in np.unique(codes):
        table[code] = into.setdefault(form(names[code]), len(into))
    return table[codes]


def _say(
    source: str, pair: np.ndarray, theirs: np.ndarray, their_names: list[str], kernels: int
) -> list[Finding]:
    unpaired = np.flatnonzero(pair < 0)
    if len(unpaired):
        codes, counts = np.unique(theirs[unpaired], return_counts=True)
        return [
            finding(
                "counters.not_matched",
                count=len(unpaired),
                withholds=len(unpaired) == len(pair),
                source=source,
                whole=len(pair),
                worst=base_name(their_names[codes[np.argmax(counts)]])[:60],
            )
        ]
    if kernels > len(pair):
        missing = kernels - len(pair)
        return [
            finding(
                "counters.partial", count=missing, source=source, matched=len(pair), whole=kernels
            )
        ]
    return []


class _Values:
    """Values of counters per device event."""

    def __init__(self, counters: pa.Table, row: np.ndarray, count: int) -> None:
        self._codes, self.names = strings(counters, "counter")
        self._value = counters["value"].to_numpy(zero_copy_only=False).astype(np.float64)
        self._row = row
        self.unknown = np.full(count, np.nan)

    def of(self, name: str) -> np.ndarray:
        """One counter, NaN where it was not measured."""
        out = self.unknown.copy()
        if name in self.names:
            mine = (self._codes == self.names.index(name)) & (self._row >= 0)
            out[self._row[mine]] = self._value[mine]
        return out


def _performed(values: _Values) -> np.ndarray:
    # A type of matrix operation that was not measured is taken for unused.
    operations, tensor = values.unknown, values.unknown
    for name in values.names:
        if _MATRIX_OPERATIONS.match(name):
            operations = _plus(operations, _PER_MATRIX_OPERATION * values.of(name))
        elif _TENSOR_OPERATIONS.match(name) and not _SPARSITY.search(name):
            tensor = _plus(tensor, values.of(name))
    matrix = _first(operations, tensor)
    # Of vector units, all of a type's additions, products and both in one must be.
    vector = values.unknown
    for pattern, lanes in ((_VECTOR, _LANES), (_SCALAR, 1)):
        kinds: dict[str, dict[str, str]] = {}
        for name in values.names:
            if match := pattern.match(name):
                kinds.setdefault(match["type"], {})[match["kind"].lower()] = name
        for counted in kinds.values():
            if {"add", "mul", "fma"} <= {*counted}:
                weighted = [
                    lanes * (2.0 if kind == "fma" else 1.0) * values.of(name)
                    for kind, name in counted.items()
                ]
                vector = _plus(vector, np.sum(weighted, axis=0))
    return np.where(matrix > 0, matrix, np.where(vector > 0, vector, np.nan))


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
