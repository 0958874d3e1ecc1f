"""Attributions that are kept for later commands: the same answers, and never an old one."""

from __future__ import annotations

import gzip
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chopper
from benchmarks._ranks import write_ranks
from chopper import attribution_cache, pipeline
from chopper.analyzers import findings
from chopper.analyzers.trace import rank_join
from chopper.attribution_cache import Entry, entry_of
from chopper.views import VIEWS, view
from tests import command

ROOT = Path(__file__).parents[1]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Traces of two ranks, as plain text."""
    return _written(tmp_path / "traces", 2)


def _written(folder: Path, count: int) -> Path:
    write_ranks(folder, count, 800)
    for file in folder.glob("*.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    return folder


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were joined."""
    seen: list[int] = []
    join = rank_join.join_rank

    def noted(inputs: Any) -> Any:
        seen.append(inputs.rank)
        return join(inputs)

    monkeypatch.setattr(pipeline, "join_rank", noted)
    return seen


def analyzed(*words: str | Path) -> str:
    return command.run("analyze", *words, "--json").out


def entry(traces: Path) -> Entry:
    found = entry_of([str(traces)])
    assert found is not None
    return found


def kept() -> list[Path]:
    """The attributions in the cache, without the answers about them."""
    return sorted(attribution_cache._folder().glob(64 * "[0-9a-f]"))


@pytest.fixture(params=["traces", "imported", "some ranks in detail"])
def source(request: pytest.FixtureRequest, traces: Path, tmp_path: Path) -> Path:
    if request.param == "imported":
        command.run("import", traces, "-o", tmp_path / "run")
        return tmp_path / "run"
    if request.param == "some ranks in detail":
        request.getfixturevalue("monkeypatch").setattr(pipeline, "MOST_ROWS", 0)
    return traces


def test_a_second_command_joins_nothing_and_says_the_same(source: Path, joined: list[int]) -> None:
    first = analyzed(source)
    assert {*joined} == {0, 1}
    joined.clear()
    assert analyzed(source) == first
    there = entry_of([str(source)], *[None] * 5)
    assert there is not None
    again, anew = there.read(), pipeline.attribute(pipeline.read(str(source)))
    assert again is not None
    joined.clear()
    for name in VIEWS:
        assert view(again, name).equals(view(anew, name)), name
    assert joined == []
    assert again.findings == anew.findings
    assert again.pieces.equals(anew.pieces)


def test_queries_and_the_library_use_what_commands_kept(traces: Path, joined: list[int]) -> None:
    run = chopper.load(str(traces))
    first = run.attribution.view("kernels").arrow()
    assert {*joined} == {0, 1}
    joined.clear()
    said = command.run("query", traces, "FROM kernels", "--format", "csv").out
    assert len(said.splitlines()) == 1 + first.num_rows
    assert chopper.attribute(str(traces)).view("kernels").arrow().equals(first)
    assert chopper.load(str(traces)).view("kernels").arrow().equals(first)
    assert joined == []
    # A run that was read before its files changed is attributed as it was read.
    other = chopper.load(str(traces))
    _changed_in_place(traces / "rank-0.json")
    assert other.view("kernels").arrow().equals(first)
    assert {*joined} == {0, 1}


def _changed_in_place(file: Path) -> None:
    """Change a kernel's time: the file has the size and the time of change that it had."""
    before, text = file.stat(), file.read_bytes()
    at = text.index(b'"dur": ', text.index(b'"cat": "kernel"')) + len(b'"dur": ')
    file.write_bytes(text[:at] + (b"2" if text[at : at + 1] == b"1" else b"1") + text[at + 1 :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _with_a_rank_more(file: Path) -> None:
    _written(file.parent, 3)


@pytest.mark.parametrize("change", [_changed_in_place, _with_a_rank_more, Path.unlink])
def test_changed_inputs_are_read_again(
    traces: Path, joined: list[int], change: Callable[[Path], None]
) -> None:
    first = analyzed(traces)
    joined.clear()
    change(traces / "rank-0.json")
    assert analyzed(traces) != first
    assert joined


def test_another_chopper_reads_again(
    traces: Path, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    analyzed(traces)
    joined.clear()
    monkeypatch.setattr(attribution_cache, "_code", lambda: b"another")
    analyzed(traces)
    assert {*joined} == {0, 1}


def test_what_the_user_chose_has_an_entry_of_its_own(traces: Path, joined: list[int]) -> None:
    every = analyzed(traces)
    some = analyzed(traces, "--ranks", "1")
    joined.clear()
    assert analyzed(traces, "--ranks", "1") == some
    assert analyzed(traces) == every
    assert joined == []


def test_a_damaged_entry_is_not_used(traces: Path, joined: list[int]) -> None:
    first = analyzed(traces)
    [file] = kept()
    whole = file.read_bytes()
    flipped = (
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        for at in range(0, len(whole), len(whole) // 40)
    )
    cut = (whole[: len(whole) * part // 10] for part in range(10))
    there = entry_of([str(traces)], *[None] * 5)
    assert there is not None
    for damaged in itertools.chain(flipped, cut, [whole + b"x"]):
        file.write_bytes(damaged)
        assert there.read() is None
    joined.clear()
    assert analyzed(traces) == first
    assert {*joined} == {0, 1}
    assert file.read_bytes()[:100] == whole[:100]
    # Damaged answers are made again.
    for answer in file.parent.glob(f"{file.name}-*"):
        answer.write_bytes(answer.read_bytes()[:-1])
    joined.clear()
    assert analyzed(traces) == first
    assert joined == []
    # The entry of another run in its place is none, either.
    other = replace(there, key="0" * 64)
    file.rename(file.with_name(other.key))
    assert other.read() is None


def test_inputs_that_change_meanwhile_leave_no_entry(traces: Path) -> None:
    there, run = entry(traces), pipeline.attribute(pipeline.read(str(traces)))
    with next(traces.iterdir()).open("ab") as file:
        file.write(b"\n")
    there.write(run)
    assert kept() == []


def test_an_attribution_without_a_rank_is_not_kept(traces: Path) -> None:
    run = pipeline.attribute(pipeline.read(str(traces)))
    lost = replace(run, findings=[*run.findings, findings.of_lost(1, "too large")])
    entry(traces).write(lost)
    assert kept() == []
    entry(traces).write(run)
    assert len(kept()) == 1


def test_a_cache_that_cannot_be_written_changes_nothing(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = analyzed(traces)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert analyzed(traces) == first
    monkeypatch.setattr(attribution_cache, "_MOST_ENTRY_BYTES", 0)
    assert analyzed(traces) == first


def test_the_cache_is_bounded_and_holds_nothing_of_runs_that_are_gone(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = traces.rename(tmp_path / "other")
    analyzed(other)
    other.rename(traces)
    analyzed(traces)
    [file] = kept()
    os.utime(file, (0, 0))
    analyzed(traces, "--ranks", "1")
    assert file not in kept()
    analyzed(traces)
    monkeypatch.setattr(attribution_cache, "_MOST_BYTES", file.stat().st_size * 3 // 2)
    analyzed(traces, "--ranks", "0")
    assert len(kept()) == 1


def test_commands_at_the_same_time_say_the_same(traces: Path) -> None:
    words = [sys.executable, "-m", "chopper", "analyze", str(traces), "--json"]
    together = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)
    ]
    said = {process.communicate()[0] for process in together}
    assert len(said) == 1
    assert "".join(said) == analyzed(traces)
    assert len(kept()) == 1
