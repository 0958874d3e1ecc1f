"""SQL over a run: what it answers, what it refuses, and that it ends."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from chopper.api import query
from chopper.errors import InputError, UsageError
from chopper.pipeline import attribute
from chopper.views import VIEWS, view
from tests.command import process, run
from tests.waiting import PATIENCE_S, until

OWN = Path(__file__).resolve().parents[1] / "golden" / "own"
CUDA = OWN / "model-cuda"
TRACE = CUDA / "rank-00000" / "trace.json.gz"
BY_RANK = "SELECT rank, count(*) AS n, sum(dur_ns) AS ns FROM device_event GROUP BY rank ORDER BY 1"


def _refused(sql: str, source: Path = CUDA) -> str:
    outcome = run("query", source, sql)
    assert outcome.code in (1, 2)
    assert outcome.out == ""
    return outcome.line


def test_tables_of_all_ranks_are_one() -> None:
    recorded = attribute(CUDA)
    expected = [
        {
            "rank": rank,
            "n": recorded.recording.table(rank, "device_event").num_rows,
            "ns": sum(recorded.recording.table(rank, "device_event")["dur_ns"].to_pylist()),
        }
        for rank in recorded.recording.ranks
    ]
    rows = run("query", CUDA, BY_RANK, "--format", "json").out.splitlines()
    assert [json.loads(row) for row in rows] == expected
    assert query(recorded, BY_RANK).arrow().to_pylist() == expected
    assert query(recorded.recording, BY_RANK).arrow().to_pylist() == expected


def test_a_trace_is_asked_as_a_run_is() -> None:
    (row,) = csv.DictReader(io.StringIO(run("query", TRACE, BY_RANK, "--format", "csv").out))
    assert row == {k: str(v) for k, v in query(CUDA, BY_RANK).arrow().to_pylist()[0].items()}


def test_rows_lead_from_table_to_table() -> None:
    sql = """
    SELECT count(*) AS n FROM piece p JOIN device_event d ON d.rank = p.rank AND d.row = p.event_row
    WHERE p.kernel IS NOT NULL AND p.kernel = d.name
    """
    attributed = attribute(CUDA)
    with_kernel = len(attributed.pieces) - attributed.pieces["kernel"].null_count
    assert query(attributed, sql).arrow().to_pylist() == [{"n": with_kernel}]
    linked = """
    SELECT count(*) AS n FROM event_link e JOIN host_span h ON h.rank = e.rank AND h.row = e.op_row
    WHERE h.name = e.op
    """
    links = attributed.links.values()
    assert query(attributed, linked).arrow()["n"].to_pylist() == [
        sum(len(table) - table["op"].null_count for table in links)
    ]


def test_ranks_are_joined_by_host() -> None:
    sql = "SELECT hostname, rank, count(*) AS n FROM step JOIN ranks USING (rank) GROUP BY ALL"
    recorded = attribute(CUDA)
    steps = {rank: recorded.recording.table(rank, "step").num_rows for rank in (0, 1)}
    for source in (CUDA, recorded.recording, recorded):
        rows = query(source, f"{sql} ORDER BY ALL").arrow().to_pylist()
        assert rows == [
            {"hostname": f"node-{rank}", "rank": rank, "n": n} for rank, n in steps.items()
        ]


@pytest.mark.parametrize("name", ["kernels", "stragglers", "steps"])
def test_views_are_as_analyze_shows_them(name: str) -> None:
    attributed = attribute(CUDA)
    assert (
        query(attributed, f"FROM {name}").arrow().to_pylist() == view(attributed, name).to_pylist()
    )


def test_host_work_stands_in_where_no_device_was_recorded() -> None:
    attributed = attribute(OWN / "fsdp2")
    joined = {rank: len(attributed.joined[rank].device_event) for rank in (0, 1)}
    sql = "SELECT rank, count(*) AS n FROM device_event GROUP BY rank"
    for source in (OWN / "fsdp2", attributed.recording, attributed):
        assert {row["rank"]: row["n"] for row in query(source, sql).arrow().to_pylist()} == joined


def test_without_sql_tables_and_views_are_listed() -> None:
    outcome = run("query", CUDA)
    assert outcome.code == 0
    assert "device_event" in outcome.out
    assert "allocator_block" not in outcome.out  # no snapshot was taken
    listed = [json.loads(line) for line in run("query", CUDA, "--format", "json").out.splitlines()]
    assert {table["name"] for table in listed if table["view"]} == {*VIEWS}
    for table in listed:
        described = run("query", CUDA, f"DESCRIBE {table['name']}", "--format", "json")
        names = [json.loads(line)["column_name"] for line in described.out.splitlines()]
        assert names == [column["name"] for column in table["columns"]]
        if table["name"] == "piece":
            break  # one of each kind is enough


def test_sql_comes_from_a_file_and_from_stdin(tmp_path: Path) -> None:
    file = tmp_path / "by rank.sql"
    file.write_text(f"-- by rank\n{BY_RANK};\n")
    wanted = run("query", CUDA, BY_RANK).out
    assert run("query", CUDA, "--file", file).out == wanted
    assert process("query", CUDA, "--file", "-", input=BY_RANK).out == wanted
    assert "cannot be read" in run("query", CUDA, "--file", tmp_path / "none.sql").line


def test_results_are_written_as_a_whole(tmp_path: Path) -> None:
    made = {}
    for suffix in ("txt", "csv", "jsonl", "parquet"):
        made[suffix] = tmp_path / f"result.{suffix}"
        assert run("query", CUDA, BY_RANK, "-o", made[suffix]).code == 0
    assert pq.read_table(made["parquet"]).to_pylist() == query(CUDA, BY_RANK).arrow().to_pylist()
    assert made["csv"].read_text() == run("query", CUDA, BY_RANK, "--format", "csv").out
    assert made["jsonl"].read_text() == run("query", CUDA, BY_RANK, "--format", "json").out
    assert made["txt"].read_text() == run("query", CUDA, BY_RANK).out
    assert "pass --force" in run("query", CUDA, BY_RANK, "-o", made["csv"]).line
    assert "extension" in run("query", CUDA, BY_RANK, "-o", tmp_path / "x.xlsx").line
    assert "-o" in run("query", CUDA, BY_RANK, "--format", "parquet").line
    # A statement that fails after thousands of rows leaves what was there.
    before = made["csv"].read_text()
    failing = "SELECT if(i = 900000, error('bad row'), i) FROM range(1000000) t(i)"
    assert "bad row" in run("query", CUDA, failing, "-o", made["csv"], "--force").line
    assert made["csv"].read_text() == before
    assert sorted(tmp_path.iterdir()) == sorted(made.values())


def test_a_table_shows_its_first_rows() -> None:
    out = run("query", CUDA, "SELECT i FROM range(1000) t(i)", "--top", "3").out.splitlines()
    assert [line.strip() for line in out[:4]] == ["i", "0", "1", "2"]
    assert out[4].startswith("… more rows")
    assert run("query", CUDA, "SELECT i FROM range(3) t(i) WHERE i > 9").out == "No rows.\n"


def test_values_of_all_kinds_are_written(tmp_path: Path) -> None:
    sql = (
        "SELECT 1 AS a, 2 AS a, NULL AS n, [1, 2.5] AS l, {'x': 1} AS s, true AS b, "
        "1.5 AS d, 'nan'::DOUBLE AS f, chr(27) || '[2J' AS e, DATE '2026-01-02' AS t"
    )
    assert json.loads(run("query", CUDA, sql, "--format", "json").out) == {
        "a": 1,
        "a_1": 2,
        "n": None,
        "l": [1, 2.5],
        "s": {"x": 1},
        "b": True,
        "d": 1.5,
        "f": None,
        "e": "\x1b[2J",
        "t": "2026-01-02",
    }
    assert run("query", CUDA, sql, "--format", "csv").out.splitlines()[1] == (
        '1,2,,"[1.0,2.5]","{""x"":1}",true,1.5,nan,\\x1b[2J,2026-01-02'
    )
    assert "\x1b" not in run("query", CUDA, sql).out
    assert "64 bits" in _refused("SELECT sum(9000000000000000000) FROM range(5)")


STRANGE = {
    "'infinity'::DATE": "infinity",
    "'-infinity'::TIMESTAMP_NS": "-infinity",
    "'infinity'::TIMESTAMPTZ": "infinity",
    "'290000-01-01'::DATE": "290000-01-01",
    "'200000-01-01'::TIMESTAMP": "200000-01-01 00:00:00",
    "'4000-01-01 (BC)'::DATE": "4000-01-01 (BC)",
    "'24:00'::TIME": "24:00:00",
    "'12:34:56.123456789'::TIME_NS": "12:34:56.123456789",
    "'2020-01-01 00:00:00.123456789'::TIMESTAMP_NS": "2020-01-01 00:00:00.123456789",
    "'12:00:00+05'::TIMETZ": "12:00:00+05",
    "INTERVAL '1 year 3 days 2.5 seconds'": "1 year 3 days 00:00:02.5",
    "'0101'::BIT": "0101",
    "'123456789012345678901234567890'::BIGNUM": "123456789012345678901234567890",
    "340282366920938463463374607431768211455::UHUGEINT": "340282366920938463463374607431768211455",
    "DATE 'infinity'::VARIANT": "infinity",
    "'\\xAA'::BLOB": "\\xAA",
    "union_value(k := DATE 'infinity')": "infinity",
    "row(1, DATE 'infinity')": "(1, infinity)",
    "[DATE 'infinity', NULL]": ["infinity", None],
    "[INTERVAL 1 DAY]::INTERVAL[1]": ["1 day"],
    'struct_pack("a""b" := TIME \'24:00\', n := 1)': {'a"b': "24:00:00", "n": 1},
    "MAP {DATE 'infinity': [TIME '24:00']}": [["infinity", ["24:00:00"]]],
}


def test_strange_values_are_the_text_of_duckdb(tmp_path: Path) -> None:
    columns = ", ".join(f"{value} AS c{n}" for n, value in enumerate(STRANGE))
    sql = f"SELECT {columns} -- the end\n; -- of it"
    expected = [*STRANGE.values()]
    row = json.loads(run("query", CUDA, sql, "--format", "json").out)
    assert [*row.values()] == expected
    texts = [v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for v in expected]
    (cells,) = [*csv.reader(io.StringIO(run("query", CUDA, sql, "--format", "csv").out))][1:]
    assert [cell.removeprefix("'") for cell in cells] == texts
    for value, text in zip(STRANGE, texts, strict=True):
        assert run("query", CUDA, f"SELECT {value} AS c").out.splitlines()[1] == text
    # Other programs read what they have a type for, and the text of the rest.
    assert run("query", CUDA, sql, "-o", tmp_path / "x.parquet").code == 0
    table = pq.read_table(tmp_path / "x.parquet")
    assert str(table["c0"].type) == "date32[day]"
    assert table["c10"].to_pylist() == ["1 year 3 days 00:00:02.5"]


HOSTILE = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/etc/hostname')",
    "SELECT * FROM '/etc/passwd'",
    "FROM read_parquet('*.parquet')",
    "FROM read_json('http://127.0.0.1:9/x')",
    "FROM parquet_metadata('x.parquet')",
    "FROM sniff_csv('/etc/passwd')",
    "FROM glob('/*')",
    "FROM query('FROM read_text(''/etc/passwd'')')",
    "FROM json_execute_serialized_sql(json_serialize_sql('FROM read_text(''/etc/passwd'')'))",
    "FROM arrow_scan(1, 2, 3)",
    "FROM enable_logging(storage_path = 'OUT')",
    "FROM enable_profiling(format = 'json', save_location = 'OUT')",
    "SELECT getenv('HOME')",
    "COPY (SELECT 1) TO 'OUT'",
    "COPY step FROM '/etc/passwd'",
    "EXPORT DATABASE 'OUT'",
    "IMPORT DATABASE 'OUT'",
    "ATTACH 'OUT'",
    "UPDATE EXTENSIONS",
    "UPDATE EXTENSIONS (json)",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '/tmp/extension.duckdb_extension'",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA database_list",
    "CALL enable_profiling()",
    "CREATE TABLE x AS SELECT 1",
    "CREATE SECRET (TYPE s3)",
    "CREATE MACRO step(a) AS a",
    "DROP VIEW step",
    "INSERT INTO step SELECT 1",
    "UPDATE step SET number = 1",
    "DELETE FROM step",
    "WITH x AS (DELETE FROM step RETURNING *) FROM x",
    "EXPLAIN ANALYZE SELECT 1",
    "SELECT 1; DROP VIEW step",
    "SELECT 1; SELECT 2",
    "PREPARE p AS SELECT 1",
    "BEGIN TRANSACTION",
    "CHECKPOINT now",
    "SELECT * FROM recorded",  # a variable of the program
    "SELECT $1 FROM step",
    "SELECT * FROM",
    "SELECT 'open FROM step",
    "SELECT\r1x FROM",
    "SELECT 1;\rSELEC",
    "SELECT 1\r\rFROM\rnope\nnope",
    "SELECT\x0b1 +\x0c nope \x1b[31m",
    "SELECT\x85\u2028nope",
    "SELECT '\ud800' FROM step",
    "SELECT error('x' || chr(10) || 'LINE 99: x' || chr(10) || '   ^')",
    f"SELECT error('x' || chr(10) || 'LINE {'9' * 5000}: x' || chr(10) || '   ^')",
    "/* open",
    "; ;",
]


@pytest.mark.parametrize("sql", HOSTILE)
def test_sql_only_reads_tables(sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = pq.read_table  # noqa: F841 - a name that SQL must not find
    line = _refused(sql.replace("OUT", str(tmp_path / "out")))
    assert line.startswith("chopper: SQL")
    assert "root:" not in line
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="SQL"):
        query(CUDA, sql.replace("OUT", str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("sql", "line"),
    [
        ("SELECT nope\nFROM step", "SQL, line 1, column 8: Referenced column"),
        ("SELECT number\nFROM stepp", "SQL, line 2, column 6: Table with name stepp does not ex"),
        ("SELECT number,\n FROM step WHERE WHERE", "SQL, line 2, column 18: syntax error"),
        ("SELECT " + "1 + " * 60 + "nope FROM step", "SQL, line 1, column 248: Referenced"),
        ("SELECT 'a'::INT FROM step", "SQL, line 1, column 11: Could not convert"),
        ("SELECT 1,\r nope\nFROM step", "SQL, line 2, column 2: Referenced column"),
        ("PIVOT step ON traced USING count(*)", "PIVOT needs its values"),
        ("SELECT repeat('x', 3000000000)", "needs more memory than 0.3 GB (--memory)"),
        ("SELECT list_sum(range(1000000000))", "needs more memory"),
        ("SELECT count(*) FROM (FROM range(99999999) t(i) ORDER BY hash(i))", "needs more memory"),
    ],
)
def test_errors_are_one_line_and_say_where(sql: str, line: str) -> None:
    outcome = run("query", CUDA, sql, "--memory", "0.3GB")
    assert outcome.code in (1, 2)
    assert line in outcome.line
    assert len(outcome.line) < 300


def test_a_table_that_is_not_there_is_suggested() -> None:
    assert 'Did you mean "device_event"?' in _refused("FROM device_events")


def test_what_was_not_recorded_is_said() -> None:
    outcome = run("query", CUDA, "FROM allocator_block")
    assert outcome.code == 0
    assert outcome.line == "chopper: this run has no recording of allocator_block"


ENDLESS = [
    "SELECT count(*) FROM range(1000000000000) a, range(1000000) b",
    "SELECT * FROM range(1000000000000)",
    "WITH RECURSIVE r AS (SELECT 1 i UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r",
    "SELECT max(hash(a.row, b.row, c.row)) FROM host_span a, host_span b, host_span c, host_span",
]


@pytest.mark.parametrize("sql", ENDLESS)
def test_the_time_is_limited(sql: str, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    outcome = run("query", CUDA, sql, "--timeout", "300ms", "-o", output)
    assert outcome.code == 1
    assert "took longer than 0.3 s (--timeout)" in outcome.line
    assert list(tmp_path.iterdir()) == []


def _written(process: psutil.Process, folder: Path) -> bool:
    return any(file.stat().st_size > 10_000 for file in folder.glob(".out.csv.*"))


def _large(process: psutil.Process, folder: Path) -> bool:
    return process.memory_info().rss > 600_000_000


@pytest.mark.parametrize(
    ("sql", "runs"),
    [
        ("SELECT * FROM range(1000000000000), device_event", _written),
        # No part of it looks up before it is done.
        ("SELECT list_sum(list_transform(range(90000000), lambda x: x)) FROM range(99)", _large),
    ],
)
def test_an_interrupt_ends_it_and_leaves_nothing(
    sql: str, runs: Callable[[psutil.Process, Path], bool], tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "chopper", "query", OWN / "fsdp2", sql, "-o", tmp_path / "out.csv"],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        text=True,
    ) as started:
        until(lambda: runs(psutil.Process(started.pid), tmp_path), "the statement runs")
        started.send_signal(signal.SIGINT)
        assert started.stderr is not None
        said = started.stderr.read()
        assert started.wait(PATIENCE_S) == 130
    assert said.splitlines()[-1] == "chopper: interrupted"
    assert [*tmp_path.iterdir()] == [temporary]
    assert [*temporary.iterdir()] == []


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "no such file" in _refused("FROM step", tmp_path / "none")
    assert "without traces" in _refused("FROM step", tmp_path)
    with pytest.raises(InputError):
        query(tmp_path, "FROM step")


def test_a_result_ends_quietly_where_nobody_reads_it() -> None:
    sql = "SELECT i FROM range(10000000) t(i)"
    shown = subprocess.run(
        f"{sys.executable} -m chopper query {CUDA} '{sql}' --format csv | head -2",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert shown.stdout == "i\n0\n"
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["SELECT 1 AS a"], "no run: name a run directory or traces before the SQL"),
        ([CUDA, "by rank.sql"], "by rank.sql: SQL comes from a file with --file 'by rank.sql'"),
        ([CUDA, ""], "SQL: found nothing"),
        ([CUDA, CUDA, "FROM step"], "is a run directory; name it alone"),
    ],
)
def test_what_is_typed_wrong_is_said(arguments: list[str | Path], line: str) -> None:
    assert line in run("query", *arguments).line
