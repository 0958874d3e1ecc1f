"""The scanner in C against the reader in Python: the same from every text, whole or damaged.

The scanner is also built with the address and undefined-behaviour sanitizers and fed tens of
thousands of damaged texts, in pieces that end anywhere (``fuzz_scan.py``). By hand, for longer:

    python tests/collectors/formats/fuzz_scan.py --sanitize --count 1000000
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chopper.collectors.formats import kineto, unpack
from chopper.collectors.formats.kineto import (
    ParsedTrace,
    _events,
    _native,
    read_trace,
)
from chopper.collectors.formats.kineto._native import scan_file
from chopper.errors import InputError
from tests.collectors.formats.scan_cases import Writer, mutated
from tests.conftest import find_traces_dir
from tests.sanitizing import HAS_COMPILER, run_program, skip_without_sanitizers

Scanner: Any = getattr(_native, "Scanner", None)
pytestmark = pytest.mark.skipif(
    not _native.SCANS and not HAS_COMPILER, reason="no C compiler: the scanner was not built"
)

Outcome = str | list[ParsedTrace]


def test_scanner_was_built() -> None:
    """Where there is a compiler, the fast way is there: nobody would see it missing."""
    assert _native.SCANS


def outcome(path: Path) -> Outcome:
    try:
        return read_trace(path)
    except InputError as exc:
        return str(exc)


def outcome_in_python(path: Path) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto, "scan_file", lambda _: None)
        return outcome(path)


def heads(trace: ParsedTrace) -> ParsedTrace:
    return replace(trace, tables={})


def assert_same(found: Outcome, expected: Outcome) -> None:
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert [heads(t) for t in found] == [heads(t) for t in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours.tables) == list(theirs.tables)
        for name, table in theirs.tables.items():
            # Order of rows and of dictionaries included.
            assert ours.tables[name].equals(table, check_metadata=True), name


def check(path: Path) -> bool:
    """Read both ways; whether the scanner accepted the file."""
    assert_same(outcome(path), outcome_in_python(path))
    return scan_file(path) is not None


# ------------------------------------------------------------------ equality


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    odd=st.sampled_from((0.0, 0.02, 0.2)),
    count=st.integers(0, 12),
    damage=st.sampled_from((False, False, True)),
)
@example(seed=25, odd=0.2, count=2, damage=False)  # what is left is no event but has a time
def test_same_as_in_python(
    tmp_path_factory: pytest.TempPathFactory, seed: int, odd: float, count: int, damage: bool
) -> None:
    rng = random.Random(seed)
    text = Writer(rng, odd).trace(count)
    if damage:
        text = mutated(text, rng)
    path = tmp_path_factory.getbasetemp() / "scan.json"
    path.write_bytes(text)
    accepted = check(path)
    if odd == 0 and not damage:
        # What is plain must not need the slow way.
        json.loads(text)
        assert accepted


@pytest.mark.parametrize("packed", [False, True])
def test_large_file_in_many_pieces(tmp_path: Path, packed: bool) -> None:
    text = Writer(random.Random(7), 0.0).trace(20_000)
    path = tmp_path / "large.json"
    path.write_bytes(gzip.compress(text, 1) if packed else text)
    assert check(path)


_LARGE_BYTES = 1_500_000


def _real() -> list[Any]:
    root = find_traces_dir()
    if root is None:
        return []
    return [
        pytest.param(
            str(p.relative_to(root)),
            marks=pytest.mark.long if p.stat().st_size > _LARGE_BYTES else (),
        )
        for p in sorted(root.rglob("*.json.gz"))
    ]


@pytest.mark.parametrize("name", _real())
def test_real_and_broken_traces(traces_dir: Path, name: str) -> None:
    accepted = check(traces_dir / name)
    if "derived-broken" not in name and not any(
        part in name for part in ("mtia", "memory-timeline", "rocprofv3")
    ):
        assert accepted


# ------------------------------------------------------------------ what is accepted


def event(**members: str) -> str:
    usual = {
        "ph": '"X"',
        "cat": '"kernel"',
        "name": '"k"',
        "pid": "0",
        "tid": "7",
        "ts": "1",
        "dur": "2",
        "args": '{"correlation": 5, "stream": 7}',
    }
    return json_object({k: v for k, v in {**usual, **members}.items() if v})


def json_object(members: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{k}": {v}' for k, v in members.items()) + "}"


def trace(*events: str, **header: str) -> bytes:
    listed = ",\n".join(events)
    return json_object({**header, "traceEvents": f"[{listed}]"}).encode()


def write(tmp_path: Path, text: bytes) -> Path:
    path = tmp_path / "t.json"
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"dur": ""},
        {"dur": "null"},
        {"dur": "-4.25"},
        {"dur": "18446744073709551615"},
        {"dur": "18446744073709551.615"},
        {"ts": ""},
        {"ts": '"12.5"', "dur": '"7"'},
        {"ts": "1669783687464181.123"},
        {"ts": "1.2500000"},
        {"name": ""},
        {"name": '"caf\\u00e9 \\ud83d\\ude00"'},
        {"cat": ""},
        {"cat": '"nobody\'s"'},
        {"pid": '"rank1_4711"', "tid": '"stream 7"'},
        {"args": ""},
        {"args": "null"},
        {"args": '{"correlation": "17", "correlation": 18, "grid": [1, 2,3]}'},
        {"args": '{"est. achieved occupancy %": 33.25}'},
        {"args": '{"Collective name": "allreduce", "dtype": "Float", "Seq": 3}'},
        {"more": "[" * 50 + "]" * 50},
        {"args": '{"External id": 1}, "args": {"correlation": 2}'},
    ],
)
def test_accepts(tmp_path: Path, members: dict[str, str]) -> None:
    # The second event keeps the trace usable whatever becomes of the first.
    assert check(write(tmp_path, trace(event(**members), event(ts="9"))))


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"ts": "1e3"}, "exponent"),
        ({"ts": "1.0005"}, "three decimals"),
        ({"ts": "99999999999999999999"}, "three decimals"),
        ({"ts": "9300000000000000"}, "64 bits"),
        ({"ts": '" 5"'}, "no number"),
        ({"ts": "true"}, "expected a value"),
        ({"pid": "1.5"}, "no integer"),
        ({"pid": "18446744073709551615"}, "64 bits"),
        ({"name": "5"}, "expected a string"),
        ({"name": '"\\ud83d"'}, "surrogate"),
        ({"ph": "null"}, "expected a string"),
        ({"cat": '"\\u006bernel"'}, "escape in a category"),
        ({"cat": '"mtia_ccp_events"'}, "another way"),
        ({"args": "[]"}, "object of arguments"),
        ({"args": '{"correlation": 1.5}'}, "no integer"),
        ({"args": '{"correlation": "x"}'}, "no integer"),
        ({"args": '{"correlation": true}'}, "expected a value"),
        ({"args": '{"Collective name": 5}'}, "expected a string"),
        ({"args": '{"\\u0067rid": 5}'}, "escape in a key"),
        ({"more": "[" * 70 + "]" * 70}, "too deep"),
    ],
)
def test_refuses_and_python_decides(tmp_path: Path, members: dict[str, str], why: str) -> None:
    text = trace(event(**members), event(ts="9"))
    with pytest.raises(ValueError, match=f"^byte \\d+: .*{why}"):
        feed(text, len(text))
    assert not check(write(tmp_path, text))


@pytest.mark.parametrize(
    ("members", "why", "code"),
    [
        ({"name": '"\\x"'}, "unknown escape", "event.repaired"),
        ({"name": '"a\tb"'}, "control character", "event.repaired"),
        ({"name": '"a "b", (c)"'}, "expected , or }", "event.repaired"),
        ({"name": '"C:\\torch\\x.py\\"'}, "unknown escape", "event.repaired"),
        ({"name": '"open'}, "expected , or }", "event.not_json"),
        ({"args": '{"grid": [1, 2,]}'}, "expected a value", "event.repaired"),
        ({"ts": "nan"}, "expected a value", "trace.nan"),
        ({"ts": "-nan(ind)"}, "expected a value", "trace.nan"),
        ({"dur": "-inf"}, "expected a value", "trace.nan"),
        ({"args": '{"est. achieved occupancy %": Infinity}'}, "expected a value", "trace.nan"),
        ({"dur": "01"}, "leading zero", "event.not_json"),
        ({"dur": "1."}, "decimals after its point", "event.not_json"),
        ({"dur": "-"}, "expected a value", "event.not_json"),
        ({"more": "[1, 2"}, "expected , or", "event.not_json"),
        ({"more": "nul"}, "expected a value", "event.not_json"),
    ],
)
def test_one_broken_event_is_fixed_or_left_out(
    tmp_path: Path, members: dict[str, str], why: str, code: str
) -> None:
    text = trace(event(), event(**members), event(ts="9"))
    with pytest.raises(ValueError, match=f"^byte \\d+: .*{why}"):
        feed(text, len(text))
    path = write(tmp_path, text)
    assert check(path)
    [found] = read_trace(path)
    codes = {f.code: f.count for f in found.findings if f.severity == "warning"}
    assert codes.pop(code) == 1
    assert set(codes) <= {"event.without_ts", "event.without_dur"}
    lost = code == "event.not_json" or "event.without_ts" in codes
    assert found.tables["device_event"].num_rows == (2 if lost else 3)


def test_many_broken_events_in_any_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        event(ts=str(2 * i), name=(f'"kernel "{i}""', '"a\\c"', '"plain"', '"open')[i % 4])
        for i in range(403)
    ]
    path = write(tmp_path, trace(*events))
    for text_bytes in (1, 1000, 1 << 24):
        monkeypatch.setattr(_native, "_TEXT_BYTES", text_bytes)
        assert check(path)
        [found] = read_trace(path)
        assert {f.code: f.count for f in found.findings} == {
            "event.repaired": 202,
            "event.not_json": 100,
        }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "ends early"),
        (b"  ", "ends early"),
        (b"5", "object or a list"),
        (b"{}", "no list of events"),
        (b'{"traceEvents": {}}', "list of events"),
        (b'{"traceEvents": [1]}', "expected an event"),
        (b'{"traceEvents": [],}', "expected a string"),
        (b'{"traceEvents": []} x', "after the end"),
        (b'{"traceEvents": [], "traceEvents": []}', "second list"),
        (b'{"trace\\u0045vents": []}', "escape in a key"),
        (b'{"traceEvents": [{},]}', "expected an event"),
        (b'{"traceEvents": [{}', "ends early"),
        (b'{"a": "\xff", "traceEvents": []}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80", "traceEvents": []}', "UTF-8"),
        (b'{"a": "\xc0\xaf", "traceEvents": []}', "UTF-8"),
        (b'\xef\xbb\xbf{"traceEvents": []}', "object or a list"),
    ],
)
def test_refuses_what_is_not_whole(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=f"^byte \\d+: .*{why}"):
        feed(text, max(len(text), 1))


def test_invalid_utf8_in_an_argument(tmp_path: Path) -> None:
    text = trace(event(args='{"grid": "x?y"}')).replace(b"?", b"\xea")
    path = write(tmp_path, text)
    assert not check(path)
    [found] = read_trace(path)
    assert found.tables["device_event"]["grid"].to_pylist() == ["x\N{REPLACEMENT CHARACTER}y"]


# ------------------------------------------------------------------ pieces


def scanner() -> Any:
    return _native.new_scanner()


def feed(text: bytes, *cuts: int, every: int = 0) -> list[Any]:
    """What the scanner finds in a text that comes in pieces, each in memory of its own."""
    found = scanner()
    ends = [*cuts, len(text)] if not every else [*range(every, len(text), every), len(text)]
    rest, start, shown = b"", 0, []
    for end in ends:
        rest += text[start:end]
        start = max(start, end)
        done = found.feed(bytearray(rest))
        rest = rest[done:]
        shown.append(found.take())
    header, groups, *others, (categories, seen), without = found.finish()
    columns = [[np.asarray(c).tobytes() for c in group] for group in groups]
    joined = [b",".join(s[i][0] for s in shown if s[i][0]) for i in range(3)]
    rows = [pair for s in shown for pair in s[2][1]]
    return [header, columns, *others, categories, np.asarray(seen).tolist(), without, joined, rows]


def test_every_cut_gives_the_same() -> None:
    text = Writer(random.Random(3), 0.0).trace(6)
    whole = feed(text)
    for cut in range(len(text) + 1):
        assert feed(text, cut) == whole
    for every in (1, 2, 3, 7, 64):
        assert feed(text, every=every) == whole


def test_sections_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many scan at a time, and wherever a section seems to begin."""
    # An object after an object is no event here, and neither is what looks like one in a string.
    doubtful = '[{"a": 1}, {"b": 2}, "}, {"]'
    words = [event(pid=f'"rank{i % 3}_7"', ts=str(i), more=doubtful) for i in range(60)]
    rng = random.Random(5)
    texts = [Writer(rng, 0.0).trace(20) for _ in range(20)]
    texts += [trace(*words), b"[%b]" % b",".join(one.encode() for one in words)]
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.json"
        path.write_bytes(text)
        whole = scan_file(path)
        assert whole is not None
        for text_bytes, threads in ((1, 2), (400, 2), (3000, 3), (400, 1)):
            monkeypatch.setattr(_native, "_TEXT_BYTES", text_bytes)
            monkeypatch.setattr(_native, "_ALONE_BYTES", text_bytes)
            monkeypatch.setattr(unpack, "_READ_TEXT_BYTES", 150)
            found = scan_file(path, threads=threads)
            monkeypatch.undo()
            assert found is not None
            assert replace(found, groups=[]) == replace(whole, groups=[])
            for ours, theirs in zip(found.groups, whole.groups, strict=True):
                assert [c.tolist() for c in ours] == [c.tolist() for c in theirs]


def test_text_after_the_events_of_a_section_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a section takes for its beginning may stand within a list that has ended."""
    monkeypatch.setattr(_native, "_TEXT_BYTES", 1)
    monkeypatch.setattr(unpack, "_READ_TEXT_BYTES", 100)
    one = event().encode()
    path = tmp_path / "trace.json"
    for text in (b"[%b], %b]" % (b",".join([one] * 9), one), b"[%b" % b",".join([one] * 9)):
        path.write_bytes(text)
        assert scan_file(path, threads=2) is None


def test_nothing_of_an_event_that_is_cut_off_stays() -> None:
    """The part of an event may be another one when it comes again."""
    found = scanner()
    assert found.feed(b'[{"ph": "X", "cat": "kernel", "args": {"correlation": 5, "str') == 1
    assert found.feed(b'{"ph": "X", "cat": "kernel", "args": {"stream": 3}}]') > 0
    columns = [np.asarray(c).tolist() for c in found.finish()[1][_events.DEVICE]]
    device, stream, correlation, *_ = columns[8:]
    assert (device, stream, correlation) == ([-(2**63)], [3], [-(2**63)])


def test_columns_outlive_the_scanner_and_are_not_copied() -> None:
    found = scanner()
    found.feed(trace(*(event(ts=str(i)) for i in range(5000))))
    column = found.finish()[1][_events.DEVICE][0]
    del found
    first, second = np.asarray(column), np.asarray(column)
    del column
    first[0] = -5
    assert second[0] == -5
    assert (second[1:] == np.arange(1, 5000) * 1000).all()


# ------------------------------------------------------------------ memory


def test_text_is_not_held(tmp_path: Path) -> None:
    """Events that are skipped need no memory, however many."""
    flow = b'{"ph": "f", "id": 5, "pid": 1, "tid": 1, "ts": 1.5, "cat": "ac2g", "name": "ac2g"}'
    text = b'{"traceEvents": [' + b",\n".join([flow] * 200_000) + b"," + event().encode() + b"]}"
    path = tmp_path / "flows.json.gz"
    path.write_bytes(gzip.compress(text, 1))
    tracemalloc.start()
    assert scan_file(path) is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) > 15e6
    assert peak < 4e6


@pytest.mark.parametrize("count", [500, pytest.param(3000, marks=pytest.mark.long)])
def test_sanitized_build_survives_damage(tmp_path: Path, count: int) -> None:
    """Out-of-bounds access, undefined behaviour and leaks, over many damaged texts."""
    skip_without_sanitizers(tmp_path)
    done = run_program("tests/collectors/formats/fuzz_scan.py", "--sanitize", "--count", str(count))
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"{count} texts" in done.stdout


def test_what_cannot_be_read_twice_is_not_scanned(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert scan_file(fifo) is None
    assert scan_file(tmp_path) is None
    assert scan_file(tmp_path / "absent") is None


@pytest.mark.parametrize("damage", ["flip", "cut", "junk", "zeros", "members"])
def test_gzip_streams(tmp_path: Path, damage: str) -> None:
    text = trace(*(event(ts=str(i)) for i in range(3000)))
    packed = bytearray(gzip.compress(text))
    if damage == "flip":
        packed[-6] ^= 1
    elif damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "junk":
        packed += b"\x1f"
    elif damage == "zeros":
        packed += bytes(100)
    else:
        packed = bytearray(
            b"".join(gzip.compress(text[i : i + 999]) for i in range(0, len(text), 999))
        )
    accepted = check(write(tmp_path, bytes(packed)))
    assert accepted == (damage in ("junk", "zeros", "members"))


def test_no_pandas_on_the_way(tmp_path: Path) -> None:
    """pyarrow's own conversions would import it: 0.3 s and 50 MB."""
    path = write(tmp_path, trace(event(), event(cat='"cpu_op"'), event(cat='"cuda_runtime"')))
    code = (
        "import sys; from pathlib import Path; "
        "from chopper.collectors.formats.kineto import read_trace\n"
        "trace, = read_trace(Path(sys.argv[1])); trace.span_ns\n"
        "assert trace.tables['device_event'].num_rows == 1 and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
