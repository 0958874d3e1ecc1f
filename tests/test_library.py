"""The library as a user of frames sees it: names, tables, one line for what is wrong."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import chopper
from chopper.causes import LEVELS
from chopper.errors import csv_text
from chopper.storage.manifest import DIMENSIONS
from chopper.tables.frames import Table
from tests import command
from tests.reports.make import HOSTILE

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "tests" / "golden" / "own"
RECORDINGS = ["fsdp2", "model-cuda", "h100-lead", "loading"]
VIEWS = ("kernels", "operations", "steps", "stragglers")
KNOWN = [level for level in LEVELS if level not in DIMENSIONS]
"""Of recordings that tell no dimension of parallelism."""


@pytest.fixture(scope="module")
def run() -> chopper.Run:
    return chopper.load(OWN / "fsdp2")


def test_at_most_fifteen_names_are_public() -> None:
    assert len(chopper.__all__) <= 15


@pytest.mark.parametrize("recording", RECORDINGS)
def test_frames_csv_and_json_have_the_same_columns_and_values(
    recording: str, tmp_path: Path
) -> None:
    source = OWN / recording
    attribution = chopper.load(source).attribution
    document = json.loads(command.run("analyze", source, "--json", "--by", "layer").out)
    exported = tmp_path / "csv"
    assert command.run("export", source, "--to", "csv", "-o", exported).code == 0
    same(attribution.causes, document["causes"])
    same(attribution.ranks, document["ranks"])
    same(attribution.actions, document["actions"] or [])
    same(attribution.findings, document["quality"])
    same(attribution.by("layer"), document["groups"])
    printed = command.run("analyze", source, "--csv").out
    assert in_csv(attribution.causes) == [*csv.reader(io.StringIO(printed))]
    tables = {f"summary/{n}": getattr(attribution, n) for n in ("causes", "ranks", "actions")}
    tables |= {f"summary/by_{n}": attribution.by(n) for n in KNOWN if n != "cause"}
    tables |= {f"views/{name}": attribution.view(name) for name in VIEWS}
    for name, table in tables.items():
        file = exported / f"{name}.csv"
        assert file.is_file() == bool(len(table)), name
        if len(table):
            with file.open(encoding="utf-8", newline="") as text:
                assert numbers(csv.reader(text)) == numbers(in_csv(table)), name
    for name in VIEWS:
        printed = command.run("analyze", source, "--view", name, "--json").out
        same(attribution.view(name), json.loads(printed)["rows"])


def same(table: Table, rows: list[dict[str, Any]]) -> None:
    """The rows of JSON hold those of a table; more members may stand beside them."""
    assert [{name: row[name] for name in table.columns} for row in rows] == [*table]


def in_csv(table: Table) -> list[list[str]]:
    return [[*table.columns], *([cell(v) for v in row.values()] for row in table)]


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return csv_text(value) if isinstance(value, str) else str(value)


def numbers(rows: Any) -> list[list[object]]:
    """Cells as they read: 0.1 and 1E-1 are the same."""
    return [[as_number(text) for text in row] for row in rows]


def as_number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("recording", RECORDINGS)
def test_every_table_sums_to_the_step(recording: str) -> None:
    attribution = chopper.load(OWN / recording).attribution
    causes = attribution.causes.df()
    leaves = causes[causes["is_leaf"]]
    assert leaves["time_ns"].sum() == attribution.observed_ns
    for parent, children in causes.groupby("parent"):
        (above,) = causes.loc[causes["id"] == parent, "step_ns"]
        assert above == children["step_ns"].sum()
    for level in KNOWN:
        frame = attribution.by(level).df()
        assert frame["time_ns"].sum() == attribution.observed_ns
        if level not in ("step", "rank"):
            assert frame["step_ns"].sum() == leaves["step_ns"].sum()
        if level != "cause":
            parts = frame[[f"{cause}_ns" for cause in leaves["id"]]]
            assert (parts.sum(axis=1) == frame["step_ns"]).all()


@pytest.mark.parametrize("name", ["piece", "gap", "host_span", "event_link", "window", "step"])
def test_ranks_and_steps_of_a_table_are_its_rows_there(name: str, run: chopper.Run) -> None:
    every, part = run.scan(name).df(), run.scan(name, ranks=[1], steps=[4, 6]).df()
    windows = run.scan("window", ranks=[1], steps=[4, 6])
    if "step_index" in every:
        within = every["step_index"].isin([w["step_index"] for w in windows])
    else:
        starts = [every["start_ns"].between(w["start_ns"], w["end_ns"] - 1) for w in windows]
        within = starts[0] | starts[1]
    expected = every[within & (every["rank"] == 1)].reset_index(drop=True)
    assert len(windows) == 2
    assert 0 < len(part) < len(every)
    pd.testing.assert_frame_equal(part, expected)


def test_a_table_is_the_same_in_pandas_polars_arrow_and_duckdb(run: chopper.Run) -> None:
    table = run.view("kernels")
    frame, polars, arrow = table.df(), table.pl(), table.arrow()
    assert isinstance(frame, pd.DataFrame)
    assert isinstance(polars, pl.DataFrame)
    assert isinstance(arrow, pa.Table)
    assert [*frame] == polars.columns == arrow.column_names == [*table.columns]
    assert polars.to_dicts() == arrow.to_pylist() == [*table]
    assert len(table) == len(frame) == len(polars) == arrow.num_rows
    total = sum(row["time_ns"] for row in table)
    with duckdb.connect() as connection:
        connection.register("kernels", table)
        assert connection.sql("SELECT sum(time_ns) FROM kernels").fetchall() == [(total,)]
    assert all(meaning for meaning in table.columns.values())


def test_nanoseconds_since_1970_stay_whole_beside_nulls() -> None:
    times = [1_795_000_000_000_000_123, None]
    flags = [None, True]
    rows = pa.table({"time_ns": pa.array(times, pa.int64()), "traced": pa.array(flags, pa.bool_())})
    frame = Table(rows, "made").df()
    assert frame["time_ns"].dtype == "Int64"
    assert frame["time_ns"][0] == times[0]
    assert frame["traced"].isna().tolist() == [True, False]


def test_a_notebook_shows_names_of_a_trace_as_text() -> None:
    rows = pa.table({"kernel": HOSTILE, "time_ns": [*range(len(HOSTILE))]})
    shown = Table(rows, HOSTILE[0])._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown
    assert "\x1b" not in shown + str(Table(rows, "made"))


def test_what_has_no_rows_says_why() -> None:
    attribution = chopper.load(OWN / "model-cuda").attribution
    empty = attribution.view("memory_steps")
    assert len(empty) == 0
    assert empty.reason
    assert str(empty) == f"No rows: {empty.reason}."


WRONG: dict[str, tuple[Callable[[chopper.Run], object], str]] = {
    "view": (lambda run: run.view("kernal"), "no view is called 'kernal'; did you mean kernels"),
    "level": (
        lambda run: run.attribution.by("layers"),
        "no level is called 'layers'; did you mean layer?",
    ),
    "level's type": (
        lambda run: run.attribution.by(3),  # type: ignore[arg-type]
        "level is 3 (int), expected the name of one: cause, step, phase …",
    ),
    "table": (lambda run: run.scan("steps"), "no table is called 'steps'; did you mean step"),
    "a table's rank": (
        lambda run: run.scan("step", ranks=[7]),
        "no rank 7 is in the run: it has 0-1",
    ),
    "a table's step": (
        lambda run: run.scan("piece", steps=[99]),
        "no step 99 was traced: it has 3-6",
    ),
    "a table without times": (
        lambda run: run.scan("thread", steps=[3]),
        "table 'thread' has no steps; leave out steps=",
    ),
    "run": (
        lambda run: chopper.load(3),  # type: ignore[arg-type]
        "a run is 3 (int), expected a path, a glob or a list of them: chopper.load(",
    ),
    "path": (lambda run: chopper.load("nothing-here"), "nothing-here: no such file or directory"),
    "device": (lambda run: chopper.load(OWN / "fsdp2", device="h10"), "did you mean h100-sxm"),
    "ranks": (
        lambda run: chopper.attribute(run, ranks="all"),  # type: ignore[arg-type]
        "ranks is 'all' (str), expected a list of numbers: ranks=[0, 1]",
    ),
    "a rank": (lambda run: chopper.attribute(run, ranks=[7]), "no rank 7: it has 0-1"),
    "a rank's type": (
        lambda run: chopper.attribute(run, ranks=[1.5]),  # type: ignore[list-item]
        "ranks has 1.5 (float), expected whole numbers: ranks=[0, 1]",
    ),
    "steps": (lambda run: chopper.attribute(run, steps=[99]), "no step 99 was traced: it has 3-6"),
    "timeline's rank": (lambda run: run.attribution.timeline(rank=9), "no timeline of rank 9"),
    "timeline's step": (
        lambda run: run.attribution.timeline(step=77),
        "no timeline of step 77 of rank 0: it has 3-6",
    ),
    "statement": (
        lambda run: run.query(3),  # type: ignore[arg-type]
        "sql is 3 (int), expected text: sql='FROM step'",
    ),
    "SQL": (lambda run: run.query("selec 1"), "syntax error at or near"),
    "fix": (lambda run: chopper.whatif(run, fix="stragler"), "did you mean straggler"),
    "clock": (
        lambda run: chopper.whatif(run, clock=5),  # type: ignore[arg-type]
        "clock is 5 (int), expected text: clock='1980MHz'",
    ),
    "report": (lambda run: chopper.report(run, "x.pdf"), "x.pdf: extension '.pdf'; the format"),
    "other run": (
        lambda run: chopper.compare(run, None),  # type: ignore[arg-type]
        "a run is None (NoneType), expected a path",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_one_line(wrong: str, run: chopper.Run) -> None:
    call, said = WRONG[wrong]
    with pytest.raises(chopper.ChopperError) as raised:
        call(run)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
