from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from chopper import pipeline, reports
from chopper.cli import cli
from chopper.cli.analyze_ import to_csv, to_json
from chopper.errors import InputError, UsageError, printable
from tests.golden.own import OWN
from tests.reports.make import Shape, make

EXACT = make()


@pytest.fixture
def trace() -> str:
    return str(OWN / "fsdp2" / "rank-00000" / "trace.json.gz")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["analyze", *arguments], catch_exceptions=False)


def test_text_goes_to_stdout_and_the_next_command_to_stderr(trace) -> None:
    shown = run(trace)
    assert shown.exit_code == 0
    assert "Where the time went" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert shown.stderr.splitlines()[-1] == f"next: chopper report {trace}"


def test_json_is_the_attribution_and_nothing_else(trace) -> None:
    shown = run(trace, "--json")
    out = json.loads(shown.stdout)
    assert out == json.loads(json.dumps(reports.document(pipeline.attribute(pipeline.read(trace)))))
    assert "groups" not in out


@pytest.mark.parametrize("level", ["cause", "step", "phase", "layer", "op", "kernel", "rank"])
def test_groups_of_any_level_hold_the_same_nanoseconds(level) -> None:
    out = to_json(EXACT, level, None)
    assert out["level"] == level
    assert sum(g["time_ns"] for g in out["groups"]) == EXACT.observed_ns
    for group in out["groups"] if level != "cause" else ():
        assert sum(ns for column, ns in group.items() if "." in column) == group["step_ns"]


def test_top_cuts_groups_in_json_and_csv() -> None:
    assert len(to_json(EXACT, "kernel", 3)["groups"]) == 3
    assert len(to_csv(EXACT, "kernel", 3).splitlines()) == 4


def test_csv_of_causes_and_of_groups() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(EXACT, None, None))))
    assert [r["id"] for r in rows] == [c.id for c in EXACT.causes()]
    assert {r["measured"] for r in rows} == {"true", "false"}
    rows = list(csv.DictReader(io.StringIO(to_csv(EXACT, "op", None))))
    assert sum(int(r["time_ns"]) for r in rows) == EXACT.observed_ns
    for row in rows:
        causes = [int(v) for k, v in row.items() if "." in k]
        assert sum(causes) == int(row["step_ns"])


def test_csv_survives_names_with_commas_quotes_and_newlines() -> None:
    hostile = make(Shape(hostile=True))
    rows = list(csv.reader(io.StringIO(to_csv(hostile, "kernel", None))))
    assert len({len(r) for r in rows}) == 1
    assert {r[0] for r in rows[1:]} == {printable(str(g.key)) for g in hostile.by("kernel")}


def test_what_cannot_be_is_a_usage_error(trace) -> None:
    with pytest.raises(UsageError, match="no level is called 'nothing'"):
        run(trace, "--by", "nothing")
    assert run(trace, "--top", "0").exit_code == 2
    assert run().exit_code == 2
    with pytest.raises(UsageError, match="are mutually exclusive"):
        run(trace, "--json", "--csv")
    with pytest.raises(UsageError, match="--by does not apply to --view kernels"):
        run(trace, "--view", "kernels", "--by", "op")


def test_clocks_are_shown_by_level() -> None:
    done = run(str(OWN / "dvfs_random"), "--view", "clocks", "--by", "op", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert {row["level"] for row in rows} == {"op"}
    assert "aten::mm" in {row["name"] for row in rows}
    with pytest.raises(UsageError, match="--view clocks has no rows by cause"):
        run(str(OWN / "dvfs_random"), "--view", "clocks", "--by", "cause")


def test_an_empty_name_is_not_the_current_directory(trace, tmp_path, monkeypatch) -> None:
    (tmp_path / "t.json.gz").symlink_to(trace)
    monkeypatch.chdir(tmp_path)
    assert run(".").exit_code == 0
    for names in ([""], ["t.json.gz", ""]):
        with pytest.raises(InputError, match="'': an empty name"):
            run(*names)


def test_an_error_cannot_steer_the_terminal(tmp_path) -> None:
    (tmp_path / "\x1b]0;owned\x07.json").write_text("no trace")
    shown = subprocess.run(
        [sys.executable, "-m", "chopper", "analyze", "\x1b]0;owned\x07.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 1
    assert r"chopper: \x1b]0;owned\x07.json: " in shown.stderr
    assert "\x1b" not in shown.stderr
