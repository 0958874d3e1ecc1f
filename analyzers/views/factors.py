"""What the factors of computing rest on: sensitivities, contention and waves by distinct work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes import last_wave
from chopper.analyzers.trace.columns import dictionary, ints, nullable, strings
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.causes.factors import Factors
    from chopper.attribution import Attribution


def clock_sensitivity(attribution: Attribution) -> pa.Table:
    """How much each distinct work depends on the clock, and why we think so.

    DEVICE_EVENT, DEVICE_CLOCK -> CLOCK_SENSITIVITY. Only of ranks with clock samples.
    """
    parts = []
    for rank, factors in attribution.factors.items():
        if not factors.clocks.readers:
            continue
        works = _Works.of(attribution, rank, factors)
        of = factors.by_signature
        rows = np.flatnonzero(works.count > 0)
        parts.append(
            works.table(
                "clock_sensitivity",
                rows,
                {
                    "sensitivity_ratio": pa.array(of.value[rows]),
                    "sensitivity_error_ratio": pa.array(of.error[rows]),
                    "slope_ratio": _real(of.slope[rows]),
                    "slope_error_ratio": _real(of.slope_error[rows]),
                    "roofline_ratio": pa.array(of.roofline[rows]),
                    "used_count": pa.array(of.used_count[rows]),
                    "clock_low_hz": _hertz(of.clock_low_hz[rows]),
                    "clock_high_hz": _hertz(of.clock_high_hz[rows]),
                },
            )
        )
    return _sorted("clock_sensitivity", parts, "time_ns")


def contention(attribution: Attribution) -> pa.Table:
    """Distinct works that ran beside others: alone, together, and what is claimed.

    DEVICE_EVENT, PIECE -> CONTENTION.
    """
    parts = []
    for rank, factors in attribution.factors.items():
        works = _Works.of(attribution, rank, factors)
        of = factors.contention
        rows = np.flatnonzero(of.overlapped_count > 0)
        claimed = works.summed(_claimed(attribution, rank, "compute.contention", works.size))
        unknown = np.isnan(of.baseline_ns[rows])
        parts.append(
            works.table(
                "contention",
                rows,
                {
                    "alone_count": pa.array(of.alone_count[rows]),
                    "alone_ns": _whole(of.baseline_ns[rows]),
                    "overlapped_count": pa.array(of.overlapped_count[rows]),
                    "overlapped_ns": _whole(of.overlapped_ns[rows]),
                    "slowdown_ratio": _real(of.ratio[rows]),
                    "loss_ns": pa.array(claimed[rows]),
                    "bound_ns": _whole(np.where(unknown, of.bound_ns[rows], np.nan)),
                },
            )
        )
    return _sorted("contention", parts, "loss_ns", "bound_ns")


def wave_quantization(attribution: Attribution) -> pa.Table:
    """Products by grid: how full their last round is, and what that cost.

    DEVICE_EVENT, PIECE -> WAVE_QUANTIZATION.
    """
    parts = []
    for rank, factors in attribution.factors.items():
        found = attribution.ceilings.get(rank)
        ceiling = found.theoretical if found is not None else None
        if ceiling is None or ceiling.units_count is None or not factors.wave_ln.any():
            continue
        works = _Works.of(attribution, rank, factors)
        claimed = works.summed(
            _claimed(attribution, rank, "compute.efficiency.wave_quantization", works.size)
        )
        rows = np.flatnonzero((works.count > 0) & (factors.wave_ln[works.first] > 0))
        one = works.first[rows]
        blocks = _extents(works.events, "grid", one)
        resident = np.full(len(rows), np.nan)
        if ceiling.unit_limits is not None:
            threads = _extents(works.events, "block", one)
            resident = np.where(
                threads > 0,
                last_wave.resident_blocks(
                    ceiling.unit_limits,
                    np.maximum(threads, 1),
                    np.maximum(ints(works.events, "registers_count")[one], 1),
                    np.maximum(ints(works.events, "shared_memory_bytes")[one], 0),
                ),
                np.nan,
            )
        count = blocks / (ceiling.units_count * resident)
        parts.append(
            works.table(
                "wave_quantization",
                rows,
                {
                    "grid": _text(works.events, "grid", one),
                    "block": _text(works.events, "block", one),
                    "blocks_count": pa.array(blocks.astype(np.int64)),
                    "units_count": pa.array(np.full(len(rows), ceiling.units_count)),
                    "resident_count": _whole(resident),
                    "waves_ratio": _real(count),
                    "slowdown_ratio": pa.array(np.exp(factors.wave_ln[one])),
                    "slowdown_limit_ratio": _real(np.maximum(np.ceil(count) / count, 1.0)),
                    "loss_ns": pa.array(claimed[rows]),
                },
            )
        )
    return _sorted("wave_quantization", parts, "loss_ns")


@dataclass(frozen=True)
class _Works:
    """The distinct works of one rank.

    Attributes:
        signature: of each event, -1 for none; ``size`` events.
        first: an event of each.
        count, time_ns: instances and their device time.
    """

    rank: int
    events: pa.Table
    ops: pa.Table
    signature: np.ndarray
    first: np.ndarray
    count: np.ndarray
    time_ns: np.ndarray

    @classmethod
    def of(cls, attribution: Attribution, rank: int, factors: Factors) -> _Works:
        events = attribution.run.table(rank, "device_event")
        kinds = len(factors.by_signature.value)
        rows = np.flatnonzero(factors.signature >= 0)
        group = factors.signature[rows]
        first = np.zeros(kinds, dtype=np.int64)
        first[group[::-1]] = rows[::-1]
        time = np.zeros(kinds, dtype=np.int64)
        np.add.at(time, group, ints(events, "dur_ns")[rows])
        return cls(
            rank,
            events,
            attribution.links[rank],
            factors.signature,
            first,
            np.bincount(group, minlength=kinds),
            time,
        )

    @property
    def size(self) -> int:
        """How many events there are."""
        return len(self.signature)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Sum over the events of each work."""
        found = np.zeros(len(self.first), dtype=np.int64)
        some = self.signature >= 0
        np.add.at(found, self.signature[some], values[some])
        return found

    def table(self, name: str, rows: np.ndarray, columns: dict[str, pa.Array]) -> pa.Table:
        one = self.first[rows]
        columns |= {
            "rank": pa.array(np.full(len(rows), self.rank)),
            "op": _text(self.ops, "op", one),
            "kernel": _text(self.events, "name", one),
            "count": pa.array(self.count[rows]),
            "time_ns": pa.array(self.time_ns[rows]),
        }
        declared = TABLES[name].arrow
        return pa.Table.from_arrays(
            [columns[f.name].cast(f.type) for f in declared], schema=declared
        )


def _claimed(attribution: Attribution, rank: int, cause: str, size: int) -> np.ndarray:
    """Time of a cause by event of one rank."""
    pieces = attribution.pieces
    codes, causes = strings(pieces, "cause")
    found = np.zeros(size, dtype=np.int64)
    if cause in causes:
        rows = (codes == causes.index(cause)) & (ints(pieces, "rank") == rank)
        np.add.at(found, ints(pieces, "event_row")[rows], ints(pieces, "time_ns")[rows])
    return found


def _extents(events: pa.Table, column: str, rows: np.ndarray) -> np.ndarray:
    """Product of recorded grids or blocks; 0 where there is none."""
    codes, values = strings(events, column)
    table = np.array([*(last_wave.extent(v) or 0 for v in values), 0], dtype=np.float64)
    found: np.ndarray = table[codes[rows]]
    return found


def _text(table: pa.Table, column: str, rows: np.ndarray) -> pa.Array:
    codes, values = strings(table, column)
    return dictionary(codes[rows], values)


def _sorted(name: str, parts: list[pa.Table], *keys: str) -> pa.Table:
    """Parts together, largest first."""
    if not parts:
        return TABLES[name].empty()
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    return table.sort_by([(key, "descending") for key in keys])


def _whole(values: np.ndarray) -> pa.Array:
    unknown = np.isnan(values)
    return nullable(np.where(unknown, -1, np.rint(np.nan_to_num(values))))


def _hertz(values: np.ndarray) -> pa.Array:
    return _whole(values)


def _real(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))
