"""From the columns of any recorder to one set of declared tables per process and device."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.cleaning import (
    aligned,
    calls_of_device,
    clean,
    cut_overruns,
    damage_findings,
    far_in_time,
    timelines_of,
    usable_spans,
    usable_starts,
)
from chopper.collectors.formats.counters import table_of
from chopper.collectors.formats.parsed import (
    NO_VALUE,
    ParsedTrace,
    is_one_of,
    most_frequent,
    sorted_table,
    table_of_rows,
)
from chopper.collectors.formats.steps import find_steps
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Device, Finding
from chopper.tables import TABLES

Text = tuple[np.ndarray, list[str | None]]
"""A column of texts: codes, and what they stand for; code 0 is null."""

Ordinals = dict[int | None, int]
"""Ordinals of devices by the numbers that a tool gives them."""


def by_number(numbers: np.ndarray, names: dict[int, str]) -> Text:
    """Texts that a file keeps elsewhere, by their numbers there."""
    distinct, codes = np.unique(numbers, return_inverse=True)
    texts = (names.get(int(number)) for number in distinct)
    return codes.astype(np.int32) + 1, [None, *(None if t is None else clean(t) for t in texts)]


def coded(values: Sequence[str | None]) -> Text:
    """Encode texts that are stored in the rows themselves."""
    known: dict[str | None, int] = {None: 0}
    codes = np.array([known.setdefault(v, len(known)) for v in values], dtype=np.int32)
    return codes.reshape(-1), [None if v is None else clean(v) for v in known]


def renamed(column: Text, name: Callable[[str], str | None]) -> Text:
    """A column of texts with each text replaced by what a function makes of it."""
    return column[0], [None if text is None else name(text) for text in column[1]]


def ordinals_of(agents: np.ndarray, ordinals: Ordinals) -> np.ndarray:
    """Devices of agents; -1 for an agent that is none."""
    distinct, codes = np.unique(agents, return_inverse=True)
    return np.array([ordinals.get(int(a), -1) for a in distinct], dtype=np.int64)[codes]


def streams_or_queues(streams: np.ndarray, queues: np.ndarray) -> np.ndarray:
    """Return streams where the recording tells several apart, else queues."""
    several = len(np.unique(streams)) > 1
    return streams if several or (queues == NO_VALUE).all() else queues


def json_member(text: str | None, key: str) -> Any:
    """Return a member of a JSON object; None where the text is none, or has no such member."""
    try:
        return json.loads(text or "{}").get(key)
    except (ValueError, AttributeError, RecursionError):
        return None


def triples(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> Text:
    """Three numbers as the JSON list that grids and blocks are recorded as; null where one is."""
    code = np.zeros(len(x), dtype=np.int64)
    for column in (x, y, z):
        # Sorting rows of three takes ten times as long as sorting numbers.
        values, value_code = np.unique(column, return_inverse=True)
        _, code = np.unique(code * len(values) + value_code, return_inverse=True)
    _, first, codes = np.unique(code, return_index=True, return_inverse=True)
    texts = [
        None if NO_VALUE in row else json.dumps(row)
        for row in zip(x[first].tolist(), y[first].tolist(), z[first].tolist(), strict=True)
    ]
    return codes.astype(np.int32) + 1, [None, *texts]


def blocks_of(threads: np.ndarray, per_block: np.ndarray) -> np.ndarray:
    """Blocks of a grid that is recorded in threads, as AMD's runtimes count it."""
    known = (threads > 0) & (per_block > 0)
    size = np.where(known, per_block, 1)
    return np.where(known, -(-np.where(known, threads, 1) // size), NO_VALUE)


def lookup(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Row of each wanted key, the first of equal ones; -1 for none."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    hit = (ordered[at] == wanted) & (wanted != NO_VALUE)
    return np.where(hit, order[at], -1)


def taken(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the values of rows; ``NO_VALUE`` for negative row numbers."""
    if not len(values):
        return np.full(len(rows), NO_VALUE, dtype=np.int64)
    return np.where(rows >= 0, values[np.maximum(rows, 0)], NO_VALUE)


def counters_table(
    source: str, values: Iterable[tuple[int, str | None, str | None, object]]
) -> pa.Table:
    """Return KERNEL_COUNTER of (dispatch, kernel, counter, value); instances are added up."""
    sums: dict[tuple[int, str, str], float | None] = {}
    for dispatch, kernel, counter, cell in values:
        if kernel is None or counter is None:
            continue
        try:
            value = float(cell)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        key = (dispatch, kernel, counter)
        before = sums.get(key, 0.0)
        sums[key] = None if before is None or not math.isfinite(value) else before + value
    return table_of(
        [
            (source, dispatch, kernel, 0, None, counter, value, None)
            for (dispatch, kernel, counter), value in sums.items()
        ]
    )


class _Rows:
    """Rows of one table as they come, some columns at a time."""

    def __init__(self, table: str, counts: Counter[str]) -> None:
        self._kinds = {f.name: f.type for f in TABLES[table].arrow} | {"pid": pa.int64()}
        self._counts = counts
        self._parts: list[dict[str, Any]] = []

    def add(
        self,
        start_ns: np.ndarray,
        end_ns: np.ndarray,
        mask: np.ndarray | None = None,
        **columns: Any,
    ) -> None:
        """Add rows; those without a start or a name are dropped and counted.

        Args:
            start_ns, end_ns: as recorded, ``NO_VALUE`` where there is none.
            mask: rows to take; all with None.
            columns: further columns of the table: numbers, :data:`Text`, one value for all rows, or
                a list of three columns for grids and blocks; what is not given is null.
        """
        every = {"start_ns": start_ns, "end_ns": end_ns}
        for name, value in columns.items():
            every[name] = _column(value, len(start_ns))
        if mask is not None:
            every = rows_where(every, mask)
        start_ns, end_ns = every["start_ns"], every.pop("end_ns")
        if not len(start_ns):
            return
        missing = end_ns == NO_VALUE
        ok = usable_starts(self._counts, 0, start_ns, start_ns != NO_VALUE, None)
        sane = ok & ~missing & (np.abs(end_ns) < 1 << 62)
        dur = np.where(sane, end_ns, 0) - np.where(sane, start_ns, 0)
        codes, values = every["name"]
        named = np.array([v is not None for v in values])[codes]
        ok, every["dur_ns"] = usable_spans(self._counts, ok, named, dur, sane, missing)
        rows = rows_where(every, ok)
        for column in _PLACES & rows.keys():
            # A device's ordinal has 32 bits in our tables; what has more is none.
            largest = (1 << 31) - 1 if column == "device_id" else (1 << 63) - 1
            known = (rows[column] >= -largest) & (rows[column] <= largest)
            rows[column] = np.where(known, rows[column], -1)
        count = int(ok.sum())
        self._parts.append(
            {name: rows.get(name, self._absent(name, count)) for name in self._kinds}
        )

    def _absent(self, column: str, count: int) -> Any:
        if pa.types.is_dictionary(self._kinds[column]):
            return _column(None, count)
        if self._kinds[column] == pa.float64():
            return np.full(count, np.nan)
        return np.full(count, -1 if column in _PLACES else NO_VALUE, dtype=np.int64)

    def finish(self) -> dict[str, Any]:
        """All rows, as columns."""
        none = {name: self._absent(name, 0) for name in self._kinds}
        return {name: _joined([part[name] for part in [none, *self._parts]]) for name in none}


_PLACES = frozenset(("pid", "tid", "device_id", "stream_id"))
"""Columns where -1 stands for what nobody says."""


def _column(value: Any, count: int) -> Any:
    if value is None or isinstance(value, str):
        return np.full(count, 0 if value is None else 1, dtype=np.int32), [None, value]
    if isinstance(value, int):
        return np.full(count, value, dtype=np.int64)
    return triples(*value) if isinstance(value, list) else value


def rows_where(columns: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Return the rows of columns that a mask holds."""
    return {
        name: (value[0][mask], value[1]) if isinstance(value, tuple) else value[mask]
        for name, value in columns.items()
    }


def _joined(parts: list[Any]) -> Any:
    if not isinstance(parts[0], tuple):
        return np.concatenate(parts)
    codes, values = [], [None]
    for part, texts in parts:
        codes.append(np.where(part > 0, part + (len(values) - 1), 0).astype(np.int32))
        values += texts[1:]
    return np.concatenate(codes), values


@dataclass(kw_only=True)
class Recording:
    """Contents of one file, or of one set of files.

    Attributes:
        path: as the user named it, the first of several.
        tool: what wrote it, with its version where it says.
        counts: rows that were repaired or dropped.
        host, device: rows; a device event's ``pid`` is its process, -1 where nobody says.
        devices: as recorded.
        ranks: rank of each process that says.
        threads: (process, thread or -1, name of the process, name of the thread).
        boot_clock: times count from the host's start, not from 1970.
        lacks: what the format does not tell, in words.
        tables: further tables of every process, for example counters.
        environment: facts worth keeping.
        findings: what must be known.
    """

    path: Path
    tool: str
    counts: Counter[str] = field(default_factory=Counter)
    devices: list[Device] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    threads: list[tuple[int, int, str | None, str | None]] = field(default_factory=list)
    boot_clock: bool = False
    lacks: list[str] = field(default_factory=list)
    tables: dict[str, pa.Table] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def source(self) -> str:
        """Name of the file."""
        return self.path.name

    def add_devices(self, agents: Iterable[tuple[int | None, int, str | None, object]]) -> Ordinals:
        """Add the devices of a process, and return their ordinals by the tool's numbers.

        Each is (the tool's number, ordinal, name, count of multiprocessors).
        """
        ordinals = {}
        for number, ordinal, name, units in agents:
            ordinals[number] = ordinal
            if all(d.device_id != ordinal for d in self.devices):
                if not isinstance(units, int) or not 0 < units < 1 << 20:
                    units = None
                self.devices.append(
                    Device(
                        device_id=ordinal,
                        name=name or None,
                        multiprocessor_count=units,
                    )
                )
        self.devices.sort(key=lambda d: d.device_id)
        return ordinals

    def __post_init__(self) -> None:
        self.host = _Rows("host_span", self.counts)
        self.device = _Rows("device_event", self.counts)


def traces_of(recording: Recording) -> list[ParsedTrace]:
    """One trace per process that drives devices, and per device of it.

    Raises:
        InputError: the recording holds nothing that ran.
    """
    host, device = recording.host.finish(), recording.device.finish()
    if not len(host["start_ns"]) and not len(device["start_ns"]):
        raise InputError(
            f"{recording.path}: {recording.tool}, without a single usable event; was the tool "
            "told to trace kernels and API calls?"
        )
    far = far_in_time(host, device)
    if far is not None:
        recording.counts["event.far_in_time"] += int(far[0].sum() + far[1].sum())
        host, device = rows_where(host, ~far[0]), rows_where(device, ~far[1])
    host = _closed(_annotated(host))
    processes = _processes(host, device, recording.ranks)
    traces: list[ParsedTrace] = []
    for pid in processes:
        traces += _of_process(recording, host, device, pid, processes)
    traces[0].findings[:0] = [*_findings(recording, host, device), *recording.findings]
    return traces


def _processes(host: dict[str, Any], device: dict[str, Any], ranks: dict[int, int]) -> list[int]:
    """Processes that drive devices, in order of rank, else of number."""
    drivers = [int(p) for p in np.unique(device["pid"])]
    if not drivers:
        return [most_frequent(host["pid"])]
    return sorted(drivers, key=lambda pid: (ranks.get(pid, 1 << 30), pid))


def _of_process(
    recording: Recording,
    host: dict[str, Any],
    device: dict[str, Any],
    pid: int,
    processes: list[int],
) -> list[ParsedTrace]:
    several = len(processes) > 1
    host_rows = None
    if several:
        stray = ~np.isin(host["pid"], processes)
        host_rows = (host["pid"] == pid) | (stray if pid == processes[0] else False)
    on_device = device["pid"] == pid if len(device["pid"]) else None
    if pid >= 0:
        # Processes number their calls alike; only its own launch its work.
        own_ids = np.where(host["pid"] == pid, host["correlation_id"], NO_VALUE)
        host = {**host, "correlation_id": own_ids}
    host_table, _ = sorted_table("host_span", host, host_rows, 0)
    counts: Counter[str] = Counter()
    device = cut_overruns(counts, device, on_device)
    timelines, findings = timelines_of(device, on_device, recording.source)
    findings += damage_findings(counts, recording.source)
    step, marked = find_steps(host_table, recording.source)
    findings += marked
    traces: list[ParsedTrace] = []
    for device_id, rows in timelines:
        device_table, _ = sorted_table("device_event", device, rows, 0)
        own_host = calls_of_device(host_table, device, on_device, rows)
        device_table, shifted = aligned(
            own_host, device_table, recording.source, only_device=rows is on_device
        )
        findings += shifted
        traces.append(
            ParsedTrace(
                source=recording.source,
                rank=recording.ranks.get(pid),
                tables={
                    **recording.tables,
                    "host_span": own_host,
                    "device_event": device_table,
                    "thread": table_of_rows(
                        "thread", sorted(set(recording.threads), key=lambda r: (r[0], r[1]))
                    ),
                    "step": step,
                },
                devices=recording.devices,
                host_pid=pid if pid >= 0 else None,
                process=f"process {pid}" if several else None,
                device_id=device_id,
                main=not traces,
                environment={
                    **recording.environment,
                    "recorded_by": recording.tool,
                    **({"trace_clock": "monotonic"} if recording.boot_clock else {}),
                },
            )
        )
    traces[0].findings += findings
    return traces


def _findings(recording: Recording, host: dict[str, Any], device: dict[str, Any]) -> list[Finding]:
    source = recording.source
    findings = damage_findings(recording.counts, source)
    categories = {host["category"][1][code] for code in np.unique(host["category"][0])}
    lacks = list(recording.lacks)
    if "cpu_op" not in categories:
        lacks.append("operators and shapes")
    if "runtime" not in categories and "driver" not in categories:
        lacks.append("launches")
    if not len(device["start_ns"]):
        lacks.append("kernels")
    listed = ", ".join([*lacks, "process groups and sizes of collectives"])
    findings.append(finding("trace.not_recorded", source=source, tool=recording.tool, lacks=listed))
    if recording.boot_clock:
        findings.append(finding("trace.boot_clock", source=source))
    return findings


# ---------------------------------------------------------------- ranges as torch writes them

_SEQUENCE = re.compile(r", seq = (-?\d{1,18})(?=,|$)", re.ASCII)
_OPERATOR_ID = re.compile(r", op_id = (\d{1,18})(?=,|$)", re.ASCII)
_SIZES, _INPUTS = ", sizes = [", ", input_op_ids = ["
_OPERATOR = re.compile(
    r"(?:[A-Za-z_]\w*::)+\w[\w.]*$|\w+Backward\d*$|autograd::engine::evaluate_function: \w+$"
)


def torch_range(text: str) -> tuple[bool, str, int, int, str | None] | None:
    """(operator, name, sequence number, operator's id, shapes) of a range that torch pushed; None
    for a range of somebody else's.

    ``torch.autograd.profiler.emit_nvtx`` writes ``aten::mm, seq = 12, op_id = 34, sizes =
    [[2, 3], [3, 4]], input_op_ids = […]`` and leaves out what it does not know; so do the ranges
    that a program names itself, which are no operators.
    """
    rest, sizes = _without_inputs(text)
    number = _OPERATOR_ID.search(rest)
    if number:
        rest = rest[: number.start()]
    sequence = _SEQUENCE.search(rest)
    if sequence:
        rest = rest[: sequence.start()]
    operator = bool(_OPERATOR.match(rest))
    if not operator and rest == text:
        return None
    return (
        operator,
        rest,
        NO_VALUE if sequence is None or int(sequence[1]) < 0 else int(sequence[1]),
        NO_VALUE if number is None else int(number[1]),
        sizes,
    )


def _without_inputs(text: str) -> tuple[str, str | None]:
    """Split a range's text into what precedes the sizes and ids of its inputs, and the sizes."""
    at = text.find(_INPUTS)
    rest = text[:at] if at >= 0 and text.endswith("]") else text
    at = rest.find(_SIZES)
    if at < 0:
        return rest, None
    begin = at + len(_SIZES) - 1
    end = len(rest) if rest.endswith("]") else rest.rfind("]" + _INPUTS[:-1], begin) + 1
    return (rest[:at], rest[begin:end]) if end > begin else (rest, None)


def _annotated(host: dict[str, Any]) -> dict[str, Any]:
    """Ranges that are operators become operators."""
    codes, names = host["name"]
    ranges = is_one_of(host["category"], "annotation")
    parsed_by_code = {
        code: torch_text
        for code in np.unique(codes[ranges]).tolist()
        if (text := names[code]) is not None and (torch_text := torch_range(text)) is not None
    }
    if not parsed_by_code:
        return host
    rows = np.flatnonzero(ranges & np.isin(codes, list(parsed_by_code)))
    parsed = [parsed_by_code[code] for code in codes[rows].tolist()]
    changed = dict(host)
    changed["category"] = _replaced(
        host["category"], rows, coded(["cpu_op" if p[0] else "annotation" for p in parsed])
    )
    changed["name"] = _replaced(host["name"], rows, coded([p[1] for p in parsed]))
    changed["input_dims"] = _replaced(host["input_dims"], rows, coded([p[4] for p in parsed]))
    for at, column in ((2, "sequence_id"), (3, "external_id")):
        values = np.array([p[at] for p in parsed], dtype=np.int64)
        changed[column] = host[column].copy()
        changed[column][rows] = np.where(values != NO_VALUE, values, host[column][rows])
    return changed


def _closed(host: dict[str, Any]) -> dict[str, Any]:
    """End ranges that were begun and never ended where the next of their kind begins.

    A tool ends all of them when its recording does: ranges of one kind on one thread end together.
    """
    rows = np.flatnonzero(is_one_of(host["category"], "annotation"))
    codes, names = host["name"]
    kinds: dict[str, int] = {}
    kind_of = [kinds.setdefault(re.sub(r"\d+", "#", name or ""), len(kinds)) for name in names]
    kind = np.array(kind_of, dtype=np.int64)[codes[rows]]
    start, end = host["start_ns"][rows], host["start_ns"][rows] + host["dur_ns"][rows]
    order = np.lexsort((start, end, kind, host["tid"][rows], host["pid"][rows]))
    keys = np.stack([host["pid"][rows], host["tid"][rows], kind, end])[:, order]
    later = start[order][1:] - start[order][:-1]
    open_ranges = np.flatnonzero((keys[:, 1:] == keys[:, :-1]).all(axis=0) & (later > 0))
    dur = host["dur_ns"].copy()
    dur[rows[order][open_ranges]] = later[open_ranges]
    return {**host, "dur_ns": dur}


def _replaced(column: Text, rows: np.ndarray, new: Text) -> Text:
    """Replace texts in some rows of a column; null keeps the original."""
    codes = column[0].copy()
    codes[rows] = np.where(new[0] > 0, new[0] + (len(column[1]) - 1), codes[rows])
    return codes, [*column[1], *new[1][1:]]
