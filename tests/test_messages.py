"""Text of others in errors, on stderr, in paths that are printed, and in commands to copy."""

from __future__ import annotations

import json
import os
import pickle
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import chopper
from chopper import errors
from chopper.addresses import remember
from chopper.storage.files import document, encode_json
from chopper.wording import next_command, quoted
from tests.command import run
from tests.kineto_writer import small_trace

EVIL = "\x1b[2J\u202eevil\u2066 \r\n\x9b\x7f"
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ChopperError)
]


def is_message(text: str) -> bool:
    return len(text) <= errors.MESSAGE_MOST and text.isprintable() and "\u202e" not in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [EVIL, f"{EVIL} " * 90, "x" * 9_000, "\ud800\udcff"])
def test_an_error_is_one_line(kind: type[errors.ChopperError], text: str) -> None:
    error = kind(f"{text}: is no run")
    assert is_message(str(error))
    assert str(error).endswith(": is no run")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind(error)) == str(error)


def test_an_error_is_cut_after_the_secrets_are_out() -> None:
    address = remember(f"https://user:hunter22@host/{'d/' * 100}x?Signature=0123456789abcdef")
    for before in range(0, 300, 7):
        text = str(errors.InputError(f"{'b ' * before}{address}: {'is not there ' * 20}"))
        assert "hunter22" not in text
        assert "abcdef" not in text


def test_errors_of_the_api_show_hostile_paths_escaped(tmp_path: Path) -> None:
    name = tmp_path / f"{EVIL}.json"
    for call in (chopper.load, chopper.attribute, chopper.report):
        with pytest.raises(errors.ChopperError) as caught:
            call(name)
        assert is_message(str(caught.value))
        name.write_text("{}")


def test_documents_hold_nothing_that_a_terminal_obeys() -> None:
    said = {"name": EVIL, "address": f"https://u:pw123@host/{EVIL}"}
    for data in (encode_json(said), document(said)):
        text = data.decode()
        assert text.replace("\n", "").isprintable()
        assert json.loads(text)["name"] == EVIL
    assert b"pw123" not in document(said)


NAMES = ["plain", "with space", "it's", "a\\b", EVIL, f"it's \\n {EVIL}", "漢\u202e", "b\udcffyte"]


@pytest.mark.parametrize("name", NAMES)
def test_a_quoted_name_is_the_name_again_in_bash(name: str) -> None:
    shown = quoted(name)
    assert shown.isprintable()
    printed = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True)
    assert printed.stdout == os.fsencode(name)


def test_a_next_command_that_is_too_long_keeps_its_placeholders() -> None:
    words = "chopper report {RUN} -o {FILE}"
    assert next_command(words, RUN=["a b", "c"], FILE=["d"]) == "chopper report 'a b' c -o d"
    for runs in (["x" * 299], [f"{'y ' * 180}"], ["run"] * 80):
        command = next_command(words, RUN=runs, FILE=["d"])
        whole = shlex.split(command) == ["chopper", "report", *runs, "-o", "d"]
        assert whole or command == "chopper report RUN -o FILE"
        assert whole == (len(shlex.join(runs)) < 365)
        assert errors.message_line(f"next: {command}") == f"next: {command}"


def folder_of(tmp_path: Path, name: str) -> Path:
    (folder := tmp_path / name).mkdir()
    (folder / "trace.json").write_bytes(small_trace().encode())
    return folder


@pytest.mark.parametrize("name", ["d" * 200 + " " + EVIL, "short " + EVIL])
def test_a_hostile_name_is_one_line_of_each_message(tmp_path: Path, name: str) -> None:
    trace = folder_of(tmp_path, name) / "trace.json"
    commands: tuple[list[str | Path], ...] = (
        ["analyze", trace],
        ["report", trace, "-o", trace.with_name("page.html")],
        ["query", trace],
        ["export", trace, "--to", "csv", "-o", trace.with_name("csv")],
        ["import", trace, "-o", trace.with_name("run")],
    )
    for command in commands:
        outcome = run(*command)
        assert outcome.code == 0
        assert all(map(is_message, outcome.err.splitlines()))


def test_paths_are_raw_for_scripts_and_escaped_on_a_terminal(tmp_path: Path) -> None:
    trace = folder_of(tmp_path, f"{EVIL}\udcff") / "trace.json"
    page = trace.with_name("page.md")
    words = ("report", str(trace), "-o", str(page), "--force")
    command = [sys.executable, "-m", "chopper", *words]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    assert printed == os.fsencode(page) + b"\n"
    leader, terminal = pty.openpty()
    with os.fdopen(terminal, "wb") as written, os.fdopen(leader, "rb", buffering=0) as shown:
        subprocess.run(command, stdout=written, stderr=subprocess.DEVNULL, check=True)
        text = shown.read(4096).decode()
    assert text.strip().isprintable()
    assert r"\x1b[2J\u202eevil" in text
