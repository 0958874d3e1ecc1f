from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.errors import OutputError, csv_text
from chopper.reports.export import export, tables
from chopper.views import VIEWS, view
from tests.kineto_writer import small_trace
from tests.reports.make import Shape, make

EXACT = make(Shape(ranks=2, steps=2, layers=2, hostile=True))


def _read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


def test_parquet_holds_every_table_and_view_as_it_is(tmp_path: Path) -> None:
    written = export(EXACT, "parquet", tmp_path / "out")
    found = {str(p.relative_to(tmp_path / "out")).removesuffix(".parquet"): p for p in written}
    assert set(found) == {name for name, _ in tables(EXACT)}
    assert {n.removeprefix("views/") for n in found if n.startswith("views/")} == {
        n for n in VIEWS if view(EXACT, n).num_rows
    }
    for name, table in tables(EXACT):
        read = pq.read_table(found[name])
        assert read.to_pylist() == table.to_pylist(), name
        assert read.schema.metadata[b"chopper.table"].decode() == name.rpartition("/")[2]


def test_csv_holds_all_rows_whatever_the_names(tmp_path: Path) -> None:
    export(EXACT, "csv", tmp_path)
    rows = _read(tmp_path / "piece.csv")
    assert sum(int(r["time_ns"]) for r in rows) == EXACT.observed_ns
    kernels = _read(tmp_path / "views" / "kernels.csv")
    names = view(EXACT, "kernels")["kernel"].to_pylist()
    assert [r["kernel"] for r in kernels] == [csv_text(name) for name in names]


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(OutputError, match="holds files"):
        export(EXACT, "csv", tmp_path)
    export(EXACT, "csv", tmp_path, force=True)
    assert (tmp_path / "mine.txt").read_text() == "kept"
    with pytest.raises(OutputError, match="is a file"):
        export(EXACT, "csv", tmp_path / "mine.txt", force=True)


def test_the_command_needs_a_kind() -> None:
    assert CliRunner().invoke(cli, ["export", "run"]).exit_code == 2
    assert CliRunner().invoke(cli, ["export", "run", "--to", "xlsx", "-o", "x"]).exit_code == 2


def test_a_place_is_made_up_of_the_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "my run.pt.trace.json.gz"
    trace.write_bytes(small_trace().encode_gzip())
    done = CliRunner().invoke(cli, ["export", str(trace), "--to", "csv"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "myrun-csv" / "piece.csv").is_file()
