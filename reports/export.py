"""An attributed run for other tools: its tables and views as Parquet or CSV, or a timeline."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import ClockSeries
from chopper.analyzers.events.cause_slices import cause_slices
from chopper.analyzers.trace.columns import strings
from chopper.causes import CAUSES
from chopper.collectors.formats import readers
from chopper.collectors.formats.kineto.original import (
    OriginalTrace,
    decode_events,
    encode_event,
    microseconds,
    moved,
)
from chopper.errors import OutputError, RunFormatError, UsageError, csv_text, reason_of
from chopper.ingest import carried
from chopper.reports.chakra import write_chakra
from chopper.reports.lanes import HELD_CAUSES, held_clocks
from chopper.reports.series import SAMPLED, Series, collect, queues
from chopper.storage import parquet
from chopper.storage.destination import written_beside
from chopper.storage.files import encode_json, inside
from chopper.storage.run import OF_MANIFEST
from chopper.wording import device_name, plural, ranges

Kind = Literal["parquet", "csv", "perfetto", "chakra"]
KINDS: tuple[str, ...] = get_args(Kind)


def export(
    run: Attribution, kind: Kind, directory: str | Path, *, force: bool = False
) -> list[Path]:
    """Write a run for other tools.

    Args:
        run: the run to write.
        kind: ``parquet`` or ``csv`` (a file per table: of each rank in ``rank-00000/``, of the
            attribution, of all traced steps, at the top, of the views in ``views/``),
            ``perfetto`` (``trace.json.gz``), or ``chakra`` (``trace.0.et`` of each rank), with all
            steps.
        directory: target directory; made when it is not there.
        force: write into a directory that holds files, over those of the same name.

    Returns:
        The files.

    Raises:
        UsageError: no such kind.
        OutputError: the directory holds files, or cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(f"--to {kind!r} unknown: one of {', '.join(KINDS)}")
    target = check_directory(Path(directory), force=force)
    names: list[str] = []
    try:
        # A table that ends in the middle looks like a whole one.
        with written_beside(target) as fresh:
            if kind == "perfetto":
                names.append("trace.json.gz")
                write_timeline(run, fresh / names[-1])
            elif kind == "chakra":
                for rank in run.all_steps.links:
                    names.append(f"trace.{rank}.et")
                    write_chakra(run, rank, fresh / names[-1])
            else:
                for name, table in tables(run):
                    names.append(f"{name}.{kind}")
                    _write(table, fresh / names[-1])
            if not target.exists():
                fresh.replace(target)
            else:
                for name in names:
                    destination = inside(target, name)
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    (fresh / name).replace(destination)
    except RunFormatError as exc:
        raise OutputError(f"{exc}; nothing is written through it") from exc
    except OSError as exc:
        raise OutputError(f"{target}: cannot be written ({reason_of(exc)})") from exc
    return [target / name for name in names]


def check_directory(path: Path, *, force: bool) -> Path:
    """Return the directory when it may be written into.

    Raises:
        OutputError: it is a file, or holds files and ``force`` is not given.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file; give a directory with -o")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise OutputError(f"{path}: holds files; choose another -o, or pass --force to write here")
    return path


def tables(run: Attribution) -> Iterator[tuple[str, pa.Table]]:
    """Return every table and view that has rows, by its path without extension.

    Those of a rank have the columns ``rank`` and ``row`` before theirs: the files of all ranks are
    one table.
    """
    from chopper.analyzers.relations import relation
    from chopper.analyzers.replay.replay import replay_or_reason
    from chopper.reports.tables import every as summaries
    from chopper.storage.layout import rank_dir_name
    from chopper.tables import GROUPS
    from chopper.views import VIEWS, views

    whole = run.all_steps
    for name in (*OF_MANIFEST, "piece", "window", "gap", "communication", "selection", "cause"):
        yield name, relation(run, name)
    for rank in run.recording.ranks:
        folder = rank_dir_name(rank)
        for declared in (*GROUPS["trace"], *GROUPS["telemetry"], *GROUPS["memory"]):
            table = table_of(run, rank, declared.name)
            if table.num_rows:
                yield f"{folder}/{declared.name}", parquet.numbered(table, declared.name, rank)
        if rank in whole.links:
            yield f"{folder}/event_link", parquet.numbered(whole.links[rank], "event_link", rank)
    for table in summaries(run, replay_or_reason(run)):
        if table.num_rows:
            yield f"summary/{table.schema.metadata[b'chopper.table'].decode()}", table
    for name, table in views(run, VIEWS).items():
        if table.num_rows:
            yield f"views/{name}", table


def _write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.cast(parquet.plain(table.schema))
    if path.suffix == parquet.SUFFIX:
        parquet.write(table, path)
        return
    from pyarrow import csv

    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(at, field, _csv_column(table.column(at)))
    with path.open("wb") as file:
        csv.write_csv(table, file)


def _csv_column(column: pa.ChunkedArray) -> pa.Array:
    """Return texts as cells of CSV."""
    texts = column.combine_chunks().dictionary_encode()
    words = pa.array([csv_text(text) for text in texts.dictionary.to_pylist()], pa.string())
    return pa.DictionaryArray.from_arrays(texts.indices, words).cast(pa.string())


_FIRST_PID = 2_000_000_000
"""Of Chopper's processes; no operating system numbers processes so high."""
_UNITS = {
    "hz": ("MHz", 1e-6),
    "w": ("W", 1.0),
    "c": ("°C", 1.0),
    "ratio": ("%", 100.0),
    "bytes": ("MiB", 2.0**-20),
    "bytes_per_s": ("MB/s", 1e-6),
}
"""Unit of a series to the unit of its counter, and the factor between them."""
_FLOAT_NS = 1000 << 43
"""Times from here on, as microseconds in a float, tell no nanoseconds apart."""
_MARGIN_NS = 10_000_000_000
_IDS = ("id", "bind_id")
_METADATA = msgspec.Raw(b'"M"')
_ID_BITS = 32
"""Ids of flows are correlation ids, of 32 bits; those of further files get the bits above."""

Event = dict[str, Any]
Slice = tuple[str, int, int, Event]
"""Name, start, duration and arguments."""


def without_original(run: Attribution) -> list[int]:
    """Return the ranks whose events are taken from the tables, as their traces are gone."""
    with_original = {rank for ranks in _sources(run).values() for rank in ranks}
    return [rank for rank in run.recording.ranks if rank not in with_original]


def note(run: Attribution) -> str:
    """Say of which ranks the events are taken from the tables; empty for none."""
    ranks = without_original(run)
    if not ranks:
        return ""
    return (
        f"{plural(len(ranks), 'rank')} without an original trace in Kineto's JSON "
        f"({ranges(ranks)}): host spans, device events and launches are taken from the tables"
    )


def write_timeline(run: Attribution, path: Path) -> None:
    """Write the timeline of a run, with steps of all kinds, gzipped.

    Times are microseconds since ``baseTimeNanoseconds``, exact to the ns: that of the first
    original trace, or shortly before the first event if it has Unix times, in which viewers see no
    nanoseconds.

    Raises:
        InputError: an original trace cannot be read.
        OSError: the file cannot be written.
    """
    run = run.all_steps
    with gzip.open(path, "wb", compresslevel=3) as file:
        file.write(b"{")
        file.writelines(carried(run.recording))
        events = _Events(file)
        originals = _sources(run)
        traces = [OriginalTrace(path) for path in originals]
        base_ns = next((trace.base_ns for trace in traces), 0)
        if not base_ns and (earliest_ns := _earliest_ns(run)) >= _FLOAT_NS:
            base_ns = earliest_ns - earliest_ns % _MARGIN_NS - _MARGIN_NS
        pids = _write_originals(events, traces, [*originals.values()], base_ns)
        first_pid = _FIRST_PID if originals else 0
        while any(b"%d" % (first_pid + rank) in pids for rank in run.recording.ranks):
            first_pid += len(run.recording.ranks)
        for event in _added(run, base_ns, first_pid):
            events.add(encode_json(event))
        file.write(b"\n]}\n")


class _Events:
    """The list of events in a file of JSON."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._separator = b"\n"

    def begin(self, header: Mapping[str, msgspec.Raw]) -> None:
        """Write the members that stand before the events."""
        for name, text in header.items():
            self._file.write(b",%b:%b" % (encode_json(name), text))
        self._file.write(b',"traceEvents":[')

    def add(self, text: bytes) -> None:
        """Write events: JSON objects with commas between them, or nothing."""
        if text.strip():
            self._file.write(self._separator + text)
            self._separator = b",\n"


def _sources(run: Attribution) -> dict[Path, list[int]]:
    """Return the original traces in JSON that are there, each once, with its ranks."""
    ranks_by_file: dict[Path, list[int]] = {}
    same: dict[tuple[int, int], Path] = {}
    for rank, files in sorted(run.recording.originals.items()):
        for file in files if rank in run.recording.ranks else ():
            if not file.is_file() or readers.reader_of(file) is not readers.KINETO:
                continue
            facts = file.stat()
            # Ranks that are in one file have links to it in a run directory.
            first = same.setdefault((facts.st_dev, facts.st_ino), file)
            ranks_by_file.setdefault(first, []).append(rank)
    return ranks_by_file


def _write_originals(
    events: _Events, traces: Sequence[OriginalTrace], ranks: Sequence[list[int]], base_ns: int
) -> set[bytes]:
    """Write the headers and events of the original traces; return all process ids.

    Those of one trace with this base are as they were written. Else times count from the base, and
    no two traces share an id of a process or flow.
    """
    header = dict(traces[0].header) if len(traces) == 1 else {}
    if len(traces) != 1 or traces[0].base_ns != base_ns:
        header["baseTimeNanoseconds"] = msgspec.Raw(b"%d" % base_ns)
    if len(traces) > 1:
        named = zip(traces, ranks, strict=True)
        headers = [{"file": trace.path.name, "ranks": of, **trace.header} for trace, of in named]
        header["headers"] = msgspec.Raw(encode_json(headers))
    events.begin(header)
    processes = _Processes()
    for number, (trace, of) in enumerate(zip(traces, ranks, strict=True)):
        later_ns = trace.base_ns - base_ns
        processes.begin(of)
        for block in trace.blocks():
            if len(traces) == 1 and not later_ns:
                events.add(block)
                continue
            for event in decode_events(b"[%b]" % block):
                processes.renumber(event)
                for key in _IDS if number else ():
                    if key in event:
                        event[key] = _distinct_id(event[key], number)
                if later_ns and "ts" in event and event.get("ph") != _METADATA:
                    event["ts"] = moved(event["ts"], later_ns)
                events.add(encode_event(event))
        for label in processes.labels() if len(traces) > 1 else ():
            events.add(encode_json(label))
    return processes.used.union(*(trace.pids for trace in traces))


class _Processes:
    """Process ids of several traces, each file's kept if no file before has them."""

    def __init__(self) -> None:
        self.used: set[bytes] = set()
        self._next = 1 << 24
        self._ranks: list[int] = []
        self._new: dict[bytes, msgspec.Raw] = {}

    def begin(self, ranks: list[int]) -> None:
        """Begin the next file."""
        self._ranks, self._new = ranks, {}

    def renumber(self, event: dict[str, msgspec.Raw]) -> None:
        """Give an event's process a number that no other file has."""
        if "pid" not in event:
            return
        pid = bytes(event["pid"])
        if pid not in self._new:
            new = pid
            while new in self.used:
                self._next += 1
                suffix = f" (rank {ranges(self._ranks)})"
                new = pid[:-1] + suffix.encode() + b'"' if pid[:1] == b'"' else b"%d" % self._next
                if new in self.used:
                    new = b"%d" % self._next
            self.used.add(new)
            self._new[pid] = msgspec.Raw(new)
        event["pid"] = self._new[pid]

    def labels(self) -> Iterator[Event]:
        """Yield what tells the ranks of the file's processes."""
        label = f"rank {ranges(self._ranks)}"
        for pid in self._new.values():
            yield {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": label}}


def _distinct_id(text: msgspec.Raw, number: int) -> msgspec.Raw:
    """Return the id of a flow in the n-th file, which no other file's id is; others as they are."""
    value = msgspec.json.decode(text)
    if isinstance(value, int) and 0 <= value < 1 << _ID_BITS:
        return msgspec.Raw(b"%d" % (value + (number << _ID_BITS)))
    try:
        return msgspec.Raw(b'"0x%x"' % (int(value, 16) + (number << 2 * _ID_BITS)))
    except (TypeError, ValueError):
        return text


def _earliest_ns(run: Attribution) -> int:
    starts = (
        int(start)
        for rank in run.recording.ranks
        for name in ("host_span", "device_event")
        for start in table_of(run, rank, name)["start_ns"][:1].to_pylist()
    )
    return min(starts, default=0)


def table_of(run: Attribution, rank: int, name: str) -> pa.Table:
    """Return a table of a rank as it was joined, else as it was recorded."""
    joined = getattr(run.joined.get(rank), name, None)
    return run.recording.table(rank, name) if joined is None else joined


class _Process:
    """A process of the timeline with its tracks, which are numbered as they come."""

    def __init__(self, pid: int, base_ns: int) -> None:
        self.pid = pid
        self._base_ns = base_ns
        self._tracks: dict[str, int] = {}

    def name(self, kind: str, name: object, track: int = 0) -> Event:
        """Return the event that names the process or a track, or sorts it."""
        key = "sort_index" if kind.endswith("sort_index") else "name"
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": track, "args": {key: name}}

    def track(self, label: str) -> Iterator[Event]:
        """Begin a track."""
        if label not in self._tracks:
            self._tracks[label] = len(self._tracks) + 1
            yield self.name("thread_name", label, self._tracks[label])
            yield self.name("thread_sort_index", self._tracks[label], self._tracks[label])

    def event(self, phase: str, name: str, start_ns: int, track: str = "", **more: Any) -> Event:
        """Return an event; on a track that was begun, or of the process."""
        ts = microseconds(start_ns - self._base_ns)
        tid = self._tracks.get(track, 0)
        return {"ph": phase, "name": name, "pid": self.pid, "tid": tid, "ts": ts, **more}

    def slices(self, track: str, category: str, rows: Iterable[Slice]) -> Iterator[Event]:
        """Yield the slices of a track, none within another.

        Viewers read times as floats, where a start and a duration may end a nanosecond too late,
        and drop slices that overlap so. An end that is the next slice's start is read like it.
        """
        yield from self.track(track)
        for name, start_ns, dur_ns, args in rows:
            yield self.event("B", name, start_ns, track, cat=category, args=args)
            yield self.event("E", name, start_ns + dur_ns, track, cat=category)

    def span(
        self, track: str, category: str, start_ns: int, dur_ns: int, name: str, args: Event
    ) -> Iterator[Event]:
        """Yield a span of a track where others may be within it."""
        yield from self.track(track)
        dur = microseconds(dur_ns)
        yield self.event("X", name, start_ns, track, cat=category, dur=dur, args=args)


def _added(run: Attribution, base_ns: int, first_pid: int) -> Iterator[Event]:
    """Yield Chopper's tracks of each rank, and the tables of ranks without a trace.

    Of a run that is too large, causes are of the ranks and steps that are looked at closely.
    """
    near = run.detail.all_steps
    of_tables = {*without_original(run)}
    labels = {r.rank: r.label for r in run.ranks}
    series = [*collect(near.recording), *queues(near)]
    for rank in run.recording.ranks:
        process = _Process(first_pid + rank, base_ns)
        label = labels.get(rank, f"rank {rank}")
        yield process.name("process_name", label if rank in of_tables else f"Chopper: {label}")
        yield process.name("process_sort_index", rank)
        yield from process.slices("chopper: steps", "step", _steps(run, rank))
        if rank in near.links:
            yield from process.slices("chopper: causes", "cause", _causes(near, rank))
        factors = near.factors.get(rank)
        for device, clock in sorted(factors.clocks.readers.items()) if factors else ():
            label = f"chopper: clock held by, {device_name(device)}"
            yield from process.slices(label, "clock", _held(clock))
        yield from _counters(process, run, rank, series)
        if rank in of_tables:
            yield from _of_tables(process, near if rank in near.joined else run, rank)


def _steps(run: Attribution, rank: int) -> Iterator[Slice]:
    for row in run.windows.filter(pc.field("rank") == rank).to_pylist():
        name = "whole trace" if row["number"] is None else f"step {row['number']}"
        yield name, row["start_ns"], row["end_ns"] - row["start_ns"], {}


def _causes(run: Attribution, rank: int) -> Iterator[Slice]:
    slices = cause_slices(run, rank)
    codes, causes = slices.cause.indices.to_pylist(), slices.cause.dictionary.to_pylist()
    names = [CAUSES[cause].label for cause in causes]
    events, links = table_of(run, rank, "device_event"), run.links[rank]
    texts = {"kernel": strings(events, "name")}
    texts |= {name: strings(links, name) for name in ("op", "layer", "phase")}
    columns = (codes, slices.start_ns.tolist(), slices.dur_ns.tolist(), slices.event_row.tolist())
    for code, start_ns, dur_ns, row in zip(*columns, strict=True):
        args = {"cause": causes[code]}
        if row >= 0:
            args |= {n: of[1][of[0][row]] for n, of in texts.items() if of[0][row] >= 0}
        yield names[code], start_ns, dur_ns, args


def _held(clock: ClockSeries) -> Iterator[Slice]:
    columns = (column.tolist() for column in held_clocks(clock))
    for start_ns, end_ns, number in zip(*columns, strict=True):
        cause = HELD_CAUSES[number]
        yield CAUSES[cause].label, start_ns, end_ns - start_ns, {"cause": cause}


def _counters(
    process: _Process, run: Attribution, rank: int, series: Sequence[Series]
) -> Iterator[Event]:
    """Yield telemetry in the windows of a rank; that of the host is with its lowest rank."""
    windows = run.windows.filter(pc.field("rank") == rank)
    low, high = pc.min(windows["start_ns"]).as_py(), pc.max(windows["end_ns"]).as_py()
    lowest = min(run.recording.ranks)
    for one in series if low is not None else ():
        drawn = one.panel in SAMPLED or one.panel.startswith(("Launch queue", *_DRIVER))
        if not drawn or (lowest if one.rank is None else one.rank) != rank:
            continue
        unit, factor = _UNITS.get(one.unit, (one.unit, 1.0))
        suffix = "" if one.label == f"rank {rank}" else f", {one.label}"
        name = f"{one.panel}{suffix}" + (f" [{unit}]" if unit else "")
        inside = (one.time_ns >= low) & (one.time_ns <= high) & np.isfinite(one.value)
        times, values = one.time_ns[inside].tolist(), (one.value[inside] * factor).tolist()
        for time_ns, value in zip(times, values, strict=True):
            yield process.event("C", name, time_ns, args={"value": value})


_DRIVER = ("SM clock, driver", "Memory clock, driver", "Board power, driver")


def _of_tables(process: _Process, run: Attribution, rank: int) -> Iterator[Event]:
    """Yield the host spans, device events and launches that the tables hold."""
    spans = table_of(run, rank, "host_span")
    threads = table_of(run, rank, "thread").to_pylist()
    names = {(t["pid"], t["tid"]): t["thread_name"] for t in threads}
    columns = ("pid", "tid", "category", "name", "start_ns", "dur_ns", "input_dims")
    tracks = []
    for pid, tid, category, name, start_ns, dur_ns, dims in zip(
        *(spans[c].to_pylist() for c in columns), strict=True
    ):
        label = names.get((pid, tid)) or f"thread {tid}"
        args = {} if dims is None else {"Input Dims": dims}
        yield from process.span(label, category, start_ns, dur_ns, name, args)
        tracks.append((label, start_ns))
    if rank not in run.links:
        return
    events, links = table_of(run, rank, "device_event"), run.links[rank]
    columns = ("device_id", "stream_id", "name", "start_ns", "dur_ns", "grid", "block")
    of_links = ("work_class", "launch_row", "phase", "op", "layer")
    lists = [events[c].to_pylist() for c in columns] + [links[c].to_pylist() for c in of_links]
    for row, (device, stream, name, start_ns, dur_ns, *rest) in enumerate(zip(*lists, strict=True)):
        grid, block, work_class, launch, phase, op, layer = rest
        on = "host work" if run.joined[rank].host_only else device_name(device)
        args = {"grid": grid, "block": block, "phase": phase, "op": op, "layer": layer}
        args = {key: value for key, value in args.items() if value is not None}
        label = f"{on}, stream {stream}"
        yield from process.span(label, work_class, start_ns, dur_ns, name, args)
        if launch is not None:
            flow = {"cat": "ac2g", "id": rank << _ID_BITS | row}
            yield process.event("s", "ac2g", tracks[launch][1], tracks[launch][0], **flow)
            yield process.event("f", "ac2g", start_ns, label, bp="e", **flow)
