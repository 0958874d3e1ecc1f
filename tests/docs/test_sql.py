"""Every statement and program of the page about SQL runs; files answer as `chopper query` does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from chopper.api import query
from tests.command import run
from tests.docs.blocks import FENCE, ROOT

OWN = ROOT / "tests" / "golden" / "own" / "model-cuda"
PAGE = (ROOT / "docs" / "concepts" / "sql.md").read_text(encoding="utf-8")
BLOCKS = [(fence[2], fence[3]) for fence in FENCE.finditer(PAGE)]
STATEMENTS = [text for language, text in BLOCKS if language == "sql" and "step_event" not in text]
assert len(STATEMENTS) == 6
(VIEW,) = (text for language, text in BLOCKS if language == "sql" and "step_event" in text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as recorded, imported and exported, under the page's names."""
    folder = tmp_path_factory.mktemp("sql")
    shutil.copytree(OWN, folder / "runs" / "mine")
    for trace in OWN.glob("rank-*/trace.json.gz"):
        (folder / "traces").mkdir(exist_ok=True)
        shutil.copy(trace, folder / "traces" / f"{trace.parent.name.replace('-', '')}.json.gz")
    (kinds,) = (text for language, text in BLOCKS if language == "" and "--to parquet" in text)
    for line in kinds.splitlines():
        done = run(*line.replace("'", "").split()[1:], cwd=folder)
        assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("sql", STATEMENTS)
def test_a_statement_answers_the_same_of_run_and_files(sql: str, folder: Path) -> None:
    answered = query(folder / "runs" / "mine", sql).arrow()
    assert answered.num_rows
    with duckdb.connect() as connection:
        for name in set(re.findall(r"(?:FROM|JOIN) (\w+)", sql)):
            file = folder / "tables" / f"{name}.parquet"
            if not file.is_file():
                file = folder / "tables" / "rank-*" / file.name
            connection.execute(f"CREATE VIEW {name} AS FROM read_parquet('{file}')")
        found = connection.sql(sql).fetchall()
    columns = [answered[name].to_pylist() for name in answered.column_names]
    assert sorted(map(repr, found)) == sorted(map(repr, zip(*columns, strict=True)))


def test_the_view_of_the_page_is_printed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my_view.sql").write_text(VIEW)
    printed = run("analyze", folder / "runs" / "mine", "--view", tmp_path / "my_view.sql")
    assert printed.out.startswith("Streams\nStreams by the time of their kernels")
    assert printed.code == 0


@pytest.mark.parametrize("program", [text for language, text in BLOCKS if language == "python"])
def test_a_program_reads_the_files(
    program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(program, "docs/concepts/sql.md", "exec"), {})
    printed = capsys.readouterr().out
    assert pd  # the command would hide it from programs of this process that come later
    assert len(re.findall(r"\d{4,}", printed)) >= 2  # sums of time, of each rank or name
