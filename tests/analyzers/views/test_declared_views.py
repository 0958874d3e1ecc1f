"""Views declare themselves, and are found by listing their folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chopper.analyzers.views import SECTIONS
from chopper.api import attribute, query
from chopper.views import VIEWS
from tests.command import run
from tests.golden.own import OWN
from tests.kineto_writer import small_trace

ADDED = '''"""A view of a user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.analyzers.views import Rows, view

if TYPE_CHECKING:
    from chopper.analyzers.attribution import Attribution


@view
def event_counts(run: Attribution) -> Rows:
    """How many device events each rank ran.

    title: Event counts
    section: Operators
    needs: nothing ran on the device
    columns:
      rank, int32: Rank.
      event_count: Device events of the rank.
    """
    return [{"rank": r, "event_count": t.num_rows} for r, t in run.links.items()]
'''


QUERY = """-- How many device events each stream ran.
--
-- section: Operators
-- columns:
--   stream_id, int64: Stream.
--   event_count: Device events of the stream,
--     over all ranks.
SELECT stream_id, count(*) AS event_count FROM step_event GROUP BY stream_id ORDER BY stream_id
"""


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_view_declares_its_columns(name: str) -> None:
    view = VIEWS[name]
    assert view.name == name
    assert view.section in SECTIONS
    assert view.summary.endswith(".")
    assert all(column.doc.endswith(".") for column in view.columns)
    names = [column.name for column in view.columns]
    assert len(names) == len(set(names))


def _with_folder(folder: Path, *arguments: str) -> str:
    """What the command prints where the folder of views reaches into another one."""
    code = (
        "import sys\n"
        "import chopper.analyzers.views as views\n"
        f"views.__path__.append({str(folder)!r})\n"
        "from chopper.cli import main\n"
        f"sys.argv = ['chopper', *{list(arguments)!r}]\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_a_function_of_a_file_in_the_folder_is_a_view(tmp_path: Path) -> None:
    (tmp_path / "event_counts.py").write_text(ADDED)
    trace = tmp_path / "trace.json"
    trace.write_bytes(small_trace().encode())
    listed = _with_folder(tmp_path, "analyze", "--view", "list")
    assert "How many device events each rank ran." in listed
    shown = _with_folder(tmp_path, "analyze", str(trace), "--view", "event_counts", "--csv")
    assert shown.splitlines()[0] == "rank,event_count"
    assert int(shown.splitlines()[1].split(",")[1]) > 0
    assert "Device events of the rank." in _with_folder(tmp_path, "schema", "event_counts")
    assert "event_counts" in _with_folder(tmp_path, "schema")


def test_an_sql_file_in_the_folder_is_a_view(tmp_path: Path) -> None:
    (tmp_path / "streams.sql").write_text(QUERY)
    trace = tmp_path / "trace.json"
    trace.write_bytes(small_trace().encode())
    assert "How many device events each stream ran." in _with_folder(
        tmp_path, "analyze", "--view", "list"
    )
    shown = _with_folder(tmp_path, "analyze", str(trace), "--view", "streams", "--csv")
    assert shown.splitlines()[0] == "stream_id,event_count"
    described = " ".join(_with_folder(tmp_path, "schema", "streams").split())
    assert "Device events of the stream, over all ranks." in described


def test_a_file_of_the_user_is_a_view_with_or_without_its_comment(tmp_path: Path) -> None:
    own, trace = tmp_path / "own.sql", tmp_path / "trace.json"
    trace.write_bytes(small_trace().encode())
    printed = []
    for text in (QUERY, QUERY[QUERY.index("SELECT") :]):
        own.write_text(text)
        printed.append(run("analyze", trace, "--view", own, "--csv").out)
        assert "stream ID  events" in run("analyze", trace, "--view", own).out
    assert printed[0] == printed[1]
    assert printed[0].startswith("stream_id,event_count\n")
    assert json.loads(run("analyze", trace, "--view", own, "--json").out)["rows"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("SELECT nope\nFROM step_event", "own.sql, line 1, column 8: Referenced column"),
        ("DROP TABLE piece", "own.sql: found DROP, expected one statement that reads"),
        ("-- columns:\n--   a, int63: A.\nSELECT 1 AS a", "own.sql, line 2: type 'int63' unknown"),
        ("-- columns:\n--   a is b\nSELECT 1 AS a", "own.sql, line 2: found '  a is b', expected"),
        ("-- section: Mine\nSELECT 1 AS a", "own.sql: section 'Mine' unknown: one of Operators"),
        (
            "-- columns:\n--   b, int64: B.\nSELECT 1 AS a",
            "own.sql: declares the column b, and its query returns a:",
        ),
        (
            "-- columns:\n--   a_ns: A.\nSELECT 1.5 AS a_ns",
            "own.sql: column a_ns is no int64: Float value 1.500000 was truncated",
        ),
        ("FROM read_csv('/etc/passwd')", "own.sql, line 1, column 6: Cannot access file"),
    ],
)
def test_an_error_of_a_users_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    own = tmp_path / "own.sql"
    own.write_text(text)
    outcome = run("analyze", OWN / "model-cuda", "--view", own)
    assert outcome.code in (1, 2, 3, 4)
    assert line in outcome.err.splitlines()[-1]
    missing = run("analyze", OWN / "model-cuda", "--view", tmp_path / "none.sql")
    assert "none.sql: cannot be read" in missing.line


def test_events_of_the_steps_are_those_that_the_selection_joins() -> None:
    attributed = attribute(OWN / "model-cuda")
    joined = """
    SELECT rank, row, step_index, start_ns, dur_ns, name AS kernel, op, phase, layer, work_class
    FROM device_event JOIN event_link USING (rank, row) JOIN selection USING (rank, step_index)
    WHERE in_step_time ORDER BY rank, row
    """
    expected = query(attributed, joined).arrow()
    found = (
        query(attributed, "FROM step_event ORDER BY rank, row")
        .arrow()
        .select(expected.column_names)
    )
    assert found.num_rows
    assert found.to_pylist() == expected.to_pylist()
