"""A trace that cannot be used is refused in one line; what can be repaired gives the intact result.

Each case goes through the command line, in this process.
"""

from __future__ import annotations

import gzip
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.make import GOOD, PNG, analyzed, quality, refused, same, write
from tests.command import run
from tests.kineto_writer import Number, small_trace
from tests.kineto_writer import encode as encode_trace

REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is empty \(0 bytes\), expected a Kineto trace"),
    "blank": (b" \n\t\n", r"only white space"),
    "text": (b"hello\n", r"not JSON: found 'hello ?' at character 0, expected"),
    "number": (b"42", r"JSON, but not a trace: a number"),
    "string": (b'"trace"', r"JSON, but not a trace: a string"),
    "null": (b"null", r"JSON, but not a trace: null"),
    "list of numbers": (b"[1, 2, 3]", r"a list without trace events"),
    "list of lists": (b'[[1, "alloc", 2, 3]]', r"a list without trace events"),
    "open list": (b"[1, 2, 3", r"cut off and holds no event"),
    "other object": (b'{"nodes": []}', r"no traceEvents"),
    "open object": (b'{"nodes": [', r"not JSON"),
    "rocprofv3 of nothing": (b'{"rocprofiler-sdk-tool": []}', r"without a single usable event"),
    "open rocprofv3": (b'{"rocprofiler-sdk-tool": [', r"rocprofv3 JSON that cannot be read"),
    "no events": (b'{"traceEvents": []}', r"without a single usable event"),
    "empty list": (b"[]", r"without a single usable event"),
    "events are an object": (b'{"traceEvents": {"a": 1}}', r"traceEvents is an object, not a list"),
    "events are a number": (b'{"traceEvents": 5}', r"traceEvents is a number, not a list"),
    "events are null": (b'{"traceEvents": null}', r"traceEvents is null, not a list"),
    "events are numbers": (
        b'{"traceEvents": [1, 2]}',
        r"2 entries of traceEvents that are not obj",
    ),
    "events of another profiler": (
        b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "a", "ts": 1, "dur": 1}]}',
        r"categories that Kineto does not write: v8 \(1\)",
    ),
    "deep list": (b"[" * 100_000, r"not JSON|cut off"),
    "deep object": (b'{"a":' * 100_000, r"not JSON"),
    "deep whole list": (b"[" * 100_000 + b"]" * 100_000, r"not JSON|cut off"),
    "png": (PNG, r"is a PNG image"),
    "pickle": (pickle.dumps({"segments": []}), r"without a segment and without history"),
    "gzip of a pickle": (gzip.compress(pickle.dumps([1])), r"no snapshot of torch's allocator"),
    "binary": (bytes(range(256)) * 20, r"not JSON"),
    "sqlite": (b"SQLite format 3\x00" + bytes(100), r"SQLite database"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(50), r"compressed stream is damaged from its start"),
    "xz": (b"\xfd7zXZ\x00" + bytes(50), r"xz-compressed"),
    "gzip cut in its header": (
        gzip.compress(GOOD)[:8],
        r"compressed stream is damaged from its start",
    ),
    "gzip of nothing": (gzip.compress(b""), r"compressed stream|is empty"),
    "truncated before the events": (GOOD[: GOOD.index(b"traceEvents") - 5], r"not JSON"),
    "truncated in the first event": (GOOD[: GOOD.index(b'"ph"') + 9], r"without a single usable"),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.replace(" ", "-"))
def test_what_cannot_be_used_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    data, expected = REFUSED[case]
    path = write(tmp_path / "trace.json.gz", data)
    line = refused(path, tmp_path)
    assert line.startswith(f"{path}: "), line
    assert re.search(expected, line), line
    assert line.isprintable()


def test_zip_archive(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.json", GOOD)
    assert "zip archive; unpack it" in refused(path, tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    line = refused(tmp_path / "nothing.json", tmp_path)
    assert line == f"{tmp_path}/nothing.json: no such file or directory"


def test_impossible_name(tmp_path: Path) -> None:
    assert "cannot be read (File name too long)" in refused("x" * 5000, tmp_path)


def test_pattern_without_matches(tmp_path: Path) -> None:
    assert "the pattern matches no file" in refused(tmp_path / "*.json", tmp_path)


def test_directory_without_traces(tmp_path: Path) -> None:
    (tmp_path / "d" / "deeper").mkdir(parents=True)
    (tmp_path / "d" / "notes.txt").write_text("x")
    assert "a directory without traces" in refused(tmp_path / "d", tmp_path)
    write(tmp_path / "d" / "deeper" / "t.json", GOOD)
    assert re.search(r"traces deeper in it, pass '.*/\*/\*", refused(tmp_path / "d", tmp_path))


def test_directory_of_runs_names_one(tmp_path: Path) -> None:
    write(tmp_path / "t.json", GOOD)
    assert run("import", tmp_path / "t.json", "-o", tmp_path / "runs" / "a").code == 0
    line = refused(tmp_path / "runs", tmp_path)
    assert line.endswith(f"it holds runs, pass one of them: {tmp_path}/runs/a")


def test_device_file_is_refused(tmp_path: Path) -> None:
    assert "is empty" in refused("/dev/null", tmp_path)


def _with(document_edit: Callable[[dict[str, Any]], None], **how: Any) -> dict[str, Any]:
    document = small_trace(**how).document()
    document_edit(document)
    return document


def _text_edit(old: bytes, new: bytes) -> bytes:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


REPAIRED: dict[str, tuple[bytes, str | None]] = {
    "trailing comma": (_text_edit(b"\n  ],", b",\n  ],"), "trace.not_strict"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, "trace.byte_order_mark"),
    "utf-16": (GOOD.decode().encode("utf-16"), "trace.utf16"),
    "two gzip members": (gzip.compress(GOOD[:500]) + gzip.compress(GOOD[500:]), None),
    "gzip": (gzip.compress(GOOD), None),
    "zero padding after gzip": (gzip.compress(GOOD) + bytes(512), None),
    "text after": (GOOD + b"\nprofiler done", "trace.trailing_text"),
    "invalid utf-8 in a name": (
        _text_edit(b"Memcpy HtoD", b"Memcpy HtoD\xff\xfe"),
        "trace.invalid",
    ),
    "nan in args": (_text_edit(b'"cbid": 211', b'"cbid": NaN'), "trace.nan"),
    "infinity in args": (_text_edit(b'"cbid": 211', b'"cbid": -Infinity'), "trace.nan"),
    "huge integer in args": (_text_edit(b'"cbid": 211', b'"cbid": 1' + b"0" * 100), None),
    "events repeated": (
        _text_edit(
            b"\n  ],", b",\n" + GOOD[GOOD.index(b"[\n") + 2 : GOOD.index(b"\n  ],")] + b"\n  ],"
        ),
        "event.duplicate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REPAIRED, ids=lambda c: c.replace(" ", "-"))
def test_what_can_be_repaired_gives_the_intact_result(
    case: str, tmp_path: Path, intact: dict[str, Any]
) -> None:
    data, code = REPAIRED[case]
    found = analyzed(write(tmp_path / "t.json", data))
    assert same(found, intact)
    codes = set(quality(found)) - set(quality(intact))
    assert any(c.startswith(code) for c in codes) if code else not codes


def test_truncated_json_is_used_up_to_its_last_whole_event(tmp_path: Path) -> None:
    # Whole up to step 11's first kernel (13 000-15 000), cut in the operator after it.
    cut = GOOD.index(b'"aten::add"', GOOD.index(b"ProfilerStep#11"))
    found = analyzed(write(tmp_path / "t.json", GOOD[:cut]))
    finding = quality(found)["trace.truncated"]
    assert "breaks in the middle of event 16" in finding["message"]
    assert "the 15 events before it are used" in finding["message"]
    assert [r["steps_count"] for r in found["ranks"]] == [2]
    # Step 10 from 0 to 9 000, the second to the end of the last whole kernel.
    assert found["observed_ns"] == 15_000


def test_truncated_gzip_is_used_up_to_its_last_whole_event(tmp_path: Path) -> None:
    document = small_trace().document()
    for i in range(3000):
        document["traceEvents"].append(
            {"ph": "X", "cat": "cpu_op", "name": f"op{i * 7919 % 3000}", "pid": 1, "tid": 1}
            | {"ts": Number(f"{20 + i}.{i % 1000:03d}"), "dur": Number("0.500")}
        )
    data = gzip.compress(encode_trace(document))
    found = analyzed(write(tmp_path / "t.json.gz", data[: len(data) // 2]))
    codes = quality(found)
    assert "bytes of text before that are used" in codes["trace.truncated_gzip"]["message"]
    assert "trace.truncated" in codes
    assert found["observed_ns"] > 0


def test_damaged_gzip_is_used_up_to_the_damage(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(GOOD))
    data[-6] ^= 0xFF  # the checksum
    found = analyzed(write(tmp_path / "t.json.gz", bytes(data)))
    assert "trace.truncated_gzip" in quality(found)
    assert found["observed_ns"] == 19_000


def test_events_without_fields_are_counted(tmp_path: Path, intact: dict[str, Any]) -> None:
    def edit(document: dict[str, Any]) -> None:
        whole = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 4711, "tid": 9}
        whole |= {"ts": Number("1.000"), "dur": Number("1.000")}
        for key in ("ts", "dur", "name", "ph", "cat", "pid", "tid"):
            document["traceEvents"].append({k: v for k, v in whole.items() if k != key})
        document["traceEvents"] += [whole, 5, None, "x", [], {}]

    found = analyzed(write(tmp_path / "t.json", _with(edit)))
    assert found["observed_ns"] == intact["observed_ns"]
    counts = {code: f["count"] for code, f in quality(found).items() if code.startswith("event.")}
    assert counts == {
        "event.without_ts": 1,
        "event.without_dur": 1,
        "event.without_name": 1,
        "event.without_ph": 1,
        "event.without_category": 1,
        "event.not_an_object": 4,
    }


@pytest.mark.parametrize("dur", ["-5.000", "18446744073709551.615", "1e300", "9" * 200, '"long"'])
def test_impossible_durations_become_points(dur: str, tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        kernel = next(e for e in document["traceEvents"] if e["name"] == "gemm")
        kernel["dur"] = Number(dur)

    found = analyzed(write(tmp_path / "t.json", _with(edit)))
    assert {"event.negative_duration", "event.overflowing_duration"} & set(quality(found))
    assert found["observed_ns"] == 19_000


def test_deep_event_is_skipped_or_cut(tmp_path: Path) -> None:
    deep = b'{"ph": "X", "args": {"Input Dims": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}"
    data = GOOD.replace(b"\n  ],", b",\n" + deep + b"\n  ],", 1)
    found = analyzed(write(tmp_path / "t.json", data))
    assert found["observed_ns"] == 19_000
    assert {"trace.truncated", "event.nested_too_deep"} & set(quality(found))


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda d: d["traceEvents"].clear() or d["traceEvents"].extend(
            e for e in small_trace(platform="cpu").document()["traceEvents"]
        ), "trace.no_device_events"),
        (lambda d: d.update(traceEvents=[
            e for e in d["traceEvents"] if "ProfilerStep" not in e["name"]]), "trace.no_steps"),
        (lambda d: [e["args"].pop("Input Dims", 0) for e in d["traceEvents"]], "trace.no_shapes"),
    ],
    ids=["no-device-events", "no-steps", "no-shapes"],
)  # fmt: skip
def test_what_is_missing_is_said(edit: Any, code: str, tmp_path: Path) -> None:
    found = analyzed(write(tmp_path / "t.json", _with(edit)))
    assert code in quality(found)
    # A trace of another's making is no recording of chopper's: its options are no advice here.
    assert "--no-shapes" not in quality(found)[code]["message"]
    assert found["observed_ns"] > 0


def test_nothing_to_attribute_is_said_in_every_form(tmp_path: Path) -> None:
    def only_a_step(document: dict[str, Any]) -> None:
        document["traceEvents"] = document["traceEvents"][:1]

    path = write(tmp_path / "t.json", _with(only_a_step))
    found = analyzed(path)
    assert found["observed_ns"] == 0
    assert found["causes"] == []
    assert quality(found)["trace.no_events"]["severity"] == "error"
    for suffix in ("html", "md", "txt", "json"):
        outcome = run("report", path, "-o", tmp_path / f"r.{suffix}")
        assert outcome.code == 0, outcome.err
        text = (tmp_path / f"r.{suffix}").read_text().lower()
        assert "no event can be attributed" in text
    for level in ("step", "phase", "layer", "op", "kernel", "rank"):
        assert run("analyze", path, "--by", level).code == 0
        assert run("analyze", path, "--by", level, "--csv").code == 0


def test_a_report_of_a_damaged_trace_shows_the_finding(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", GOOD[:-300])
    for suffix in ("html", "md", "txt", "json"):
        outcome = run("report", path, "-o", tmp_path / f"r.{suffix}")
        assert outcome.code == 0, outcome.err
        assert "JSON ends" in (tmp_path / f"r.{suffix}").read_text()
