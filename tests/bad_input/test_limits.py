"""Small files that would take a machine's memory: refused in one line, after few megabytes."""

from __future__ import annotations

import gzip
import pickle
import random
import re
import zlib
from pathlib import Path

import pytest

from chopper import limits
from chopper.collectors.formats import unpack
from tests import command
from tests.kineto_writer import small_trace

MIB = 1 << 20
BOMBS = {
    "zeros.json.gz": (b"", b"\0"),
    "blanks.json.gz": (b"", b" "),
    "brackets.json.gz": (b"", b"["),
    "braces.json.gz": (b"", b'{"a":'),
    "string.json.gz": (b'{"traceEvents":[{"name":"', b"a"),
    "events.json.gz": (
        b'{"traceEvents":[',
        b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1},',
    ),
    "rocprof.json.gz": (b'{"rocprofiler-sdk-tool":[{"x":"', b"a"),
    "log.csv.gz": (b"timestamp,gpu,power_w\n", b"1754586662.5,0,300\n"),
    "zeus.csv.gz": (
        b"start_time,window_name,elapsed_time,gpu0_energy\n",
        b"1754586662.5,w,1.0,300\n",
    ),
    "rocprof.csv.gz": (b"Kernel_Name,Start_Timestamp,End_Timestamp\n", b"k,1000,2000\n"),
    "database.sqlite.gz": (b"SQLite format 3\0", b"\0"),
    "snapshot.pickle.gz": (b"\x80\x04", b"]"),
}


def bomb(path: Path, begin: bytes, repeated: bytes, size: int = 64 * MIB) -> Path:
    deflate = zlib.compressobj(6, wbits=31)
    piece = repeated * (MIB // len(repeated))
    parts = [deflate.compress(begin), *(deflate.compress(piece) for _ in range(size // MIB))]
    path.write_bytes(b"".join(parts) + deflate.flush())
    return path


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_unpacks_without_end_is_refused(name: str, tmp_path: Path) -> None:
    path = bomb(tmp_path / name, *BOMBS[name])
    done = command.run("analyze", path)
    assert done.code == 1
    unpacked = re.search(r"unpack to ([\d.]+) MiB, more than 200 times", done.line)
    assert unpacked is not None, done.line
    # Whatever follows was never unpacked.
    assert float(unpacked[1]) < 20
    assert "--max-input" in done.line


def test_the_limit_can_be_raised_and_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bomb(tmp_path / "blanks.json.gz", b"", b" ", 20 * MIB)
    monkeypatch.setenv(limits.VARIABLE, "1GB")
    assert "contains only white space" in command.run("analyze", path).line
    monkeypatch.setenv(limits.VARIABLE, "1KiB")
    trace = tmp_path / "trace.json"
    trace.write_bytes(small_trace().encode())
    assert "the limit of 1.00 KiB" in command.run("analyze", trace).line
    monkeypatch.setenv(limits.VARIABLE, "much")
    assert limits.VARIABLE in command.run("analyze", trace).line
    # The option is worth more than the environment, which it sets.
    assert command.run("--max-input", "1MiB", "analyze", trace).code == 0
    assert command.run("--max-input", "much", "analyze", trace).code == 2


def test_a_file_that_fits_no_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b" " * (17 * MIB) + b"[")
    monkeypatch.setattr(limits, "usable_memory_bytes", lambda: 10 * MIB)
    assert "of memory, but only 10.0 MiB are free" in command.run("analyze", path).line


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"timestamp,gpu,power_w\n1754586662,0,300\n" + b"1" * (2 * MIB))
    assert "line 3 has more than 1 MiB" in command.run("analyze", path).line


def test_more_devices_than_any_host_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = "".join(f"1754586662,{i},300\n" for i in range(5_000))
    path.write_text(f"timestamp,gpu,power_w\n{rows}")
    assert "more than 4096 devices" in command.run("analyze", path).line


def test_a_log_that_is_cut_off_loses_its_last_row_only(tmp_path: Path) -> None:
    """A number that is cut off is another number: 30 for 300."""
    rows = "".join(f"{1754586662 + i}.{i * 7919 % 997},0,{300 + i % 7}\n" for i in range(20_000))
    packed = gzip.compress(f"timestamp,gpu,power_w\n{rows}".encode(), mtime=0)
    path = tmp_path / "log.csv.gz"
    path.write_bytes(packed[: len(packed) // 2])
    lines: list[str] = []
    with pytest.raises(EOFError, match="end"):
        lines.extend(unpack.lines(path, held_ratio=1))
    assert len(lines) > 8_000
    assert set(lines[1:]) <= set(rows.splitlines(keepends=True))


ENTRY = {"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 1, "frames": []}
BLOCK = {"size": 512, "state": "active_allocated", "frames": [], "address": 1}


@pytest.mark.parametrize("what", ["entries", "traces", "blocks"])
def test_a_snapshot_whose_lists_share_their_entries_is_refused(what: str, tmp_path: Path) -> None:
    """A reference takes two bytes, and stands for a row of a kilobyte."""
    segments: list[object] = []
    traces: list[object] = []
    if what == "blocks":
        blocks = [BLOCK] * 1_000
        segments = [{"device": 0, "address": i, "blocks": blocks} for i in range(100)]
    else:
        traces = [[ENTRY] * 50_000] if what == "entries" else [[dict(ENTRY)] * 100] * 5_000
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces}, protocol=4))
    assert path.stat().st_size < 200_000
    assert "more than its bytes can hold" in command.run("analyze", path).line


def test_call_stacks_of_a_snapshot_are_bounded(tmp_path: Path) -> None:
    frames = [{"filename": f"{i}" + "f" * 290, "line": i, "name": "n" * 290} for i in range(64)]
    entries = [{**ENTRY, "frames": random.sample(frames, 64)} for _ in range(3_000)]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [entries]}, protocol=4))
    done = command.run("analyze", path)
    assert "more than 64 MiB of call stacks" in done.line
