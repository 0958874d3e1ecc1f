"""Tables of time and energy at set clocks, as CSV: ``stage,instruction,frequency,time,energy``.

Zeus' profiler of pipelines (Perseus) writes them: a row for each pipeline stage, instruction
(``forward``, ``backward``) and locked SM clock in MHz, with the seconds and the joules that one
instruction took. They have no moments, so they belong to no recording.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from chopper.collectors.formats.unpack import DAMAGE, lines
from chopper.errors import InputError, reason_of
from chopper.hardware.clock_tables import INSTRUCTIONS, ClockTable

COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_HELD_RATIO = 12
"""Memory for each byte of text: cells of some bytes as Python texts."""
_MOST_STAGES = 1024
_MOST_ROWS = 1_000_000
_MOST_MHZ, _MOST_S, _MOST_J = 20e3, 1e5, 1e9
"""No device, instruction or meter has more."""


def read_clock_tables(path: Path) -> list[ClockTable]:
    """Read a file, plain or packed: one table for each stage and instruction, in order.

    Raises:
        InputError: the file cannot be read, or a row is not of such a table.
    """
    try:
        cells = list(islice(csv.reader(lines(path, held_ratio=_HELD_RATIO)), _MOST_ROWS + 1))
    except (*DAMAGE, csv.Error) as exc:
        raise InputError(f"{path}: cannot be read as a CSV table ({exc})") from exc
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({reason_of(exc)})") from exc
    if len(cells) > _MOST_ROWS:
        raise InputError(f"{path}: more than {_MOST_ROWS} rows, too many for a table of clocks")
    heading = [name.strip().lower() for name in cells[0]] if cells else []
    missing = [name for name in COLUMNS if name not in heading]
    if missing:
        found = repr(",".join(heading)[:80]) if heading else "an empty file"
        raise InputError(
            f"{path}: not a table of time and energy by clock: expected the columns "
            f"{','.join(COLUMNS)}; found {found}"
        )
    at = [heading.index(name) for name in COLUMNS]
    rows: dict[tuple[int, str], dict[int, tuple[int, float]]] = {}
    for number, row in enumerate(cells[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"{path}: line {number}"
        if len(row) != len(heading):
            raise InputError(f"{where}: has {len(row)} cells, expected {len(heading)}")
        stage, instruction, clock_hz, time_ns, energy_j = _row([row[i] for i in at], where)
        of_kind = rows.setdefault((stage, instruction), {})
        if clock_hz in of_kind:
            raise InputError(
                f"{where}: stage {stage}, {instruction} at {clock_hz / 1e6:g} MHz was listed "
                "before; expected each clock once"
            )
        of_kind[clock_hz] = time_ns, energy_j
    return _checked(rows, path)


def _row(cells: list[str], where: str) -> tuple[int, str, int, int, float]:
    """Return stage, instruction, clock in Hz, time in ns and energy in J of a row."""
    stage = _number(cells[0], 0, _MOST_STAGES - 1, f"{where}: stage")
    if stage != int(stage):
        raise InputError(f"{where}: stage {stage:g} is not whole; stages are numbered from 0")
    instruction = cells[1].strip().lower()
    if instruction not in INSTRUCTIONS:
        raise InputError(
            f"{where}: instruction {cells[1].strip()[:40]!r}; expected forward or backward"
        )
    clock_mhz = _number(cells[2], 1, _MOST_MHZ, f"{where}: frequency in MHz")
    time_s = _number(cells[3], 1e-9, _MOST_S, f"{where}: time in s")
    energy_j = _number(cells[4], 1e-9, _MOST_J, f"{where}: energy in J")
    return int(stage), instruction, round(clock_mhz * 1e6), round(time_s * 1e9), energy_j


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise InputError(f"{what}: found {text.strip()[:40]!r}, expected {least:g} to {most:g}")
    return value


def _checked(
    rows: dict[tuple[int, str], dict[int, tuple[int, float]]], path: Path
) -> list[ClockTable]:
    """Return the tables; every stage from 0 on has both instructions.

    Raises:
        InputError: one is missing.
    """
    if not rows:
        raise InputError(f"{path}: a table of time and energy by clock without a row")
    stages = range(max(stage for stage, _ in rows) + 1)
    wanted = [(stage, instruction) for stage in stages for instruction in INSTRUCTIONS]
    for stage, instruction in wanted:
        if (stage, instruction) not in rows:
            raise InputError(
                f"{path}: no row of stage {stage}, {instruction}; expected both instructions of "
                f"all stages from 0 to {stages[-1]}"
            )
    return [_table(key, rows[key]) for key in wanted]


def _table(key: tuple[int, str], by_clock: dict[int, tuple[int, float]]) -> ClockTable:
    clocks: Iterable[int] = sorted(by_clock, reverse=True)
    time_ns, energy_j = zip(*(by_clock[clock] for clock in clocks), strict=True)
    return ClockTable(
        *key,
        np.array([*clocks], dtype=np.int64),
        np.array(time_ns, dtype=np.int64),
        np.array(energy_j, dtype=np.float64),
    )
