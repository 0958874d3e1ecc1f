"""``chopper schema`` and ``chopper completion``; the rules that table declarations keep."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from chopper.cli import _COMMANDS, cli
from chopper.errors import UsageError
from chopper.tables import GROUPS, TABLES
from chopper.views import in_sections
from chopper.wording import unit

DECLARED = TABLES | {view.name: view for view in in_sections()}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_tables_are_listed() -> None:
    listed = {line.split()[0] for line in invoke("schema").splitlines() if line[:1].strip()}
    assert listed == set(DECLARED)


@pytest.mark.parametrize("name", list(DECLARED))
def test_a_table_is_printed_from_its_declaration(name: str) -> None:
    text = invoke("schema", name)
    words = text.split()
    for column in DECLARED[name].columns:
        assert column.name in words
    [shown] = json.loads(invoke("schema", name, "--json"))["tables"]
    assert shown["version"] == DECLARED[name].version
    assert [
        (c["name"], c["type"], c["unit"], c["nullable"], c["doc"]) for c in shown["columns"]
    ] == [(c.name, c.type, c.unit, c.nullable, c.doc) for c in DECLARED[name].columns]


def test_the_json_form_names_its_version() -> None:
    document = json.loads(invoke("schema", "--json"))
    assert document["schema"] == "chopper.tables/1"
    assert [t["name"] for t in document["tables"]] == list(DECLARED)


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no table is called 'proces'; did you mean process"):
        invoke("schema", "proces")


def test_telemetry_times_its_rows_and_names_its_units() -> None:
    for table in GROUPS["telemetry"]:
        assert [c.name for c in table.columns[:2]] == ["time_ns", "span_ns"]
        for column in table.columns:
            assert column.doc.endswith(".")
            suffix = unit(column.name)
            assert column.unit == suffix, column.name
            if suffix == "ns":
                assert column.type == "int64"


COMPLETE = """
eval "$(chopper completion bash)"
COMP_WORDS=(chopper c); COMP_CWORD=1
_chopper_completion chopper
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "chopper"
    program.write_text(f"#!{sys.executable}\nfrom chopper.cli import main\nmain()\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", COMPLETE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {n for n in _COMMANDS if n.startswith("c")}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("bench", "fsdp"), ["plain,fsdp1", "plain,fsdp2", "plain,fsdp"]),
        (("schema", "device_e"), ["plain,device_event"]),
        *(
            ((command, "runs/m"), ["file,runs/m"])
            for command in ("analyze", "report", "export", "compare", "gate", "import", "query")
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_arguments_are_completed(
    typed: tuple[str, str], offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", " ".join(["chopper", *typed]))
    monkeypatch.setenv("COMP_CWORD", "2")
    completion = BashComplete(cli, {}, "chopper", "_CHOPPER_COMPLETE")
    assert completion.complete().split() == offered


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("whatif run --fix launch", "launch-gaps"),
        ("estimate memory llama3-", "llama3-8b"),
        ("estimate memory --device h100", "h100-sxm"),
        ("estimate cost --against mi300", "mi300x"),
        ("analyze run --view cri", "critical_path"),
        ("record --collect torch", "torch_trace"),
        ("record --collect torch_trace,core", "torch_trace,core_wait"),
    ],
)
def test_values_of_options_are_completed(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", f"chopper {typed}")
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ") + 1))
    completion = BashComplete(cli, {}, "chopper", "_CHOPPER_COMPLETE")
    begun = typed.rpartition(" ")[2]
    words = [word.partition(",")[2] for word in completion.complete().split()]
    assert offered in words
    assert all(word.startswith(begun) for word in words)


@pytest.mark.parametrize("typed", ["chopper analize ", "chopper estimate memmory "])
def test_behind_a_name_that_there_is_not_completion_says_nothing(
    typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    completion = BashComplete(cli, {}, "chopper", "_CHOPPER_COMPLETE")
    completion.complete()  # an error would come out of it


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_accepted_by_their_shells(shell: str) -> None:
    script = invoke("completion", shell)
    assert "_CHOPPER_COMPLETE" in script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    checked = subprocess.run(
        [program, "-n"], input=script, capture_output=True, text=True, env=dict(os.environ)
    )
    assert checked.returncode == 0, checked.stderr


def test_an_unknown_shell_is_a_usage_error() -> None:
    result = CliRunner().invoke(cli, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "bash" in result.output


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="no SIGPIPE on this system")
@pytest.mark.parametrize("arguments", [["schema"], ["schema", "--json"]])
def test_a_reader_that_leaves_ends_the_command_without_a_word(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "chopper", *arguments], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
