"""An attributed run for other tools: its tables and views as Parquet or CSV, or a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.errors import OutputError, RunFormatError, UsageError, csv_text, reason_of
from chopper.reports.perfetto import table_of, write_timeline
from chopper.storage import parquet
from chopper.storage.destination import written_beside
from chopper.storage.files import inside
from chopper.storage.run import ranks_of

Kind = Literal["parquet", "csv", "perfetto"]
KINDS: tuple[str, ...] = get_args(Kind)


def export(
    run: Attribution, kind: Kind, directory: str | Path, *, force: bool = False
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
                write_timeline(run, fresh / names[-1])
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
    yield "ranks", ranks_of(run.recording.manifest)
    for name in ("piece", "window", "gap", "communication", "selection", "cause"):
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
