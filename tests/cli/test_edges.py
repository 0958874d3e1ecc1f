"""Every command with names, places and terminals that nobody thinks of: a result or one line."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from chopper import cli
from chopper.cli.output import make_writable
from chopper.fresh_python import own_python
from tests.bad_input.make import GOOD, write
from tests.command import Outcome, process, run
from tests.conftest import tmpfs
from tests.waiting import PATIENCE_S

NOT_UTF8 = os.fsdecode(b"a\xffb")
LONG = "n" * 5000

READING = {
    "analyze": ["analyze", "IN"],
    "analyze json": ["analyze", "IN", "--json"],
    "analyze view": ["analyze", "IN", "--view", "kernels"],
    "report html": ["report", "IN", "-o", "OUT.html"],
    "report md": ["report", "IN", "-o", "OUT.md"],
    "report json": ["report", "IN", "-o", "OUT.json"],
    "export csv": ["export", "IN", "--to", "csv", "-o", "OUT"],
    "export parquet": ["export", "IN", "--to", "parquet", "-o", "OUT"],
    "export perfetto": ["export", "IN", "--to", "perfetto", "-o", "OUT"],
    "query": ["query", "IN", "SELECT * FROM host_span, step", "-o", "OUT.csv"],
    "query parquet": ["query", "IN", "SELECT * FROM kernels", "-o", "OUT.parquet"],
    "compare": ["compare", "IN", "IN", "-o", "OUT.html"],
    "compare json": ["compare", "IN", "IN", "--json"],
    "whatif": ["whatif", "IN", "--faster", "gemm=2x"],
    "import": ["import", "IN", "-o", "OUT"],
    "project": ["estimate", "project", "IN", "--device", "b200"],
    "model config": ["estimate", "memory", "--config", "IN"],
}
"""Commands that read a run or a trace; IN and OUT stand for paths."""
WRITING = {
    "estimate": ["estimate", "memory", "gpt2", "--sequence", "512", "-o", "OUT.html"],
    "record": ["record", "-o", "OUT", "--", "true"],
}
TALKING = {
    "schema": ["schema"],
    "schema json": ["schema", "--json"],
    "workloads": ["workloads"],
    "workloads json": ["workloads", "--json"],
    "doctor": ["doctor"],
    "doctor json": ["doctor", "--json"],
    "completion": ["completion", "bash"],
    "limits": ["estimate", "limits"],
    "run help": ["run", "fsdp2", "--help"],
    "help": ["--help"],
}


def words(command: list[str], source: str | Path, output: str | Path) -> list[str]:
    return [w.replace("IN", str(source)).replace("OUT", str(output)) for w in command]


def checked(outcome: Outcome) -> Outcome:
    """It is a result, or an error of one line; with an error of use, its usage stands before it."""
    assert "Traceback" not in outcome.err, outcome.err
    assert outcome.code in (0, 1, 2), outcome
    if outcome.code == 1:
        assert [line for line in outcome.lines if line.startswith("chopper: ")], outcome
        assert all(len(line) < 1500 for line in outcome.lines), outcome
    return outcome


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trace and a run."""
    directory = tmp_path_factory.mktemp("sources")
    trace = write(directory / "trace.json", GOOD)
    assert run("import", trace, "-o", directory / "run").code == 0
    return directory


def in_use(command: list[str], source: Path) -> bool:
    """Whether a command can make something of a run, or of a trace."""
    return command[:3] != ["estimate", "memory", "--config"] and not (
        command[0] == "import" and source.is_dir()
    )


@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_names_that_are_not_utf8(name: str, sources: Path, tmp_path: Path) -> None:
    odd = tmp_path / NOT_UTF8
    odd.mkdir()
    shutil.copy(sources / "trace.json", odd / f"{NOT_UTF8}.json")
    shutil.copytree(sources / "run", odd / "run")
    command = (READING | WRITING)[name]
    for number, source in enumerate((odd / f"{NOT_UTF8}.json", odd / "run")):
        outcome = checked(run(*words(command, source, odd / f"out-{number}")))
        if name in READING and in_use(command, source):
            assert outcome.code == 0, outcome


@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_names_of_5000_characters(name: str, sources: Path, tmp_path: Path) -> None:
    command = (READING | WRITING)[name]
    checked(run(*words(command, LONG, tmp_path / "out")))
    outcome = checked(run(*words(command, sources / "run", tmp_path / LONG)))
    if any("OUT" in word for word in command):
        assert outcome.code == 1
        assert "n…n" in outcome.lines[-1] or in_use(command, sources / "run") is False


@pytest.fixture
def nowhere(tmp_path: Path) -> Iterator[None]:
    """A current directory that was removed."""
    before = Path.cwd()
    directory = tmp_path / "removed"
    directory.mkdir()
    os.chdir(directory)
    directory.rmdir()
    yield
    os.chdir(before)


@pytest.mark.parametrize("name", [*READING, *WRITING, *TALKING])
@pytest.mark.usefixtures("nowhere")
def test_current_directory_that_was_removed(name: str, sources: Path, tmp_path: Path) -> None:
    command = (READING | WRITING | TALKING)[name]
    checked(run(*words(command, sources / "run", "out")))
    checked(run(*words(command, "source", tmp_path / "out")))


@pytest.mark.usefixtures("nowhere")
def test_a_removed_directory_is_refused_however_the_command_is_written() -> None:
    assert "the current directory cannot be used" in run("Doctor").line


@pytest.mark.parametrize("encoding", ["latin-1", pytest.param("utf-8", marks=pytest.mark.long)])
def test_terminals_that_lack_characters(
    encoding: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, command in (READING | TALKING).items():
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        for stream, attribute in zip(streams, ("stdout", "stderr"), strict=True):
            monkeypatch.setattr(sys, attribute, stream)
        make_writable()
        output = tmp_path / f"{encoding} {name}"
        monkeypatch.setattr(sys, "argv", ["chopper", *words(command, sources / "run", output)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        monkeypatch.undo()
        for stream in streams:
            stream.flush()
        assert ended.value.code in (0, 1, 2, None), name
        if "json" in name and encoding != "utf-8" and name != "report json":
            assert streams[0].buffer.getvalue().isascii(), name


def test_what_a_terminal_lacks_is_written_in_similar_characters() -> None:
    code = "from chopper.cli.output import make_writable; make_writable(); print('█ – µs \u20ac')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == ("# - µs \\u20ac\n".encode("latin-1"), b"")


@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("<&-", ">&-", "2>&-")),
    ],
)
def test_closed_streams(closed: str, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "open('streams', 'w').write("
        "str([s is None for s in (sys.stdin, sys.stdout, sys.stderr)]))\n"
        "sys.exit(7)\n"
    )
    for command, code in (
        (["analyze", str(sources / "run")], 0),
        (["analyze", str(tmp_path / "none")], 1),
        (["record", "-o", "out", "--", sys.executable, "program.py"], 7),
    ):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *own_python("chopper", *command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
    # The program finds its streams as it would without chopper.
    alone = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} program.py {closed}"], cwd=tmp_path, check=False
    )
    assert alone.returncode == 7
    expected = [sign in closed for sign in ("<&-", " >&-" if "<" in closed else ">&-", "2>&-")]
    if closed == "2>&-":
        expected = [False, False, True]
    assert (tmp_path / "streams").read_text() == str(expected)


@pytest.mark.parametrize("name", [n for n, c in READING.items() if "OUT" in str(c)] + ["estimate"])
def test_a_full_disk_is_told_by_the_name_that_was_asked_for(
    name: str, sources: Path, tmp_path: Path
) -> None:
    with tmpfs("size=4k") as place:
        (place / "fill").write_bytes(bytes(4096))
        command = words((READING | WRITING)[name], sources / "run", place / "out")
        outcome = checked(run(*command))
        if in_use((READING | WRITING)[name], sources / "run"):
            assert outcome.code == 1, outcome
            assert f"{place}/out" in outcome.lines[-1], outcome
            assert ".tmp" not in outcome.lines[-1]
            assert [p.name for p in place.iterdir()] == ["fill"]


def test_a_whole_process_with_names_and_a_terminal_of_old(sources: Path, tmp_path: Path) -> None:
    shutil.copytree(sources / "run", tmp_path / NOT_UTF8)
    outcome = process(
        "analyze",
        NOT_UTF8,
        cwd=tmp_path,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert outcome.code == 0, outcome
    assert outcome.err.isascii()


def test_texts_beside_the_code_are_read_in_a_locale_of_old() -> None:
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    outcome = process("estimate", "limits", "--json", env=os.environ | old)
    assert outcome.code == 0, outcome
    assert "72 h² FLOP per token" in json.loads(outcome.out)["assumptions"][0]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["record", "--prometheus", "²", "--", "true"], "'²': not an address"),
        (["record", "--prometheus", "9" * 5000, "--", "true"], "not an address"),
        (["estimate", "project", "RUN", "--device", ""], "no device is called"),
    ],
)
def test_options_of_nonsense(command: list[str], expected: str, sources: Path) -> None:
    outcome = run(*(str(sources / "run") if w == "RUN" else w for w in command))
    assert outcome.code in (1, 2)
    assert expected in outcome.line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--view", "kernles"], "no view is called 'kernles'; did you mean kernels"),
        (["--by", "kernal"], "no level is called 'kernal'; did you mean kernel"),
    ],
)
def test_a_name_that_there_is_not_is_one_line_with_those_that_are_near(
    words: list[str], line: str
) -> None:
    refused = run("analyze", "x.json", *words)
    assert refused.code == 2
    assert line in refused.line


def test_columns_are_obeyed_when_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = run("estimate", "cost", "--device", "h100", "--model", "gpt2", "--details").out
        assert columns * 0.8 < max(map(len, shown.splitlines())) <= columns


def test_help_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    context = click.Context(cli.cli)
    estimate = cli.cli.get_command(context, "estimate")
    assert isinstance(estimate, click.Group)
    estimates = [["estimate", name] for name in estimate.list_commands(context)]
    for words in ([], *([name] for name in cli.cli.list_commands(context)), *estimates):
        shown = run(*words, "--help").out
        assert "Usage: chopper" in shown
        assert [line for line in shown.splitlines() if len(line) > 80] == []
