"""Matrix products whose blocks do not fill the device's last wave."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes import last_wave
from chopper.analyzers.events.groups import real_or_null, whole_or_null
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views._works import COLUMNS, Columns, Works, works_table
from chopper.hardware.ceilings import Ceiling

VIEW = View(
    "wave_quantization",
    __doc__,
    (
        *COLUMNS,
        column(
            "slowdown_ratio", "Blocks of the fullest SM or CU over the mean, beyond the roofline."
        ),
        column("loss_ns", "Time attributed to wave quantization."),
        column("grid", "Blocks per grid as recorded."),
        optional("block", "Threads per block as recorded; null where not recorded."),
        column("blocks_count", "Number of blocks of the grid."),
        column("units_count", "Number of SMs or CUs of the device."),
        optional("resident_count", "Number of blocks that one SM or CU holds at a time."),
        optional("waves_ratio", "Waves: blocks over the blocks that the device holds at a time."),
        optional("slowdown_limit_ratio", "Largest slowdown: ⌈waves⌉ ÷ waves; null where unknown."),
        column("count", "Number of instances."),
        column("time_ns", "Device time of all instances."),
    ),
    title="Wave quantization",
    section="Clocks",
    needs="no product's grid was recorded, the device is unknown, or all waves are full",
)


def wave_quantization(run: Attribution) -> pa.Table:
    """DEVICE_EVENT, PIECE -> WAVE_QUANTIZATION: products by grid, most loss first."""
    return works_table(VIEW, run, _columns).sort_by([("loss_ns", "descending")])


def _columns(works: Works) -> Columns | None:
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
    resident = last_wave.resident_blocks(
        ceiling.unit_limits,
        np.maximum(threads, 1),
        np.maximum(ints(events, "registers_count"), 1),
        np.maximum(ints(events, "shared_memory_bytes"), 0),
    )
    return np.where((threads > 0) & (resident > 0), resident, np.nan)


def _extents(events: pa.Table, name: str) -> np.ndarray:
    """Product of recorded grids or blocks; 0 where there is none."""
    codes, values = strings(events, name)
    extents = np.array([*(last_wave.extent(v) or 0 for v in values), 0], dtype=np.float64)
    return extents[codes]
