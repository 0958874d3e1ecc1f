"""Places that cannot be read or written, in this process and as somebody whom permissions bind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.make import GOOD, analyzed, same, write
from tests.command import Outcome, process, run
from tests.conftest import tmpfs
from tests.kineto_writer import small_trace


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("missing/r.json", "does not exist"),
        ("folder.json", "is a directory"),
        ("taken.json", "exists; pass --force"),
        ("/proc/none/r.json", "does not exist|cannot be written"),
        ("r.pdf", "pdf"),
    ],
)
def test_unwritable_report(output: str, expected: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "taken.json").write_text("mine")
    outcome = run("report", trace, "-o", tmp_path / output)
    assert outcome.code == (2 if output == "r.pdf" else 1)
    assert re.search(expected, outcome.lines[-1]), outcome.err
    assert (tmp_path / "taken.json").read_text() == "mine"


@pytest.mark.parametrize("output", ["file", "other", "/proc/run"])
def test_unwritable_import(output: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    outcome = run("import", trace, "-o", tmp_path / output, "--force")
    assert (outcome.code, len(outcome.lines)) == (1, 1)
    assert "choose another -o" in outcome.lines[0]
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "other" / "thesis.tex").read_text() == "mine"


@pytest.fixture
def full_disk() -> Iterator[Path]:
    """A file system of 80 KiB: one small run and the claim on its place."""
    with tmpfs("size=80k") as place:
        yield place


def _large_trace() -> bytes:
    import random

    trace = small_trace()
    rng = random.Random(0)
    for i in range(8000):
        trace.op(f"op{rng.random()}", 20_000 + i * 100, rng.randrange(100))
    return trace.encode_gzip()


def test_full_disk(full_disk: Path, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json.gz", _large_trace())
    outcome = run("import", trace, "-o", full_disk / "run")
    assert outcome.code == 1
    assert outcome.lines == [
        f"chopper: {full_disk}/run: cannot be written (No space left on device)"
    ]
    assert list(full_disk.iterdir()) == []
    outcome = run("report", trace, "-o", full_disk / "r.html")
    assert outcome.code == 1
    assert "r.html: cannot be written (No space left on device)" in outcome.lines[-1]
    assert list(full_disk.iterdir()) == []


def test_full_disk_keeps_the_run_that_was_there(full_disk: Path, tmp_path: Path) -> None:
    small = write(tmp_path / "small.json", GOOD)
    target = full_disk / "run"
    assert run("import", small, "-o", target).code == 0
    before = analyzed(target)
    large = write(tmp_path / "t.json.gz", _large_trace())
    outcome = run("import", large, "-o", target, "--force")
    assert outcome.code == 1
    assert "No space left on device" in outcome.lines[-1]
    assert same(analyzed(target), before)
    assert [p.name for p in full_disk.iterdir()] == ["run"]


def test_run_on_a_full_disk_is_still_read(full_disk: Path, tmp_path: Path) -> None:
    target = full_disk / "run"
    assert run("import", write(tmp_path / "small.json", GOOD), "-o", target).code == 0
    before = analyzed(target)
    with contextlib.suppress(OSError), (full_disk / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(bytes(512))
    assert same(analyzed(target), before)
    assert not list(full_disk.rglob("*.tmp"))


def test_exit_codes_of_a_real_process(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    assert process("analyze", trace, "--json").code == 0
    bad = process("analyze", tmp_path / "none.json")
    assert (bad.code, bad.out) == (1, "")
    assert bad.line == f"chopper: {tmp_path}/none.json: no such file or directory"
    usage = process("analyze", trace, "--by", "colour")
    assert usage.code == 2
    assert "Traceback" not in usage.err
    assert process("analyse", trace).code == 2
    assert process("import").code == 2


def test_results_to_a_full_device(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    with Path("/dev/full").open("w") as full:
        ended = process("analyze", trace, "--json", stdout=full)
    assert ended.code == 1
    assert ended.line == ("chopper: standard output: cannot be written (No space left on device)")


def ordinary(*arguments: str | Path) -> Outcome:
    """Run as somebody whom permissions bind: root only without its powers."""
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root obeys permissions only through setpriv, which is not here")
        prefix = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
    return process(*arguments, prefix=prefix)


@contextlib.contextmanager
def modes(mode: int, *paths: Path) -> Iterator[None]:
    before = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(mode)
    try:
        yield
    finally:
        for path, old in zip(paths, before, strict=True):
            path.chmod(old)


def test_read_only_run_and_places(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    trace = write(shared / "t.json", GOOD)
    assert run("import", trace, "-o", shared / "run").code == 0
    whole = analyzed(shared / "run")
    with modes(0o555, shared, shared / "run", shared / "run" / "rank-00000"):
        ended = ordinary("analyze", shared / "run", "--json")
        assert ended.code == 0, ended.err
        assert same(json.loads(ended.out), whole)
        for command in (
            ("import", trace, "-o", shared / "mine"),
            ("import", trace, "-o", shared / "run", "--force"),
            ("report", trace, "-o", shared / "r.json"),
        ):
            ended = ordinary(*command)
            assert ended.code == 1, ended.err
            assert "Permission denied" in ended.line
    assert same(analyzed(shared / "run"), whole)


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    assert run("import", trace, "-o", tmp_path / "run").code == 0
    closed = tmp_path / "closed"
    closed.mkdir()
    with modes(0, trace, tmp_path / "run" / "manifest.json", closed):
        for source in ("t.json", "run", "closed"):
            ended = ordinary("analyze", tmp_path / source)
            assert ended.code == 1
            line = ended.line
            assert line.startswith(f"chopper: {tmp_path / source}")
            assert "cannot be read (Permission denied)" in line
