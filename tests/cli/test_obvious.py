"""What people type without having read anything: it is done, or the right command is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import pytest

from chopper import cli
from chopper.cli import _shared as shared
from chopper.views import VIEWS
from tests.command import process, run
from tests.kineto_writer import small_trace

PROGRAM = """
import sys, torch
print("arguments", sys.argv[1:])
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "trace").write_bytes(small_trace().encode())
    (tmp_path / "a.json").write_bytes(small_trace().encode())
    (tmp_path / "b.json").write_bytes(small_trace().encode())
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "done"),
    [
        ("a.json", "report a.json"),
        ("trace", "report trace"),
        ("*.json", "report *.json"),
        ("a.json b.json -o r.md", "report a.json b.json -o r.md"),
        ("./gone.json.gz", "report ./gone.json.gz"),
        ("s3://bucket/run", "report s3://bucket/run"),
        ("train.py --lr 1", "record train.py --lr 1"),
        ("python3.11 train.py", "record python3.11 train.py"),
        ("/usr/bin/python3 -m job", "record /usr/bin/python3 -m job"),
        ("torchrun --nproc-per-node 8 train.py", "record torchrun --nproc-per-node 8 train.py"),
        ("accelerate launch train.py", "record accelerate launch train.py"),
        ("bash train.sh", "record bash train.sh"),
        ("run python train.py --model gemm", "record python train.py --model gemm"),
        ("run -o out --steps 2:4 -- sh -c true", "record -o out --steps 2:4 -- sh -c true"),
        ("run train.py", "record train.py"),
        ("run ./gone.py", "record ./gone.py"),
        ("run fsdp2 --ranks 2", "bench fsdp2 --ranks 2"),
        ("run --ranks 2 fsdp2 -- --size 1b", "bench --ranks 2 fsdp2 -- --size 1b"),
        ("run -o sh fsdp2", "bench -o sh fsdp2"),
        ("run fsdpp", "bench fsdpp"),
        ("run --help", "bench --help"),
        ("run", "bench"),
        ("compare a b --history=h", "gate a b --history=h"),
        ("compare a b --fail-on step>1%", "gate a b --fail-on step>1%"),
        ("compare a b --json", "compare a b --json"),
        ("Report a.json", "Report a.json"),
        ("rm -r runs", "rm -r runs"),
        ("kill 1", "kill 1"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_what_is_meant(typed: str, done: str, here: Path) -> None:
    assert cli.meant(typed.split()) == done.split()
    assert cli.meant(done.split()) == done.split()


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("diff a.json b.json", "chopper compare a.json b.json"),
        ("view a.json", "chopper report a.json"),
        ("show", "chopper report"),
        ("open a.json", "chopper report a.json"),
        ("stats a.json", "chopper analyze a.json"),
        ("summary a.json", "chopper analyze a.json"),
        ("profile python train.py", "chopper record python train.py"),
        ("profile -o out -- train.py", "chopper record -o out -- train.py"),
        ("capture a.json", "chopper report a.json"),
        ("merge node0 node1", "chopper gather node0 node1"),
        ("fsdp2 --ranks 2", "chopper bench fsdp2 --ranks 2"),
        ("help", "chopper --help"),
        ("version", "chopper --version"),
        ("analise a.json", "did you mean analyze"),
        ("rm -r runs", "there are record"),
    ],
)
def test_another_name_is_one_line_with_the_command(typed: str, suggested: str, here: Path) -> None:
    shown = run(*typed.split())
    assert (shown.code, suggested in shown.line) == (2, True), shown.line
    assert sorted(p.name for p in here.iterdir()) == ["a.json", "b.json", "trace", "train.py"]


def test_a_trace_alone_is_reported_each_time_in_a_file_of_its_own(here: Path) -> None:
    first = run("a.json")
    assert (first.code, first.out) == (0, "report.html\n"), first.err
    assert run("--max-input", "1GB", "b.json").out == "report-2.html\n"
    assert (here / "report.html").read_bytes().startswith(b"<!doctype html>")
    assert run("a.json", "-o", "a.txt").code == 0
    assert "Observed" in (here / "a.txt").read_text()


@pytest.mark.parametrize(
    "typed",
    [
        "train.py --lr 1",
        pytest.param("record train.py", marks=pytest.mark.long),
        pytest.param("run -o out python train.py --lr 1", marks=pytest.mark.long),
    ],
)
def test_a_program_is_recorded(typed: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = process(*typed.split(), cwd=here)
    assert done.code == 0, done.err
    assert f"arguments {typed.split()[-2:] if '--lr' in typed else []}" in done.out
    (recorded,) = [here / "out"] if "-o" in typed else (here / "runs").iterdir()
    assert json.loads((recorded / "manifest.json").read_bytes())["exit_code"] == 0


def test_bench_names_what_records_a_program(here: Path) -> None:
    for words in (("python", "train.py"), ("train.py",), ("--ranks", "2", "python", "train.py")):
        line = run("bench", *words).line
        program = " ".join(words[-2:] if len(words) > 1 else words)
        assert line.endswith(
            f"is a program, not a workload; record it: chopper record -- {program}"
        )
    assert "gone.py: command not found" in run("record", "gone.py").line


def commands() -> list[tuple[str, click.Command, click.Context]]:
    """Each command and each estimate, with its context."""
    found = []

    def below(group: click.Group, context: click.Context) -> None:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            inner = click.Context(command, info_name=name, parent=context)
            found.append((inner.command_path, command, inner))
            if isinstance(command, click.Group):
                below(command, inner)

    below(cli.cli, click.Context(cli.cli, info_name="chopper"))
    return found


def test_every_rare_option_is_one_and_stands_last_in_its_help() -> None:
    named = set()
    for path, command, context in commands():
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        rare = [p for p in options if shared.is_rare(p)]
        named |= {p.name for p in rare}
        if isinstance(command, shared.Command):
            shown = command.get_help(context)
            common, _, last = shown.partition("Large runs and special cases:")
            assert all(f"\n  {p.opts[-1]}" in last for p in rare), path
            assert all(f"\n  {p.opts[-1]}" not in common for p in rare), path
        else:
            assert not rare, f"{path}: cls=shared.Command lists rare options last"
    assert named >= shared._RARE


def test_the_first_help_shows_what_a_trainer_needs() -> None:
    shown = run("--help").out
    first, _, rest = shown.partition("\nMore commands:")
    names = "record report analyze compare whatif estimate export doctor"
    listed = [
        line.split()[0] for line in first.splitlines() if line[:3].strip() and line[:2] == "  "
    ]
    assert [name for name in listed if name in names.split()] == names.split()
    assert all(f"\n  {name} " in rest for name in ("gate", "query", "bench", "workloads"))
    assert "\n  run " not in shown
    assert rest.index("completion") < rest.index("--max-input")
    assert run().code == 2


def test_ten_views_are_in_the_help_and_all_in_the_list() -> None:
    shown = run("analyze", "--help").out
    listed = shown.partition("--view list:\n")[2].partition("\n\n")[0].replace(",", "").split()
    assert len(listed) == 10
    assert set(listed) < set(VIEWS)
    every = run("analyze", "--view", "list")
    assert every.code == 0
    assert [line.split()[0] for line in every.out.splitlines() if line[0] != " "] == [*VIEWS]


def test_a_trace_is_completed_where_a_command_may_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import BashComplete

    for typed, offered in (("trac", ["file,trac"]), ("whati", ["plain,whatif"])):
        monkeypatch.setenv("COMP_WORDS", f"chopper {typed}")
        monkeypatch.setenv("COMP_CWORD", "1")
        completion = BashComplete(cli.cli, {}, "chopper", "_CHOPPER_COMPLETE")
        assert completion.complete().split() == offered
