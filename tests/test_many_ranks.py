"""Runs of many ranks: every engine gives the same answer, whichever ranks are looked at closely."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chopper
from benchmarks._ranks import write_ranks
from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.totals import detail_ranks
from chopper.engines import Serial, lost
from chopper.engines.processes import Processes
from chopper.errors import InputError, UsageError
from chopper.reports import render
from chopper.views import VIEWS, view
from tests import command

RANKS = 5


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    write_ranks(directory, RANKS, 800)
    return directory


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2, "a test") as engine:
        yield engine


def document(run: Attribution) -> str:
    assert isinstance(run, Attribution)
    return json.dumps(reports.document(run), sort_keys=True)


def test_every_engine_and_order_of_files_gives_the_same_answer(
    traces: Path, processes: Processes
) -> None:
    files = sorted(traces.iterdir())
    serial = pipeline.attribute(pipeline.read(files, engine=Serial()), engine=Serial())
    backwards = replace(pipeline.read(files[::-1], engine=processes), source=serial.source)
    apart = pipeline.attribute(backwards, engine=processes)
    assert document(serial) == document(apart)
    assert apart.pieces.equals(serial.pieces)
    assert [*apart.joined] == [*range(RANKS)]
    for name in VIEWS:
        assert view(apart, name).equals(view(serial, name)), name


def test_a_run_directory_is_read_by_every_engine_alike(
    traces: Path, processes: Processes, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    command.run("import", str(traces), "-o", str(directory))
    serial, apart = (
        pipeline.attribute(str(directory), engine=engine) for engine in (Serial(), processes)
    )
    assert document(serial) == document(apart)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every run one that is too large to look at all ranks closely."""
    monkeypatch.setattr(pipeline, "MOST_ROWS", 0)


@pytest.mark.usefixtures("large")
def test_causes_of_a_large_run_are_those_of_all_ranks(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = pipeline.attribute(str(traces), ranks=[1, 3])
    monkeypatch.setattr(pipeline, "MOST_ROWS", 10**9)
    every = pipeline.attribute(str(traces))
    assert some.cause_rows == every.cause_rows
    assert some.step == every.step
    assert some.ranks == every.ranks
    assert some.by("kernel") == every.by("kernel")
    assert view(some, "outlier_ranks").equals(view(every, "outlier_ranks"))
    assert [*some.joined] == [1, 3] == [rank.rank for rank in some.detail.ranks]
    [said] = [f for f in some.findings if f.code == "run.some_closely"]
    assert "2 of 5 ranks (1,3)" in said.message
    assert sum(p for p in some.detail.pieces["time_ns"].to_pylist()) == (some.detail.observed_ns)


@pytest.mark.usefixtures("large")
def test_everything_can_be_asked_of_a_large_run(traces: Path, tmp_path: Path) -> None:
    from chopper.reports import export

    run = pipeline.attribute(str(traces), ranks=[0, 2])
    for name in VIEWS:
        view(run, name)
    for format in ("html", "md", "txt", "json"):
        assert render(run, format)
    assert chopper.whatif(run, fix="launch_gaps").to_dict()["schema"]
    other = pipeline.attribute(str(traces), ranks=[0, 2])
    assert chopper.compare(run, other).to_dict()["schema"]
    paths = {path for path, _ in export.tables(run)}
    assert {"rank-00000/event_link", "rank-00001/host_span", "views/outlier_ranks"} <= paths
    assert "rank-00001/event_link" not in paths
    with pytest.raises(UsageError, match="no rank 9: it has 0-4"):
        pipeline.attribute(str(traces), ranks=[9])


def test_the_same_ranks_of_two_large_runs_are_compared(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(traces.iterdir())
    every = pipeline.attribute(files)
    monkeypatch.setattr(pipeline, "MOST_ROWS", 0)
    a = pipeline.attribute(files, ranks=[0, 3, 4])
    b = pipeline.attribute(files[:4], ranks=[1, 2])  # rank 4 is not in it
    found = chopper.compare(a, b)
    assert [[r.rank for r in run.ranks] for run in found.runs] == [[0, 1, 2, 3]] * 2
    assert found.notes[0] == (
        "compared are 4 of 5 ranks (0-3) in A, 4 of 4 ranks (0-3) in B; --ranks chooses others"
    )
    # As if they had been chosen at once.
    chosen = pipeline.attribute(files, ranks=[0, 1, 2, 3]).detail
    assert chosen is not None
    assert found.runs[0].pieces.equals(chosen.pieces)
    assert found.runs[0].cause_rows == chosen.cause_rows
    assert found.runs[0].findings == chosen.findings
    # Of a run with all its ranks, those that the other's were chosen from.
    assert [len(run.ranks) for run in chopper.compare(every, b).runs] == [2, 2]
    shown = command.run("compare", str(traces), str(traces), "--ranks", "1,3", "--json")
    assert "2 of 5 ranks (1,3) in A, 2 of 5 ranks (1,3) in B" in json.loads(shown.out)["notes"][0]
    # Before anything is read.
    line = command.run("analyze", "nothing.json", "--ranks", "3-1").line
    assert line.startswith("chopper: --ranks '3-1': not a list of whole numbers")
    line = command.run("compare", str(traces), str(files[0]), "--ranks", "1,3").line
    assert line == f"chopper: {files[0]}: no rank 1,3: it has 0"


class WithoutMemory(Serial):
    """An engine whose workers have no memory for any join."""

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        for result in super().map(function, calls, label=label):
            yield result if label == "read" else lost(MemoryError(), 256_000_000)


def test_where_every_rank_is_lost_one_line_says_why(traces: Path) -> None:
    with pytest.raises(InputError) as refused:
        pipeline.attribute(str(traces), engine=WithoutMemory())
    assert str(refused.value) == (
        f"{traces}: no rank can be attributed (rank 0 omitted: it takes more than --memory "
        "256 MB: raise it)"
    )


def test_ranks_that_differ_are_looked_at_first() -> None:
    from benchmarks import _synthetic

    run = pipeline.attribute(_synthetic.run(800, 6))
    causes = run.totals.causes
    chosen = detail_ranks(causes, dict.fromkeys(range(6), 100_000))
    by_time = sorted(run.by("rank"), key=lambda group: group.time_ns)
    assert {by_time[0].key, by_time[-1].key} <= {*chosen}
    assert len(chosen) == 4  # as many as four hundred thousand rows are
    assert detail_ranks(causes, dict.fromkeys(range(6), 10**9)) == [by_time[-1].key]
