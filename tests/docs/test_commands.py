"""Every command that README, the documentation, CONTRIBUTING and --help show is one that works.

Commands of chopper bench, in a directory that holds what they name; those that record, measure for
minutes or need what is not here are read to their last option instead. Of other programs, what is
named must exist: make's targets, benchmarks with their options, extras.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from chopper.cli import cli
from tests.command import run
from tests.docs.blocks import ROOT, Command, commands
from tests.docs.inputs import prepare
from tests.golden.fetch import HOST, catalogue

READ_ONLY = {
    "clock": "sets clocks of devices, none of which are here; tests/experiments has stand-ins",
    "bench": "trains for seconds to hours; tests/workloads runs each workload, small",
    "calibrate": "loads the whole machine for half a minute; tests/hardware measures quickly",
}
"""Commands of chopper that are not started here → the reason."""

OF_ONE_RUN = {"chopper import trace.json.gz results.json -o runs/with-counters"}
"""Commands that want recordings of two tools that watched one run: tests/ingest makes them."""

ELSEWHERE_OPTIONS = {
    "--ray": "starts a cluster: tests/engines does, with several nodes",
    "--prove": "takes some minutes; tests/cli/test_proof.py runs its checks",
    "--workers": "starts processes: tests/engines does",
    "--module": "captures a model: tests/analyzers/estimates does",
    "wandb": "loads a tracker: tests/integrations does",
    "mlflow": "loads a tracker: tests/integrations does",
}
"""Options whose commands are not started here → the reason."""

READING = ("analyze", "compare", "whatif", "query", "schema")
"""Commands that, without ``-o``, change nothing of what they read: all run in one directory."""

ELSEWHERE = {
    "git": "needs the network",
    "eval": "sets up an interactive shell; tests/cli completes in real ones",
    "ruff": "make test runs it",
}
PLACEHOLDERS = (
    (r"\bRUN\b", "runs/mine"),
    (r"\bTRACE\b", "trace.json.gz"),
    (r"\bBASE\b", "runs/before"),
    (r"\bEXPR\b", "'step>+900%'"),
    (r"(?<=--view )NAME\b", "operations"),
    (r"(?<=estimate )NAME\b", "limits"),
    (r"(?<=--device )NAME\b", "mi300x"),
    (r"\bNAME\b", "gemm"),
    (r"(?<=compare )A B\b", "runs/before runs/after"),
    (r"\bCOMMAND\b", "python train.py"),
    (r"\$\(hostname\)", "node0"),
    # Messages of several sizes tell a latency; the one recording has them, the other clocks.
    (r"runs/mine(?= .*--latency)", "runs/fsdp2"),
)
GPU_ONLY = {"chopper bench overlap --ranks 1": "except on a GPU"}
"""Commands that this machine refuses → what it says."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder, tmp_path_factory.mktemp("made"))
    return folder


def name_of(command: Command) -> str:
    return f"{command.source}: {command.text}"


@pytest.mark.parametrize("shown", commands(), ids=name_of)
def test_command(
    shown: Command, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown.text
    for placeholder, meant in PLACEHOLDERS:
        text = re.sub(placeholder, meant, text)
    words = Command(shown.source, text).words
    program = Path(words[0]).name
    if program in ELSEWHERE:
        assert ELSEWHERE[program]
    elif program == "chopper":
        monkeypatch.setattr(click, "launch", lambda url: 0)  # no browser
        monkeypatch.setenv("WANDB_MODE", "offline")
        here = str(Path(sys.executable).parent)  # where python is the one that has torch
        monkeypatch.setenv("PATH", os.pathsep.join((here, os.environ["PATH"])))
        # What one command has imported or attributed, the next one finds.
        monkeypatch.setenv("XDG_CACHE_HOME", str(inputs.parent / "cache"))
        check_chopper(shown, words[1:], text, inputs, tmp_path / "here")
    else:
        OTHERS[program](words[1:])


def check_chopper(shown: Command, words: list[str], text: str, inputs: Path, here: Path) -> None:
    name, command, rest = resolved(words)
    if shown.in_prose and all(re.fullmatch(r"--[a-z-]+", word) for word in rest):
        known = {option for parameter in command.params for option in parameter.opts}
        assert known | {"--help"} >= {*rest}
        if not rest or any(parameter.required for parameter in command.params):
            return  # named, not shown
    if name == "record":
        read_record(command, rest)
    elif name == "bench" and "--help" not in rest:
        read_bench(command, rest)
    elif (
        (name in READ_ONLY and "--help" not in rest)
        or shown.text in OF_ONE_RUN
        or ELSEWHERE_OPTIONS.keys() & {*rest}
        or any("://" in word for word in rest)  # tests/ingest has a server
    ):
        command.make_context(name, [*rest])
    else:
        if (name or "analyze") in READING and "-o" not in rest:
            here = inputs
        else:
            shutil.copytree(inputs, here)
        if name in ("gather", "import") and "-o" in rest:  # others read what is there
            shutil.rmtree(here / rest[rest.index("-o") + 1], ignore_errors=True)
        outcome = run(*words, cwd=here)
        refused = re.search(r"^chopper: .*", shown.printed or "", re.MULTILINE)
        gated = "✗" in (shown.printed or "")
        assert outcome.code in ((2,) if refused else (0, 1) if gated else (0,)), outcome.err
        assert not refused or refused[0] in outcome.err
        answer = text.partition(" | jq ")[2]
        if "--json" in words:
            json.loads(outcome.out)
        if answer and shutil.which("jq"):
            query = answer.strip("'")
            subprocess.run(["jq", query], input=outcome.out, text=True, check=True, stdout=-3)


def resolved(words: list[str]) -> tuple[str, click.Command, list[str]]:
    """The command that words name, and what is left for it."""
    command: click.Command = cli
    context, rest, name = click.Context(cli, info_name="chopper"), words, ""
    if rest[0] == "--max-input":
        rest = rest[2:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found_name, found, rest = command.resolve_command(context, [*rest])
        assert found is not None
        name, command = found_name or "", found
        context = click.Context(command, info_name=name, parent=context)
    return name, command, rest


def read_record(command: click.Command, rest: list[str]) -> None:
    from chopper.recording.live import parse_address
    from chopper.recording.options import make_options

    asked = command.make_context("record", [*rest]).params
    shared = {k: asked[k] for k in ("collect", "steps", "trace_limit", "stacks", "memory")}
    make_options(output=None, trace=not asked["no_trace"], shapes=not asked["no_shapes"], **shared)
    if asked["prometheus"]:
        parse_address(asked["prometheus"])


def read_bench(command: click.Command, rest: list[str]) -> None:
    """Check the workload, its variants and its own options; this machine may lack what it needs."""
    from chopper.errors import UsageError
    from chopper.experiments.prepare import WorkloadUnavailable, find, prepare

    asked = command.make_context("bench", [*rest]).params
    shared = {k: asked[k] for k in ("ranks", "steps", "options", "variants", "repeats")}
    if says := GPU_ONLY.get(" ".join(("chopper bench", *rest))):
        with pytest.raises(UsageError, match=says):
            prepare(asked["workload"], **shared)
        return
    with contextlib.suppress(WorkloadUnavailable):
        prepare(asked["workload"], **shared)
    assert not asked["compare"] or find(asked["workload"]).variants


def check_make(rest: list[str]) -> None:
    done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def check_pip(rest: list[str]) -> None:
    assert rest[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in rest[1:]:
        name, _, asked = word.rstrip("]").partition("[")
        assert name in (".", "chopper-profiler", "deepspeed")
        assert {*filter(None, asked.split(","))} <= extras["optional-dependencies"].keys()


def check_python(rest: list[str]) -> None:
    """A module or a file of this repository that has the options."""
    if rest[:2] == ["-m", "pytest"]:
        check_pytest(rest[2:])
        return
    if rest[0] == "-m":
        found = importlib.util.find_spec(rest[1])
        assert found is not None
        assert found.origin is not None
        source, rest = Path(found.origin), rest[2:]
    else:
        source, rest = ROOT / rest[0], rest[1:]
        assert source.is_file()
    # Some are read by what a program imports from beside it.
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in {source.parent, ROOT / "tests"}
        for path in folder.glob("*.py")
    )
    assert [w for w in rest if w.startswith("--") and f'"{w}"' not in text] == []


def check_curl(rest: list[str]) -> None:
    """A file of the catalogue, whose bytes tests/golden knows; downloading needs the network."""
    (url,) = (word for word in rest if word.startswith("https://"))
    known = {f"{HOST}/{row['repository']}/{row['commit']}/{row['path']}" for row in catalogue()}
    assert url in known


def check_pytest(rest: list[str]) -> None:
    files = [word for word in rest if "/" in word]
    assert files
    for word in files:
        assert (ROOT / word).exists()


OTHERS: dict[str, Callable[[list[str]], Any]] = {
    "curl": check_curl,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "pytest": check_pytest,
}


def test_a_command_that_rots_is_seen(inputs: Path, tmp_path: Path) -> None:
    for rotten in ("chopper analyze RUN --view gone", "chopper bench fsdp2 -- --gone 1"):
        with pytest.raises((AssertionError, click.UsageError, Exception)):
            test_command(Command("x", rotten), inputs, tmp_path, pytest.MonkeyPatch())
    with pytest.raises(AssertionError):
        check_make(["gone"])
    with pytest.raises(AssertionError):
        check_python(["-m", "benchmarks.gate", "--gone"])
