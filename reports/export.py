"""An attributed run for other tools: its tables and views as Parquet or CSV, or a timeline.

The timeline is Chrome's trace format, which Perfetto opens: host threads and device streams of all
ranks on one axis, and three tracks per rank that the attribution adds: its step windows, what held
the device up in each gap, and on each device event its cause, phase, operator and layer. Readings
of clock, power and temperature are counter tracks. It carries the run as well: every command reads
it in place of the run, with the same attribution.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attributed import Attributed
from chopper.errors import OutputError, RunFormatError, UsageError, csv_text, reason_of
from chopper.ingest import carried
from chopper.storage import parquet
from chopper.storage.destination import written_beside
from chopper.storage.files import encode_json, inside
from chopper.storage.run import ranks_of
from chopper.wording import device_name

Kind = Literal["parquet", "csv", "perfetto"]
KINDS: tuple[str, ...] = get_args(Kind)


def export(
    run: Attributed, kind: Kind, directory: str | Path, *, force: bool = False
) -> list[Path]:
    """Write a run for other tools.

    Args:
        run: the run to write.
        kind: ``parquet`` or ``csv`` (a file per table: of each rank in ``rank-00000/``, of the
            attribution, of all traced steps, at the top, of the views in ``views/``), or
            ``perfetto`` (``trace.json.gz``), with all steps.
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
                _write_timeline(run, fresh / names[-1])
            else:
                for name, table in tables(run):
                    names.append(f"{name}.{kind}")
                    _write(table, fresh / names[-1])
            if not target.exists():
                fresh.replace(target)
            else:
                for name in names:
                    place = inside(target, name)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    (fresh / name).replace(place)
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


def tables(run: Attributed) -> Iterator[tuple[str, pa.Table]]:
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

    whole = run.whole
    yield "ranks", ranks_of(run.recording.manifest)
    for name in ("piece", "window", "gap", "communication", "selection", "cause"):
        yield name, relation(run, name)
    for rank in run.recording.ranks:
        folder = rank_dir_name(rank)
        for declared in (*GROUPS["trace"], *GROUPS["telemetry"], *GROUPS["memory"]):
            table = _table(run, rank, declared.name)
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


def _table(run: Attributed, rank: int, name: str) -> pa.Table:
    """A table of a rank as it was joined, else as it was recorded."""
    joined = getattr(run.joined.get(rank), name, None)
    return run.recording.table(rank, name) if joined is None else joined


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


def _write_timeline(run: Attributed, path: Path) -> None:
    """Chrome's trace format; times are microseconds since the first event, exact to the ns."""
    run = run.whole
    starts = [
        int(start)
        for rank in run.recording.ranks
        for name in ("host_span", "device_event")
        for start in _table(run, rank, name)["start_ns"][:1].to_pylist()
    ]
    zero = min(starts, default=0)
    with gzip.open(path, "wb", compresslevel=3) as file:
        head = {"schemaVersion": 1, "displayTimeUnit": "ns", "baseTimeNanoseconds": zero}
        file.write(encode_json(head)[:-1] + b",")
        file.writelines(carried(run.recording))
        file.write(b',"traceEvents":[')
        separator = b"\n"
        for event in _events(run, zero):
            file.write(separator + encode_json(event))
            separator = b",\n"
        file.write(b"\n]}\n")


def _events(run: Attributed, zero: int) -> Iterator[dict[str, Any]]:
    labels = {r.rank: r.label for r in run.ranks}
    for rank in run.recording.ranks:
        yield _name(rank, 0, "process_name", labels.get(rank, f"rank {rank}"))
        tracks: dict[object, int] = {}
        spans = itertools.chain(_host(run, rank), _device(run, rank), _own_tracks(run, rank))
        for key, label, category, name, start, dur, args in spans:
            if key not in tracks:
                tracks[key] = len(tracks) + 1
                yield _name(rank, tracks[key], "thread_name", label)
            yield {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": rank,
                "tid": tracks[key],
                "ts": (start - zero) / 1e3,
                "dur": dur / 1e3,
                "args": args,
            }
        yield from _counters(run, rank, zero)


def _name(rank: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


_READ = (
    ("device_clock", "sm_clock_hz", "SM clock [MHz]", 1e-6),
    ("device_clock", "power_w", "board power [W]", 1.0),
    ("device_counter", "temperature_c", "temperature [°C]", 1.0),
)
"""Readings of the rank's device that become counter tracks."""


def _counters(run: Attributed, rank: int, zero: int) -> Iterator[dict[str, Any]]:
    """Clock, power and temperature of the rank's device in its windows, one track each."""
    from chopper.analyzers.trace.samples import of_rank

    windows = run.windows.filter(pc.field("rank") == rank)
    low, high = pc.min(windows["start_ns"]).as_py(), pc.max(windows["end_ns"]).as_py()
    for table, column, name, factor in _READ if low is not None else ():
        samples = of_rank(run.recording, rank, table)
        times, values = samples["time_ns"].to_pylist(), samples[column].to_pylist()
        for time_ns, value in zip(times, values, strict=True):
            if value is not None and low <= time_ns <= high:
                yield {
                    "ph": "C",
                    "name": name,
                    "pid": rank,
                    "ts": (time_ns - zero) / 1e3,
                    "args": {"value": value * factor},
                }


_Span = tuple[object, str, str, str, int, int, dict[str, Any]]
"""Key and name of the track; category, name, start, duration and arguments of the event."""


def _own_tracks(run: Attributed, rank: int) -> Iterator[_Span]:
    from chopper.causes import CAUSES

    mine = pc.field("rank") == rank
    for row in run.windows.filter(mine).to_pylist():
        name = "whole trace" if row["number"] is None else f"step {row['number']}"
        start = row["start_ns"]
        yield "steps", "chopper: steps", "step", name, start, row["end_ns"] - start, {}
    for row in run.gaps.filter(mine).to_pylist():
        start, label = row["start_ns"], CAUSES[row["cause"]].label
        args = {"cause": row["cause"], "event_row": row["event_row"]}
        yield "gaps", "chopper: causes of idle", "idle", label, start, row["end_ns"] - start, args


def _host(run: Attributed, rank: int) -> Iterator[_Span]:
    spans = _table(run, rank, "host_span")
    threads = _table(run, rank, "thread").to_pylist()
    names = {(t["pid"], t["tid"]): t["thread_name"] for t in threads}
    columns = ("pid", "tid", "category", "name", "start_ns", "dur_ns", "input_dims")
    rows = zip(*(spans[c].to_pylist() for c in columns), strict=True)
    for pid, tid, category, name, start, dur, dims in rows:
        label = names.get((pid, tid)) or f"thread {tid}"
        args = {} if dims is None else {"Input Dims": dims}
        yield ("host", pid, tid), label, category, name, start, dur, args


def _device(run: Attributed, rank: int) -> Iterator[_Span]:
    if rank not in run.links:
        return
    events, links = _table(run, rank, "device_event"), run.links[rank]
    # Pieces with most time come last, so that each event keeps its largest cause.
    pieces = run.pieces.filter(pc.field("rank") == rank).sort_by("time_ns")
    pairs = zip(pieces["event_row"].to_pylist(), pieces["cause"].to_pylist(), strict=True)
    largest = {row: cause for row, cause in pairs if not cause.startswith("idle")}
    columns = ("device_id", "stream_id", "name", "start_ns", "dur_ns")
    of_links = ("work_class", "phase", "op", "layer")
    lists = [events[c].to_pylist() for c in columns] + [links[c].to_pylist() for c in of_links]
    for i, (device, stream, name, start, dur, *own) in enumerate(zip(*lists, strict=True)):
        on = "host work" if run.joined[rank].host_only else device_name(device)
        # What another kernel hid, or lies outside of the windows, cost no time of its own.
        args = dict(zip(of_links[1:], own[1:], strict=True)) | {"cause": largest.get(i)}
        yield (device, stream), f"{on}, stream {stream}", own[0], name, start, dur, args
