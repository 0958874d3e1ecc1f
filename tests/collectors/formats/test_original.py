"""The events of a trace file, passed on as they were written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from chopper.collectors.formats.kineto import original
from chopper.collectors.formats.kineto.original import OriginalTrace
from tests.kineto_writer import DIALECTS, NANOSECONDS, Dialect, Trace, small_trace


def passed_on(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the events and the header that are passed on; numbers with the digits they have."""
    trace = OriginalTrace(path)
    blocks = [block for block in trace.blocks() if block.strip()]
    return _decoded(b"[%b]" % b",".join(blocks)), {
        name: _decoded(bytes(text)) for name, text in trace.header.items()
    }


def _decoded(text: bytes) -> Any:
    return json.loads(text, parse_float=str, parse_int=str)


def rich_trace(dialect: Dialect) -> Trace:
    """A trace with arrows, an instant, a counter, and lists of objects among the arguments."""
    trace = small_trace(dialect)
    at = {"cat": "ac2g", "name": "ac2g", "pid": 4711, "tid": 4711}
    trace.events += [
        {"ph": "s", "id": 1, "ts": 2_000, **at},
        {"ph": "f", "id": 1, "ts": 3_001, "bp": "e", **at},
    ]
    trace.memory(4_000, 512, 1024, 2048)
    trace.counter("GPU power", 5_003, watts=301.5)
    frames = [{"name": "frame"}, {"name": "}, {"}, {"lines": [{"n": 1}, {"n": 2}]}]
    trace.annotation("odd", 6_000, 10)
    trace.events[-1]["args"] = {"frames": frames}
    return trace


@pytest.mark.parametrize("block_bytes", [64, 1 << 22])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_events_and_header_are_as_they_were_written(
    dialect: Dialect, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(original, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "trace.json.gz"
    text = rich_trace(dialect).encode()
    path.write_bytes(gzip.compress(text))
    whole = _decoded(text)
    header = {} if isinstance(whole, list) else whole
    wanted = whole if isinstance(whole, list) else header.pop("traceEvents")
    events, members = passed_on(path)
    assert members == header
    if dialect is NANOSECONDS:
        # A viewer reads microseconds.
        for event in wanted:
            for name in event.keys() & {"ts", "dur"} if event["ts"] != "0" else ():
                number = int(event[name])
                event[name] = f"{number // 1000}.{number % 1000:03d}"
    assert events == wanted


@pytest.mark.parametrize("block_bytes", [64, 1 << 22])
def test_of_a_damaged_file_everything_before_the_damage_is_passed_on(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(original, "_BLOCK_BYTES", block_bytes)
    text = small_trace().encode()
    wanted = _decoded(text)["traceEvents"]
    path = tmp_path / "trace.json"
    at = text.index(b'"aten::add"')
    path.write_bytes(text[:at])
    events, header = passed_on(path)
    count = next(i for i, e in enumerate(wanted) if e["name"] == "aten::add")
    assert events == wanted[:count]
    assert header["schemaVersion"] == "1"
    path.write_bytes(text.replace(b'"grid": [8,1,1]', b'"grid": [NaN,1,1]', 1))
    events, _ = passed_on(path)
    assert sum(a != b for a, b in zip(events, wanted, strict=True)) == 1
    packed = gzip.compress(text, mtime=0)
    path.write_bytes(packed[: len(packed) // 2])
    events, _ = passed_on(path)
    assert events == wanted[: len(events)]
    assert events


def test_entries_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = small_trace().encode()
    path.write_bytes(text.replace(b'"traceEvents": [', b'"traceEvents": [null, 7, [],'))
    assert passed_on(path)[0] == _decoded(text)["traceEvents"]


def test_a_header_that_is_no_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = small_trace().encode()
    path.write_bytes(text.replace(b'"name":"NVIDIA', b'"name":"\xc3NVIDIA', 1))
    events, header = passed_on(path)
    assert events == _decoded(text)["traceEvents"]
    assert header["deviceProperties"][0]["name"].startswith("\N{REPLACEMENT CHARACTER}NVIDIA")
