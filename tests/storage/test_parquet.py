"""Tables of ranks as Parquet files: one dataset for every reader, and for SQL in bounded memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chopper import reports
from chopper.api import query
from chopper.engines import Engine, Serial
from chopper.engines.processes import Processes
from chopper.errors import InputError, OutputError
from chopper.ingest import write_run
from chopper.pipeline import attribute
from chopper.pipeline import read as load
from chopper.storage import manifest, parquet
from chopper.storage.files import write_atomic
from chopper.storage.layout import MANIFEST, rank_dir_name
from chopper.tables import TABLES
from chopper.views import VIEWS, view
from tests.bad_input.make import without_tables
from tests.command import run

OWN = Path(__file__).resolve().parents[1] / "golden" / "own"
TRACES = sorted((OWN / "model-cuda").glob("rank-*/trace.json.gz"))
TOTALS = "SELECT rank, name, count(*) AS n, sum(dur_ns) AS ns FROM {} GROUP BY ALL ORDER BY ALL"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("imported") / "run"
    directory.mkdir()
    write_run(TRACES, directory)
    return directory


def test_every_reader_takes_the_files_of_all_ranks_as_one_table(imported: Path) -> None:
    files = f"{imported}/rank-*/device_event.parquet"
    expected = query(load(TRACES), TOTALS.format("device_event")).arrow().to_pylist()
    assert {row["rank"] for row in expected} == {0, 1}
    for options in ("", ", union_by_name = true", ", hive_partitioning = true"):
        with duckdb.connect() as connection:
            found = connection.sql(TOTALS.format(f"read_parquet('{files}'{options})")).fetchall()
        assert found == [tuple(row.values()) for row in expected]
    totals = (
        pl.scan_parquet(files).group_by("rank", "name").agg(n=pl.len(), ns=pl.col("dur_ns").sum())
    )
    assert totals.sort("rank", "name").collect().to_dicts() == expected
    frame = pd.concat(map(pd.read_parquet, sorted(imported.glob("rank-*/device_event.parquet"))))
    sums = frame.groupby(["rank", "name"])["dur_ns"].agg(["size", "sum"]).reset_index()
    assert [tuple(row) for row in sums.itertuples(index=False)] == [
        tuple(row.values()) for row in expected
    ]


def test_the_schema_is_the_declared_one_in_every_rank(imported: Path) -> None:
    written = sorted(imported.glob("rank-*/*.parquet"))
    assert {file.stem for file in written} >= {"host_span", "device_event", "step"}
    for file in written:
        found = pq.read_schema(file)
        assert found.equals(parquet.schema_of(file.stem), check_metadata=True), file
        assert not any(pa.types.is_dictionary(field.type) for field in found)


def test_tables_are_read_as_they_were(imported: Path) -> None:
    recorded = load(imported)
    for rank in recorded.ranks:
        for name, file in parquet.files(imported / rank_dir_name(rank)).items():
            again = parquet.read(file, name)
            assert again.schema == TABLES[name].arrow
            assert again.to_pylist() == recorded.table(rank, name).to_pylist()


def test_sql_reads_the_files_and_no_trace(imported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(imported, copy)
    for trace in copy.glob("rank-*/trace*"):
        trace.write_bytes(b"")
    for name in ("device_event", "host_span", "step"):
        sql = f"SELECT * FROM {name} ORDER BY rank, row"
        assert query(copy, sql).arrow().to_pylist() == query(load(TRACES), sql).arrow().to_pylist()
    assert query(copy, "FROM memory_event").arrow().num_rows == 0


@pytest.mark.parametrize("engine", [Serial, lambda: Processes(2)])
def test_an_analysis_reads_the_files_and_no_trace(
    imported: Path, tmp_path: Path, engine: Callable[[], Engine]
) -> None:
    of_traces, of_files = (shutil.copytree(imported, tmp_path / n / "run") for n in ("a", "b"))
    without_tables(of_traces)
    for trace in of_files.glob("rank-*/trace*"):
        trace.unlink()
    whole = attribute(of_traces)
    with engine() as used:
        run = attribute(of_files, engine=used)
        for name in VIEWS:
            assert view(run, name).equals(view(whole, name)), name
    said = [{**reports.document(r), "run": ""} for r in (run, whole)]
    assert said[0] == said[1]
    assert run.pieces.equals(whole.pieces)


def test_a_run_without_files_is_read_from_its_traces(imported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "older"
    shutil.copytree(imported, copy)
    for file in copy.glob("rank-00001/*.parquet"):
        file.unlink()  # one rank of an older run, one of today's
    sql = TOTALS.format("host_span")
    assert query(copy, sql).arrow().to_pylist() == query(imported, sql).arrow().to_pylist()


def test_a_damaged_file_is_named_with_the_remedy(imported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(imported, copy)
    file = copy / "rank-00001" / "device_event.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    outcome = run("query", copy, "SELECT count(*) AS n FROM device_event")
    assert outcome.code == 1
    assert "device_event.parquet: damaged" in outcome.line
    assert "delete the *.parquet files of rank-00001" in outcome.line
    assert run("query", copy, "SELECT count(*) AS n FROM step").code == 0
    assert run("analyze", copy).line == outcome.line
    with pytest.raises(InputError, match="damaged"):
        parquet.read(file, "device_event")
    file.unlink()
    with pytest.raises(InputError, match=r"device_event\.parquet: missing; delete the"):
        parquet.read(file, "device_event")
    whole = (imported / "rank-00001" / file.name).read_bytes()
    file.write_bytes(whole[:200] + bytes(200) + whole[400:])  # within a page
    line = run("analyze", copy).line
    assert "device_event.parquet: damaged" in line
    assert "delete the *.parquet files of rank-00001" in line
    without_tables(copy)
    assert attribute(copy).observed_ns == attribute(imported).observed_ns


def test_a_file_that_cannot_be_written_is_not_there(tmp_path: Path) -> None:
    table = parquet.numbered(TABLES["step"].empty(), "step", 0)
    with pytest.raises(OutputError, match="cannot be written"):
        parquet.write(table, tmp_path / "none" / "step.parquet")
    (tmp_path / "step.parquet").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        parquet.write(table, tmp_path / "step.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["step.parquet"]


def test_a_row_keeps_the_rank_that_it_names(tmp_path: Path) -> None:
    declared = TABLES["process"]
    values = {column.name: [1, 2] for column in declared.columns}
    (tmp_path / rank_dir_name(0)).mkdir(parents=True)
    _rank(tmp_path, 0, {"process": declared.of({**values, "rank": [4, 5]})})
    assert query(tmp_path, "SELECT row, pid FROM process WHERE rank = 5").arrow().to_pylist() == [
        {"row": 1, "pid": 2}
    ]


@pytest.mark.long
def test_memory_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """200 ranks, whose rows take 800 MB, are summed up in 300 MB more than one rank takes.

    It takes 110 to 130 MB; how soon allocators give back what is free is up to a busy machine.
    """
    rows, schema = 40_000, TABLES["device_event"].arrow
    number = np.arange(rows)
    columns = {field.name: pa.nulls(rows, field.type) for field in schema} | {
        "start_ns": pa.array(number * 1000),
        "dur_ns": pa.array(number % 977),
        "device_id": pa.array(np.zeros(rows, np.int32)),
        "stream_id": pa.array(number % 3),
        "kind": pa.array(["kernel"] * rows).dictionary_encode(),
        "name": pa.array([f"kernel_{n % 50}" for n in range(rows)]).dictionary_encode(),
    }
    table = TABLES["device_event"].of(columns)
    for rank in range(200):
        _rank(tmp_path, rank, {"device_event": table})
    program = f"""
import resource
from chopper.sql import Query
from pathlib import Path

def query(sql):
    with Query({str(tmp_path)!r}, sql, 80_000_000) as statement:
        statement.plan()
        statement.read()
        return [row for batch in statement.batches()[1] for row in batch.to_pylist()]

query("SELECT name, sum(dur_ns) AS ns FROM device_event WHERE rank = 0 GROUP BY 1")
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
held = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 300_000_000, resource.RLIM_INFINITY))
assert query("SELECT count(*) AS n FROM device_event") == [{{"n": 200 * {rows}}}]
top = query("SELECT name, sum(dur_ns) AS ns FROM device_event GROUP BY 1 ORDER BY 2 DESC LIMIT 3")
assert len(top) == 3, top
assert len(query("FROM device_event WHERE rank = 199 AND dur_ns = 976 AND row < 2000")) == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def _rank(run: Path, rank: int, tables: dict[str, pa.Table]) -> None:
    """Add a rank with tables to a run directory."""
    folder = run / rank_dir_name(rank)
    folder.mkdir(exist_ok=True)
    part = manifest.RankManifest(rank=rank, status="imported")
    write_atomic(folder / MANIFEST, manifest.encode(part))
    with parquet.TablesWriter(folder, rank) as writer:
        for name, table in tables.items():
            writer.write(name, table)


def test_a_column_that_a_file_lacks_is_unknown_or_one_line(imported: Path, tmp_path: Path) -> None:
    (first, *_) = sorted(imported.glob("rank-*/device_event.parquet"))
    whole = parquet.read(first, "device_event")
    file = tmp_path / "device_event.parquet"
    filed = parquet.numbered(whole, "device_event", 0)
    filed = filed.cast(parquet.schema_of("device_event"))
    pq.write_table(filed.drop_columns(["grid"]), file)
    table = parquet.read(file, "device_event")
    assert table["grid"].null_count == whole.num_rows
    assert table.drop_columns(["grid"]).equals(whole.drop_columns(["grid"]))
    pq.write_table(filed.drop_columns(["name"]), file)
    with pytest.raises(InputError, match=r"device_event\.parquet: damaged \(.*name"):
        parquet.read(file, "device_event")
    file.unlink()
    with pytest.raises(InputError, match=r"device_event\.parquet: missing; delete the"):
        parquet.read(file, "device_event")


def _with(column: str, make: Callable[[pa.ChunkedArray], object]) -> Callable[[pa.Table], pa.Table]:
    """Return what replaces a column of a table."""

    def change(table: pa.Table) -> pa.Table:
        return table.set_column(
            table.column_names.index(column), column, pa.chunked_array([make(table[column])])
        )

    return change


def _not_utf8(values: pa.ChunkedArray) -> pa.Array:
    bad = pa.array([b"\xff\xfe"] * len(values))
    return pa.StringArray.from_buffers(len(values), *bad.buffers()[1:])


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("device_event", lambda t: t.drop_columns("dur_ns"), "column dur_ns is missing"),
        ("device_event", _with("name", lambda v: pa.array([7] * len(v))), "column name is int64"),
        (
            "device_event",
            _with("name", lambda v: pa.array([["x"]] * len(v))),
            "column name is list",
        ),
        (
            "device_event",
            _with("name", lambda v: pa.array([{"x": 1}] * len(v))),
            "column name is struct",
        ),
        ("device_event", _with("name", _not_utf8), "UTF8"),
        (
            "device_event",
            _with("row", lambda v: v.combine_chunks()[::-1]),
            "row does not count the rows",
        ),
        (
            "device_event",
            _with("start_ns", lambda v: v.combine_chunks()[::-1]),
            "not in the order of start_ns",
        ),
        (
            "device_event",
            _with("dur_ns", lambda v: pa.array([2**63 - 1] * len(v))),
            "dur_ns holds 92233720",
        ),
        ("device_event", _with("dur_ns", lambda v: pa.array([-1] * len(v))), "dur_ns holds -1"),
        (
            "device_event",
            _with("dur_ns", lambda v: pa.array([2**61] * len(v))),
            "more than four years",
        ),
        ("step", _with("end_ns", lambda v: pa.array([0] * len(v))), "ends before it starts"),
        (
            "step",
            _with("number", lambda v: pa.array([-(2**63)] * len(v))),
            "number holds one beyond",
        ),
        ("step", lambda t: t.append_column("source", t["source"]), "a column occurs twice"),
    ],
)
def test_sql_refuses_the_tables_that_an_analysis_refuses(
    name: str, change: Callable[[pa.Table], pa.Table], said: str, imported: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(imported, tmp_path / "run")
    file = copy / "rank-00000" / f"{name}.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    outcome = run("query", copy, f"FROM {name}")
    assert outcome.code == 1
    assert f"{name}.parquet: damaged" in outcome.line
    assert said in outcome.line
    assert run("analyze", copy).line == outcome.line
