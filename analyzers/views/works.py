"""Views of kernels that do the same work, and of work that is not known."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes import factors as model
from chopper.analyzers.causes.event_work import operator_work, refined
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.events.groups import real_or_null, sum_by, time_in, whole_or_null
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import dictionary, ints, matching, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.views import Rows, view
from chopper.analyzers.work import MATH_FAMILIES, Work, matmul_dtype
from chopper.hardware.ceilings import Ceiling
from chopper.tables import Table


class _Works(msgspec.Struct, frozen=True):
    """The distinct works of one rank: an event of each (row, DEVICE_EVENT), and its instances."""

    run: Attribution
    rank: int
    factors: Factors
    first: np.ndarray
    events: pa.Table
    count: np.ndarray

    def time_in(self, cause: str) -> np.ndarray:
        """Return the time of each work's events in a cause. PIECE -> ns."""
        rows = np.flatnonzero(self.factors.signature >= 0)
        time_ns = time_in(self.run.pieces, np.full(len(rows), self.rank), rows, cause)
        return sum_by(self.factors.signature[rows], time_ns, len(self.first))


_Columns = tuple[np.ndarray, dict[str, object]]
"""Mask of the works that a view shows, and its columns but those that all such views have."""


def _works_table(
    table: Table, run: Attribution, columns_of: Callable[[_Works], _Columns | None]
) -> pa.Table:
    """Build a view of works from its columns of each rank; None leaves a rank out."""
    parts = []
    for rank, factors in run.factors.items():
        events = run.joined[rank].device_event
        size = len(factors.by_signature.value)
        rows = np.flatnonzero(factors.signature >= 0)
        group = factors.signature[rows]
        first = np.zeros(size, dtype=np.int64)
        first[group[::-1]] = rows[::-1]
        count = np.bincount(group, minlength=size)
        works = _Works(run, rank, factors, first, events.take(first), count)
        found = columns_of(works)
        if found is not None:
            shown, columns = found
            columns |= {
                "rank": np.full(size, rank),
                "op": run.links[rank]["op"].take(first),
                "kernel": works.events["name"],
                "count": count,
                "time_ns": sum_by(group, ints(events, "dur_ns")[rows], size),
            }
            parts.append(table.of(columns).filter(pa.array(shown)))
    return table.joined(parts)


@view
def contention(run: Attribution) -> Rows:
    """Kernels that overlapped others, compared with the same work alone, normalized to one clock.

    Without a baseline, the lost time is a bound relative to the instance with the least overlap.

    title: Contention
    section: Clocks
    needs: no kernel with a known ideal time overlapped another one
    columns:
      rank, int32: Rank that the kernel ran on.
      op, null: Operator that launched the kernel; null where none did.
      kernel: Kernel; one row per operator, shapes, kernel and grid.
      slowdown_ratio, null: Mean duration with overlap over the baseline.
      loss_ns: Time attributed to contention; 0 where the slowdown is within noise.
      alone_ns, null: Baseline: median duration alone; null with fewer than three instances.
      overlapped_ns, null: Median duration of the instances with overlap.
      alone_count: Number of instances that ran alone.
      overlapped_count: Number of instances with overlap.
      bound_ns, null: Lower bound of the lost time; null where there is a baseline.
      count: Number of instances.
      time_ns: Device time of all instances.
    """
    table = _works_table(contention.view, run, _contended)
    return table.sort_by([("loss_ns", "descending"), ("bound_ns", "descending")])


def _contended(works: _Works) -> _Columns:
    of = works.factors.contention
    return of.overlapped_count > 0, {
        "alone_count": of.alone_count,
        "alone_ns": whole_or_null(of.baseline_ns),
        "overlapped_count": of.overlapped_count,
        "overlapped_ns": whole_or_null(of.overlapped_ns),
        "slowdown_ratio": real_or_null(of.ratio),
        "loss_ns": works.time_in("compute.contention"),
        "bound_ns": whole_or_null(np.where(np.isnan(of.baseline_ns), of.bound_ns, np.nan)),
    }


@view
def wave_quantization(run: Attribution) -> Rows:
    """Matrix products whose blocks do not fill the device's last wave.

    title: Wave quantization
    section: Clocks
    needs: no product's grid was recorded, the device is unknown, or all waves are full
    columns:
      rank, int32: Rank that the kernel ran on.
      op, null: Operator that launched the kernel; null where none did.
      kernel: Kernel; one row per operator, shapes, kernel and grid.
      slowdown_ratio: Blocks of the fullest SM or CU over the mean, beyond the roofline.
      loss_ns: Time attributed to wave quantization.
      grid: Blocks per grid as recorded.
      block, null: Threads per block as recorded; null where not recorded.
      blocks_count: Number of blocks of the grid.
      units_count: Number of SMs or CUs of the device.
      resident_count, null: Number of blocks that one SM or CU holds at a time.
      waves_ratio, null: Waves: blocks over the blocks that the device holds at a time.
      slowdown_limit_ratio, null: Largest slowdown: ⌈waves⌉ ÷ waves; null where unknown.
      count: Number of instances.
      time_ns: Device time of all instances.
    """
    return _works_table(wave_quantization.view, run, _quantized).sort_by(
        [("loss_ns", "descending")]
    )


def _quantized(works: _Works) -> _Columns | None:
    wave_ln = works.factors.wave_ln
    ceilings = works.run.ceilings.get(works.rank)
    ceiling = ceilings.theoretical if ceilings is not None else None
    if ceiling is None or ceiling.units_count is None or not wave_ln.any():
        return None
    blocks, resident = _extents(works.events, "grid"), _resident(works.events, ceiling)
    waves = np.where(blocks > 0, blocks / (ceiling.units_count * resident), np.nan)
    return (works.count > 0) & (wave_ln[works.first] > 0), {
        "grid": works.events["grid"],
        "block": works.events["block"],
        "blocks_count": blocks.astype(np.int64),
        "units_count": np.full(len(blocks), ceiling.units_count),
        "resident_count": whole_or_null(resident),
        "waves_ratio": real_or_null(waves),
        "slowdown_ratio": np.exp(wave_ln[works.first]),
        "slowdown_limit_ratio": real_or_null(np.maximum(np.ceil(waves) / waves, 1.0)),
        "loss_ns": works.time_in("compute.efficiency.wave_quantization"),
    }


def _resident(events: pa.Table, ceiling: Ceiling) -> np.ndarray:
    """Blocks that one unit holds at a time, NaN where that is not known."""
    if ceiling.unit_limits is None:
        return np.full(events.num_rows, np.nan)
    threads = _extents(events, "block")
    resident = model.resident_blocks(
        ceiling.unit_limits,
        np.maximum(threads, 1),
        np.maximum(ints(events, "registers_count"), 1),
        np.maximum(ints(events, "shared_memory_bytes"), 0),
    )
    return np.where((threads > 0) & (resident > 0), resident, np.nan)


def _extents(events: pa.Table, name: str) -> np.ndarray:
    """Product of recorded grids or blocks; 0 where there is none."""
    codes, values = strings(events, name)
    extents = np.array([*(model.extent(v) or 0 for v in values), 0], dtype=np.float64)
    return extents[codes]


_KEYS = ["cause", "kernel", "op", "reason"]
CAUSES = ("compute.unmodelled", "compute.no_peak", "compute.vector.no_bytes")
_STRUCTURAL = (
    "no model of its operator",
    "no enclosing operator",
    "its launch is not in the trace, nor is the same kernel with an operator",
    "replayed by a graph; the same kernel did not run with an operator",
    "launched inside a wrapper, without an operator",
)


@view
def unmodelled(run: Attribution) -> Rows:
    """Kernels whose model, FLOP, bytes or peak are unknown: time and reason.

    Over all ranks and steps, by kernel, operator and reason.

    title: Unmodelled kernels
    section: Operators
    needs: every compute kernel has a model, and the device's peaks are known
    columns:
      kernel, null: Name of the kernel as recorded; null where not recorded.
      time_ns: Exclusive time attributed to the kernel.
      share_ratio, null: Share of all compute time.
      reason: Reason why the kernel's work, or its ideal time, is unknown.
      op, null: Operator that launched it; null where none was recorded.
      call_count: Number of device events.
      cause: Id of the cause that the time is attributed to.
    """
    pieces = run.pieces
    cause, causes = strings(pieces, "cause")
    computing = matching(cause, causes, lambda c: c.startswith("compute."))
    total = int(ints(pieces, "time_ns")[computing].sum())
    pieces = pieces.filter(matching(cause, causes, CAUSES.__contains__))
    rank, event = ints(pieces, "rank"), ints(pieces, "event_row")
    texts: dict[str, int] = {}
    reason = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        reason[mine] = _reasons(run, int(one), np.unique(event[mine]), texts)[event[mine]]
    pieces = pieces.append_column("reason", dictionary(reason, list(texts))).unify_dictionaries()
    # An event may be in several pieces.
    events = pieces.group_by([*_KEYS, "rank", "event_row"]).aggregate([("time_ns", "sum")])
    sums = events.group_by(_KEYS).aggregate([("time_ns_sum", "sum"), ("event_row", "count")])
    rows = sums.rename_columns([*_KEYS, "time_ns", "call_count"]).to_pylist()
    for row in rows:
        row["share_ratio"] = row["time_ns"] / total
    rows.sort(key=lambda r: (-r["time_ns"], str(tuple(r[key] for key in _KEYS))))
    return rows


def _reasons(run: Attribution, rank: int, events: np.ndarray, texts: dict[str, int]) -> np.ndarray:
    """Reason code of each event of the rank, -1 for others; adds new reasons to ``texts``."""
    links = run.joined[rank].links()
    work = run.work.get(rank)
    ceilings = run.ceilings.get(rank)
    ceiling = None
    if ceilings is not None:
        ceiling = ceilings.theoretical or ceilings.achievable
    like = events
    if work is not None:
        like = np.where(work.like_row[events] >= 0, work.like_row[events], events)
    structural = _without_operator(links)
    signature = np.full(len(links.events), -1, dtype=np.int64)
    operators = None
    if len(links.host):
        rows = np.unique(links.op_row[like])
        operators = operator_work(links, rows[rows >= 0])
        has = links.op_row[like] >= 0
        row_of = operators.row_of[links.op_row[like[has]]]
        signature[like[has]] = np.where(row_of >= 0, operators.signature[row_of], -1)
    name_codes, name_values = links.events.names
    width = max(len(name_values), 1)
    keys = np.where(
        signature[like] >= 0,
        signature[like] * width + name_codes[like],
        -1 - structural[like],
    )
    codes = np.full(len(links.events), -1, dtype=np.int64)
    for key in np.unique(keys).tolist():
        if key < 0:
            text = _STRUCTURAL[-1 - key]
        else:
            assert operators is not None
            call, own = operators.calls[key // width], operators.works[key // width]
            kernel = name_values[key % width]
            text = _of_work(refined(call, own, kernel), kernel, ceiling)
        codes[events[keys == key]] = texts.setdefault(text, len(texts))
    return codes


def _without_operator(links: Links) -> np.ndarray:
    """Index into _STRUCTURAL for each event, as if no model applied to it."""
    op, launch = links.op_row, links.launch_row
    found = np.where(op < 0, np.where(launch < 0, 2, 1), 0)
    if len(links.host):
        found[(op >= 0) & links.host.named(names.is_wrapper)[op]] = 4
        found[(launch >= 0) & links.host.named(names.is_graph_launch)[launch]] = 3
    return found


def _of_work(work: Work, kernel: str, ceiling: Ceiling | None) -> str:
    if work.family in MATH_FAMILIES and work.flop_count is not None:
        dtype = matmul_dtype(work.dtype, kernel)
        if ceiling is None:
            return "the device's peak is unknown"
        return (
            f"the peak for {dtype} is unknown"
            if dtype
            else "the data type of its arithmetic is unknown"
        )
    if work.family not in MATH_FAMILIES and work.bytes_count is not None:
        return "the device's memory bandwidth is unknown"
    return (work.reason or "not known").removeprefix("bytes: ")
