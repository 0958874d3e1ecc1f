"""CSV traces of AMD's profilers: rocprofv3's set of files, and the one table of rocprof.

    rocprofv3 --sys-trace --output-format csv -d out -o run -- python train.py
    → out/run_kernel_trace.csv, run_memory_copy_trace.csv, run_hip_api_trace.csv,
      run_marker_api_trace.csv, run_agent_info.csv

What a file is, is read from its heading. Files that share a folder and the beginning of their names
are one recording. Times are nanoseconds of the host's monotonic clock; grids count threads.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np

from chopper.collectors.formats.parsed import NO_VALUE, ParsedTrace, is_one_of
from chopper.collectors.formats.recording import (
    Ordinals,
    Recording,
    blocks_of,
    coded,
    renamed,
    streams_or_queues,
    traces_of,
)
from chopper.collectors.formats.rocpd import api_category, copy_name
from chopper.collectors.formats.unpack import DAMAGE, cells_of, head_of, letters_of, lines
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.wording import without_suffixes

KERNELS, COPIES, CALLS, AGENTS = "kernels", "copies", "calls", "agents"
_PART = re.compile(
    r"[_.-]?(?:kernel|memory_copy|(?:hip|hsa|marker|rccl|roctx)[a-z_]{0,40}|agent_info|results|timestamps"
    r"|counter_collection|pmc_perf)(?:_trace|_info)?(?:\.csv)?(?:\.gz|\.zst)?$",
    re.IGNORECASE,
)

_HELD_RATIO = 12
"""Memory for each byte of text: cells of some bytes as Python texts."""
_START = ("starttimestamp", "beginns", "startns")
_END = ("endtimestamp", "endns")


def part_of(head: bytes) -> str | None:
    """Return which file of a recording this is, by its heading; None for none of them."""
    cells = {letters_of(cell) for cell in cells_of(head.decode("utf-8-sig", "replace"))}
    if "nodeid" in cells and "agenttype" in cells:
        return AGENTS
    if not cells & set(_START) or not cells & set(_END):
        return None
    if "kernelname" in cells:
        return KERNELS
    if "direction" in cells:
        return COPIES
    return CALLS if "function" in cells else None


def sniff(head: bytes) -> bool:
    """Return whether a file is one of them."""
    return part_of(head) is not None


def group_of(path: Path) -> str:
    """Return the folder and prefix that files of one recording share."""
    return f"{path.parent}/{_PART.sub('', path.name)}"


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read the files of one recording.

    Raises:
        InputError: one of them cannot be read, or none says when anything ran.
    """
    named = min(files, key=lambda f: f.name)
    recording = Recording(path=named, tool="CSV of rocprof", boot_clock=True)
    tables = [_Table(path, recording) for path in files]
    agents = [t for t in tables if t.part == AGENTS]
    calls = [t for t in tables if t.part == CALLS]
    if any(t.part in (KERNELS, COPIES) and "Kind" in t.heading for t in tables) or calls:
        recording.tool = "CSV of rocprofv3"
    ordinals = _agents(recording, agents)
    pids = {int(p) for t in calls for p in np.unique(t.integers("processid", "pid")).tolist()}
    pids -= {NO_VALUE}
    # Kernels of rocprofv3 do not name their process; one recording is of one.
    pid = pids.pop() if len(pids) == 1 else NO_VALUE
    for table in calls:
        _calls(recording, table)
    for table in tables:
        if table.part == KERNELS:
            _kernels(recording, table, ordinals, pid)
        elif table.part == COPIES:
            _copies(recording, table, ordinals, pid)
    if not agents:
        recording.lacks.append("the devices' names (pass the agent_info.csv too)")
    return traces_of(recording)


class _Table:
    """One file as columns of text."""

    def __init__(self, path: Path, recording: Recording) -> None:
        self.path = path
        rows: list[list[str]] = []
        bad, problem = 0, None
        self.heading: list[str] = []
        try:
            self.part = part_of(head_of(path))
            text = (line.replace("\x00", "") for line in lines(path, held_ratio=_HELD_RATIO))
            reader = csv.reader(text)
            self.heading = [cell.strip() for cell in next(reader, [])]
            for row in reader:
                if len(row) == len(self.heading):
                    rows.append(row)
                elif row:
                    bad += 1
        except (csv.Error, *DAMAGE) as exc:
            problem = str(exc)
        except OSError as exc:
            raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
        self._columns = list(zip(*rows, strict=True)) or [()] * len(self.heading)
        self._place = {letters_of(name): i for i, name in reversed(list(enumerate(self.heading)))}
        self.count = len(rows)
        if bad or problem:
            problems = [f"{bad} rows are cut short or too long and are left out"] * bool(bad)
            problems += [f"ends in the middle ({problem})"] * bool(problem)
            found = finding(
                "trace.damaged_table",
                "csv",
                count=bad,
                source=path.name,
                problems="; ".join(problems),
            )
            recording.findings.append(found)

    def text(self, *names: str) -> Sequence[str] | None:
        """The first of these columns that is there."""
        for name in names:
            if name in self._place:
                return self._columns[self._place[name]]
        return None

    def integers(self, *names: str) -> np.ndarray:
        """The same as whole numbers; ``NO_VALUE`` where there is none."""
        cells = self.text(*names)
        if cells is None:
            return np.full(self.count, NO_VALUE, dtype=np.int64)
        return np.array([_number(cell) for cell in cells], dtype=np.int64).reshape(-1)


def _number(cell: str) -> int:
    try:
        # Python reads 1_000, which no profiler writes.
        number = NO_VALUE if "_" in cell else int(cell)
    except ValueError:
        try:
            # rocprofiler-compute writes decimal numbers.
            value = Decimal(cell)
            number = round(value) if value.adjusted() < 20 else NO_VALUE
        except (ValueError, ArithmeticError):
            return NO_VALUE
    return number if -(2**63) <= number < 2**63 else NO_VALUE


_AGENT = re.compile(r"(?:(GPU|Agent|CPU)\s+)?(\d{1,9})", re.IGNORECASE | re.ASCII)


def _agents(recording: Recording, tables: list[_Table]) -> Ordinals:
    """Return the ordinal of each node that is a GPU; none when no file says."""
    gpus: dict[int, tuple[str, int]] = {}
    for table in tables:
        for node, kind, name, units in zip(
            table.integers("nodeid").tolist(),
            table.text("agenttype") or (),
            table.text("productname", "name") or [""] * table.count,
            table.integers("cucount").tolist(),
            strict=False,
        ):
            if kind.strip().upper() == "GPU":
                gpus.setdefault(node, (name.strip(), units))
    return recording.add_devices(
        (node, ordinal, *gpus[node]) for ordinal, node in enumerate(sorted(gpus))
    )


def _device(cells: Sequence[str] | None, count: int, ordinals: Ordinals) -> np.ndarray:
    """Ordinals of agents: ``GPU 3`` is one, ``Agent 4`` and ``4`` are nodes."""
    if cells is None:
        return np.full(count, -1, dtype=np.int64)
    codes, names = coded(list(cells))
    values = []
    for name in names:
        match = _AGENT.fullmatch(name.strip()) if name else None
        if match is None or (match[1] or "").upper() == "CPU":
            values.append(-1)
        elif (match[1] or "").upper() == "GPU":
            values.append(int(match[2]))
        else:
            values.append(ordinals.get(int(match[2]), -1) if ordinals else int(match[2]))
    return np.array(values, dtype=np.int64)[codes]


def _kernels(recording: Recording, table: _Table, ordinals: Ordinals, pid: int) -> None:
    start = table.integers(*_START)
    block = [table.integers(f"workgroupsize{axis}") for axis in "xyz"]
    threads = [table.integers(f"gridsize{axis}") for axis in "xyz"]
    if (block[0] == NO_VALUE).all():
        # rocprof gives the products only; in one dimension the blocks are as many.
        size = table.integers("wgr", "workgroupsize")
        one = np.where(size > 0, 1, NO_VALUE)
        block = [size, one, one]
        threads = [table.integers("grd", "gridsize"), one, one]
    process_ids = table.integers("pid", "processid")
    device = _device(table.text("agentid", "gpuid"), table.count, ordinals)
    # A table of counters has a row for each of them.
    keys = np.stack([table.integers("dispatchid", "index"), device, start], axis=1)
    first = np.zeros(len(start), dtype=bool)
    first[np.unique(keys, axis=0, return_index=True)[1]] = True
    recording.device.add(
        start,
        table.integers(*_END),
        mask=first,
        pid=np.where(process_ids == NO_VALUE, pid, process_ids),
        device_id=device,
        stream_id=streams_or_queues(table.integers("streamid"), table.integers("queueid")),
        kind="kernel",
        name=coded([without_suffixes(cell) or None for cell in table.text("kernelname") or ()]),
        correlation_id=_correlations(table),
        registers_count=table.integers("vgprcount", "archvgpr"),
        shared_memory_bytes=table.integers(
            "groupsegmentsize", "ldsblocksize", "lds", "ldsperworkgroup"
        ),
        grid=list(map(blocks_of, threads, block)),
        block=block,
    )


def _correlations(table: _Table) -> np.ndarray:
    ids = table.integers("correlationid")
    # 0 throughout is what the tool writes when it did not trace calls.
    return np.where(ids > 0, ids, NO_VALUE)


def _copies(recording: Recording, table: _Table, ordinals: Ordinals, pid: int) -> None:
    target = _device(table.text("destinationagentid"), table.count, ordinals)
    source = _device(table.text("sourceagentid"), table.count, ordinals)
    directions = list(table.text("direction") or ())
    if not ordinals:
        # Without a list of agents the direction says which end is the device.
        to_host = np.array([d.upper().endswith("TO_HOST") for d in directions], dtype=bool)
        target = np.where(to_host, -1, target)
    recording.device.add(
        table.integers(*_START),
        table.integers(*_END),
        pid=pid,
        device_id=np.where(target >= 0, target, source),
        stream_id=table.integers("streamid"),
        kind="memcpy",
        name=coded([copy_name(d) for d in directions]),
        correlation_id=_correlations(table),
    )


def _calls(recording: Recording, table: _Table) -> None:
    domains = coded(table.text("domain", "kind") or [""] * table.count)
    category = renamed(domains, api_category)
    recording.host.add(
        table.integers(*_START),
        table.integers(*_END),
        pid=table.integers("processid", "pid"),
        tid=table.integers("threadid", "tid"),
        category=category,
        name=coded([cell or None for cell in table.text("function") or ()]),
        correlation_id=np.where(is_one_of(category, "annotation"), NO_VALUE, _correlations(table)),
    )
