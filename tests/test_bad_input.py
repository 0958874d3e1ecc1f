"""Bad input: an answer, or one clear line and exit code 1; never a traceback, nothing lost.

Each case goes through the command line, in this process; some also through a real subprocess.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import chopper
from chopper import cli
from chopper.errors import ChopperError
from chopper.manifest import RankManifest, encode
from chopper.run import RunWriter, StreamWriter, finalize
from chopper.tables import TABLES
from tests.conftest import tmpfs
from tests.kineto_writer import (
    EPOCH_FRACTION,
    EPOCH_WHOLE,
    NANOSECONDS,
    TODAY,
    Number,
    small_trace,
)
from tests.kineto_writer import encode as encode_trace

PROGRESS = re.compile(r"chopper: .* …$")
"""Printed by whatever takes more than a second: not a message."""


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if not PROGRESS.match(line)]


def run(*arguments: str | Path) -> Outcome:
    """The whole command, as the entry point runs it."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["chopper", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as exc:
                code = exc.code if isinstance(exc.code, int) else 0
    finally:
        sys.argv = argv
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(source: str | Path, tmp_path: Path) -> str:
    """The one line that all three commands print for a source that cannot be used."""
    report, made = tmp_path / "made.json", tmp_path / "made-run"
    said = set()
    for command in (
        ("analyze", source, "--json"),
        ("report", source, "-o", report),
        ("import", source, "-o", made),
    ):
        outcome = run(*command)
        assert outcome.code == 1, outcome
        assert outcome.out == ""
        (line,) = outcome.lines
        assert line.startswith("chopper: ")
        said.add(line.removeprefix("chopper: "))
    assert not report.exists()
    assert not made.exists()
    assert len(said) == 1, said
    return said.pop()


def analyzed(*sources: str | Path) -> dict[str, Any]:
    """The attribution of a source that can be used, with exact closure."""
    outcome = run("analyze", *sources, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.lines == []
    found: dict[str, Any] = json.loads(outcome.out)
    parents = {c["parent"] for c in found["causes"]}
    leaves = [c["time_ns"] for c in found["causes"] if c["id"] not in parents]
    assert sum(leaves) == found["observed_ns"]
    return found


def quality(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f["code"]: f for f in found["quality"]}


def write(path: Path, data: bytes | dict[str, Any]) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else encode_trace(data))
    return path


@pytest.fixture(scope="module")
def intact() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return analyzed(write(Path(folder) / "t.json", small_trace().encode()))


def same(found: dict[str, Any], intact: dict[str, Any]) -> bool:
    return bool(
        found["observed_ns"] == intact["observed_ns"] and found["causes"] == intact["causes"]
    )


# ---------------------------------------------------------------- what cannot be used

GOOD = small_trace().encode()
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is empty \(0 bytes\), expected a Kineto trace"),
    "blank": (b" \n\t\n", r"nothing but blanks"),
    "text": (b"hello\n", r"not JSON: found 'hello ?' at character 0, expected"),
    "number": (b"42", r"JSON of another kind: a number"),
    "string": (b'"trace"', r"JSON of another kind: a string"),
    "null": (b"null", r"JSON of another kind: null"),
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
    "events are numbers": (b'{"traceEvents": [1, 2]}', r"2 entries of traceEvents that are no obj"),
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
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(50), r"zstd-compressed; decompress it first"),
    "xz": (b"\xfd7zXZ\x00" + bytes(50), r"xz-compressed"),
    "gzip cut in its header": (gzip.compress(GOOD)[:8], r"gzip stream is damaged from its start"),
    "gzip of nothing": (gzip.compress(b""), r"gzip stream|is empty"),
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


# ---------------------------------------------------------------- what can be repaired


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
    "invalid utf-8 in a name": (_text_edit(b"Memcpy HtoD", b"Memcpy HtoD\xff\xfe"), "trace.invalid"),
    "nan in args": (_text_edit(b'"cbid": 211', b'"cbid": NaN'), "trace.nan"),
    "infinity in args": (_text_edit(b'"cbid": 211', b'"cbid": -Infinity'), "trace.nan"),
    "huge integer in args": (_text_edit(b'"cbid": 211', b'"cbid": 1' + b"0" * 100), None),
    "events repeated": (
        _text_edit(b"\n  ],", b",\n" + GOOD[GOOD.index(b"[\n") + 2 : GOOD.index(b"\n  ],")] + b"\n  ],"),
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
    assert [r["steps"] for r in found["ranks"]] == [2]
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


def test_everything_as_text(tmp_path: Path, intact: dict[str, Any]) -> None:
    def edit(document: dict[str, Any]) -> None:
        for event in document["traceEvents"]:
            for key in ("ts", "dur"):
                if key in event and event["ph"] == "X":
                    event[key] = Number(json.dumps(event[key].text))
            event["pid"], event["tid"] = str(event["pid"]), str(event["tid"])
            for key, value in event["args"].items():
                if isinstance(value, int):
                    event["args"][key] = str(value)

    assert same(analyzed(write(tmp_path / "t.json", _with(edit))), intact)


def test_nanoseconds_and_microseconds_mixed(tmp_path: Path, intact: dict[str, Any]) -> None:
    in_us = small_trace(dialect=EPOCH_FRACTION).document()["traceEvents"]
    in_ns = small_trace(dialect=NANOSECONDS).document()["traceEvents"]
    document = small_trace(dialect=EPOCH_FRACTION).document()
    document["traceEvents"] = [n if i % 3 else u for i, (u, n) in enumerate(zip(in_us, in_ns))]  # noqa: B905
    found = analyzed(write(tmp_path / "t.json", document))
    assert same(found, intact)
    assert "event.nanosecond_unit" in quality(found)


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
        assert "nothing ran that could be attributed" in text
    for level in ("step", "phase", "layer", "op", "kernel", "rank"):
        assert run("analyze", path, "--by", level).code == 0
        assert run("analyze", path, "--by", level, "--csv").code == 0


def test_a_report_of_a_damaged_trace_shows_the_finding(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", GOOD[:-300])
    for suffix in ("html", "md", "txt", "json"):
        outcome = run("report", path, "-o", tmp_path / f"r.{suffix}")
        assert outcome.code == 0, outcome.err
        assert "JSON ends" in (tmp_path / f"r.{suffix}").read_text()


# ---------------------------------------------------------------- several files


def _rank(rank: int, world: int = 2, **how: Any) -> bytes:
    return small_trace(rank=rank, world=world, pid=100 + rank, device=rank, **how).encode()


def test_duplicate_ranks(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", _rank(0)), write(tmp_path / "b.json", _rank(0))
    line = refused(tmp_path / "*.json", tmp_path)
    assert line.startswith(f"two traces claim rank 0: {a} and {b}; pass one of them")


def test_missing_ranks_are_said(tmp_path: Path) -> None:
    files = [write(tmp_path / f"r{r}.json", _rank(r, 4)) for r in (0, 2)]
    found = analyzed(*files)
    assert [r["rank"] for r in found["ranks"]] == [0, 2]
    assert "2 of 4 ranks are not here (1, 3)" in quality(found)["run.ranks_missing"]["message"]


def test_world_sizes_of_different_runs(tmp_path: Path) -> None:
    write(tmp_path / "a.json", _rank(0, 2))
    write(tmp_path / "b.json", _rank(1, 8))
    line = refused(tmp_path / "*.json", tmp_path)
    assert line.startswith("traces of different runs: world sizes differ (a.json says 2, b.json")


def test_times_of_different_runs(tmp_path: Path) -> None:
    write(tmp_path / "a.json", _rank(0))
    write(tmp_path / "b.json", _rank(1, base_ns=1_751_410_836_000_000_000 + 5 * 3600 * 10**9))
    line = refused(tmp_path / "*.json", tmp_path)
    assert line.startswith("traces of different runs: b.json starts 5.0 h after a.json ended")


def test_ranks_without_a_common_moment(tmp_path: Path) -> None:
    write(tmp_path / "a.json", _rank(0))
    write(tmp_path / "b.json", _rank(1, base_ns=1_751_410_836_000_000_000 + 10**9))
    assert "run.no_common_time" in quality(analyzed(tmp_path))


def test_a_file_that_does_not_say_its_rank_beside_one_that_does(tmp_path: Path) -> None:
    write(tmp_path / "a.json", _rank(1))
    write(tmp_path / "b.json", small_trace().encode())
    found = analyzed(tmp_path)
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    assert "b.json do not say which rank" in quality(found)["run.rank_unknown"]["message"]


def test_rank_beyond_its_world(tmp_path: Path) -> None:
    found = analyzed(write(tmp_path / "a.json", _rank(5, 2)))
    assert "rank 5 of a job of 2" in quality(found)["run.rank_beyond_world"]["message"]


def test_a_job_of_too_many_ranks_is_not_believed(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.json", _rank(rank, 2**61))
    found = analyzed(tmp_path)
    assert "not believed" in quality(found)["run.world_size"]["message"]
    assert "run.ranks_missing" not in quality(found)


def test_a_rank_beyond_any_job_is_not_believed(tmp_path: Path) -> None:
    found = analyzed(write(tmp_path / "t.json", small_trace(rank=2**31).encode()))
    assert [r["rank"] for r in found["ranks"]] == [0]
    assert "not believed" in quality(found)["run.rank_number"]["message"]


def test_one_bad_file_in_a_directory_does_not_hide_the_others(
    tmp_path: Path, intact: dict[str, Any]
) -> None:
    write(tmp_path / "rank0.json", GOOD)
    write(tmp_path / "rank1.json", b"")
    write(tmp_path / "settings.json", b'{"batch": 8}')
    found = analyzed(tmp_path)
    assert same(found, intact)
    left = [f["message"] for f in found["quality"] if f["code"] == "run.file_left_out"]
    assert len(left) == 2
    assert "rank1.json: is empty" in left[0]
    assert "settings.json: JSON, but not a trace" in left[1]
    # Named one by one, each file is meant.
    assert run("analyze", tmp_path / "rank0.json", tmp_path / "rank1.json").code == 1


# ---------------------------------------------------------------- run directories


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    source = tmp_path / "traces"
    source.mkdir()
    for r in range(2):
        write(source / f"rank{r}.json.gz", gzip.compress(_rank(r)))
    assert run("import", source, "-o", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_run_without_manifest(imported: Path) -> None:
    whole = analyzed(imported)
    (imported / "manifest.json").unlink()
    assert same(analyzed(imported), whole)


def test_run_with_a_damaged_manifest(imported: Path) -> None:
    whole = analyzed(imported)
    text = (imported / "manifest.json").read_bytes()
    (imported / "manifest.json").write_bytes(text[: len(text) // 2])
    found = analyzed(imported)
    assert same(found, whole)
    assert "the ranks' own manifests are used" in quality(found)["run.manifest_damaged"]["message"]


def test_run_whose_rank_part_is_missing_or_damaged(imported: Path) -> None:
    whole = analyzed(imported)
    (imported / "manifest.json").unlink()
    (imported / "rank-00001" / "manifest.json").unlink()
    found = analyzed(imported)
    assert same(found, whole)
    assert "rank-00001 has no readable manifest" in quality(found)["run.part_missing"]["message"]
    (imported / "rank-00001" / "manifest.json").write_bytes(b'{"schema_version": 1, "ra')
    assert same(analyzed(imported), whole)


def test_run_whose_rank_folder_is_missing(imported: Path) -> None:
    shutil.rmtree(imported / "rank-00001")
    found = analyzed(imported)
    assert [r["observed_ns"] > 0 for r in found["ranks"]] == [True, False]
    assert "rank 1 has no kernel trace" in quality(found)["trace.absent"]["message"]


def test_run_whose_trace_is_truncated(imported: Path) -> None:
    path = imported / "rank-00001" / "trace.json.gz"
    path.write_bytes(path.read_bytes()[:-120])
    found = analyzed(imported)
    assert "trace.truncated_gzip" in quality(found)
    path.write_bytes(b"")
    found = analyzed(imported)
    assert "is empty (0 bytes)" in quality(found)["trace.unreadable"]["message"]
    assert [r["observed_ns"] > 0 for r in found["ranks"]] == [True, False]


def test_run_that_was_killed(tmp_path: Path) -> None:
    """Parts that say running, one stream without an end, one cut in the middle of a batch."""
    for r in range(2):
        writer = RunWriter(tmp_path / "run", r)
        writer.manifest.world_size = 2
        writer.manifest.traces = ("trace.json",)
        writer.save()
        write(writer.directory / "trace.json", _rank(r)[:-200])
        stream = StreamWriter(writer.directory / "counter.arrow", "counter")
        for i in range(3):
            stream.write({"time_ns": [i], "track": ["t"], "name": ["n"], "value": [1.0]})
        stream._sink.close()  # as a killed process leaves it
        if r == 1:
            data = stream.path.read_bytes()
            stream.path.write_bytes(data[:-40])
    opened = chopper.load(tmp_path / "run")
    assert [opened.table(r, "counter").num_rows for r in (0, 1)] == [3, 2]
    assert "2 rows before it are used" in opened.part(1).findings[-1].message
    found = analyzed(tmp_path / "run")
    assert "never closed its recording" in quality(found)["run.rank_died"]["message"]
    assert "trace.truncated" in quality(found)
    manifest = finalize(tmp_path / "run", exit_code=-9)
    assert [p.status for p in manifest.ranks] == ["running", "running"]


def test_stream_that_is_no_stream(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0)
    writer.save()
    for name, data in (("counter", b""), ("thread", PNG), ("memory_event", b"ARROW1")):
        (writer.directory / f"{name}.arrow").write_bytes(data)
    opened = chopper.load(tmp_path / "run")
    for name in ("counter", "thread", "memory_event"):
        assert opened.table(0, name).num_rows == 0
    assert [f.code for f in opened.part(0).findings] == ["telemetry.truncated"] * 3


def test_run_whose_manifest_lists_impossible_ranks(imported: Path) -> None:
    whole = analyzed(imported)
    file = imported / "manifest.json"
    text = file.read_text()
    for wrong in ("0", "-1", "4294967296"):
        file.write_text(text.replace('"rank": 1,', f'"rank": {wrong},', 1))
        found = analyzed(imported)
        assert "run.manifest_damaged" in quality(found)
        assert same(found, whole)


def test_run_from_a_newer_version(imported: Path, tmp_path: Path) -> None:
    for file in (imported / "manifest.json", imported / "rank-00000" / "manifest.json"):
        text = file.read_text().replace('"schema_version": 1', '"schema_version": 99', 1)
        file.write_text(text)
    for command in (("analyze", imported), ("report", imported, "-o", tmp_path / "r.json")):
        outcome = run(*command)
        assert outcome.code == 1
        (line,) = outcome.lines
        assert "written by a newer chopper (schema 99, this one reads up to 1); upgrade" in line
    (imported / "manifest.json").unlink()
    assert "written by a newer chopper" in run("analyze", imported).lines[0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"name": "my-web-app"}', "not a chopper manifest"),
        (b"[]", "not a chopper manifest"),
        (b'{"schema_version": 1}', "damaged manifest"),
        (b"\xff\xfe", "not a chopper manifest"),
        (b"", "not a chopper manifest"),
    ],
)
def test_manifest_of_something_else(data: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_bytes(data)
    outcome = run("analyze", tmp_path / "d")
    assert outcome.code == 1
    (line,) = outcome.lines
    assert expected in line


def test_folder_of_one_rank_and_manifest_as_run(imported: Path) -> None:
    (line,) = run("analyze", imported / "rank-00000").lines
    assert line.endswith(f"is the folder of one rank; pass the run: {imported}")
    assert same(analyzed(imported / "manifest.json"), analyzed(imported))


def test_run_beside_other_files_and_run_to_import(imported: Path, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    outcome = run("analyze", trace, imported)
    assert (outcome.code, len(outcome.lines)) == (1, 1)
    assert "is a run directory; name it alone" in outcome.lines[0]
    outcome = run("import", imported, "-o", tmp_path / "again")
    assert (outcome.code, len(outcome.lines)) == (1, 1)
    assert "is a run directory already" in outcome.lines[0]


# ---------------------------------------------------------------- places that cannot be written


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
    """A file system of 64 KiB."""
    with tmpfs("size=64k") as place:
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
    shutil.rmtree(target / "tables")
    with contextlib.suppress(OSError), (full_disk / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(bytes(512))
    assert same(analyzed(target), before)
    assert not list(full_disk.rglob("*.tmp"))


# ---------------------------------------------------------------- through a real process


def chopper_process(*arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chopper", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **how,
    )


def test_exit_codes_of_a_real_process(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    assert chopper_process("analyze", trace, "--json").returncode == 0
    bad = chopper_process("analyze", tmp_path / "none.json")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == f"chopper: {tmp_path}/none.json: no such file or directory\n"
    usage = chopper_process("analyze", trace, "--by", "colour")
    assert usage.returncode == 2
    assert "Traceback" not in usage.stderr
    assert chopper_process("analyse", trace).returncode == 2
    assert chopper_process("import").returncode == 2


def test_results_to_a_full_device(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "chopper", "analyze", str(trace), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    (line,) = [t for t in ended.stderr.splitlines() if not PROGRESS.match(t)]
    assert line == "chopper: standard output: cannot be written (No space left on device)"


def ordinary(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run as somebody whom permissions bind: root only without its powers."""
    prefix: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root obeys permissions only through setpriv, which is not here")
        prefix = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    return subprocess.run(
        [*prefix, sys.executable, "-m", "chopper", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def only_line(ended: subprocess.CompletedProcess[str]) -> str:
    (line,) = [t for t in ended.stderr.splitlines() if not PROGRESS.match(t)]
    return line


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
    shutil.rmtree(shared / "run" / "tables")
    with modes(0o555, shared, shared / "run", shared / "run" / "rank-00000"):
        ended = ordinary("analyze", shared / "run", "--json")
        assert ended.returncode == 0, ended.stderr
        assert same(json.loads(ended.stdout), whole)
        assert not (shared / "run" / "tables").exists()
        for command in (
            ("import", trace, "-o", shared / "mine"),
            ("import", trace, "-o", shared / "run", "--force"),
            ("report", trace, "-o", shared / "r.json"),
        ):
            ended = ordinary(*command)
            assert ended.returncode == 1, ended.stderr
            assert "Permission denied" in only_line(ended)
    assert same(analyzed(shared / "run"), whole)


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", GOOD)
    assert run("import", trace, "-o", tmp_path / "run").code == 0
    closed = tmp_path / "closed"
    closed.mkdir()
    with modes(0, trace, tmp_path / "run" / "manifest.json", closed):
        for source in ("t.json", "run", "closed"):
            ended = ordinary("analyze", tmp_path / source)
            assert ended.returncode == 1
            line = only_line(ended)
            assert line.startswith(f"chopper: {tmp_path / source}")
            assert "cannot be read (Permission denied)" in line


# ---------------------------------------------------------------- anything at all


def outcome_of(data: bytes) -> None:
    """Read bytes: a run whose causes sum to the observed time, or a ChopperError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_bytes(data)
        try:
            found = chopper.attribute(path)
        except ChopperError as exc:
            assert "\n" not in str(exc)  # noqa: PT017
            return
        assert sum(found.pieces["time_ns"].to_pylist()) == found.observed_ns
        assert sum(leaf.time_ns for leaf in found.leaves()) == found.observed_ns
        assert (found.pieces["time_ns"].to_numpy() >= 0).all()
        json.dumps(found.to_dict(), allow_nan=False)
        for part in found.run.manifest.ranks:
            encode(part)
        for (_, name), table in found.run.store.items():
            TABLES[name].validate(table).validate(full=True)


SEEDS = [small_trace(TODAY, rank=0, world=2).encode(), small_trace(EPOCH_WHOLE).encode()]
byte_edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "insert", "truncate", "copy"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=5,
)
fuzz = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@given(seed=st.sampled_from(SEEDS), edits=byte_edits, packed=st.booleans())
@fuzz
def test_any_bytes_give_a_closed_run_or_an_error(
    seed: bytes, edits: list[tuple[str, float, int, int]], packed: bool
) -> None:
    data = bytearray(gzip.compress(seed, mtime=0) if packed else seed)
    for kind, where, byte, length in edits:
        at = int(where * len(data))
        match kind:
            case "flip" if data:
                data[at] ^= byte or 1
            case "delete":
                del data[at : at + length]
            case "insert":
                data[at:at] = bytes([byte]) * length
            case "truncate":
                del data[at:]
            case "copy":
                data[at:at] = data[at : at + length * 20]
    outcome_of(bytes(data))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**25])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["", "7", "stream 7", "ProfilerStep#12", "nccl", "\ud800", "NaN", "1e999"])
    | st.sampled_from([[], {}, [[]], [1, [2]], {"a": {"b": 1}}])
)
PLAIN: dict[str, Any] = json.loads(SEEDS[0])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield from _places(value[i], (*path, i))


PLACES = list(_places(PLAIN))


@given(
    edits=st.lists(st.tuples(st.sampled_from(PLACES), scalars), min_size=1, max_size=6),
    strict=st.booleans(),
)
@example(edits=[(("baseTimeNanoseconds",), 2**62 - 1)], strict=True)
@example(edits=[(("traceEvents", 2, "args", "correlation"), 2**64 - 1)], strict=True)
@example(edits=[(("traceEvents", 4, "cat"), "\ud800")], strict=False)
@example(
    edits=[(("traceEvents", 3, "args", "Input type"), {}), (("traceEvents", 5, "name"), "NCCL")],
    strict=True,
)
@example(
    edits=[
        (("traceEvents", 3, "args", "Input Dims"), [[2**62] * 20]),
        (("traceEvents", 5, "name"), "nccl_AllReduce"),
    ],
    strict=True,
)
@fuzz
def test_any_value_in_any_place_gives_a_closed_run_or_an_error(
    edits: list[tuple[tuple[Any, ...], Any]], strict: bool
) -> None:
    document = json.loads(SEEDS[0])
    for path, value in edits:
        at: Any = document
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
    text = json.dumps(document)
    if not strict:
        text = text[:-1] + ',"x": NaN}'
    outcome_of(text.encode("utf-8", "surrogatepass"))


def test_kept_table_of_another_shape_is_made_again(imported: Path) -> None:
    import pyarrow.parquet as pq

    whole = analyzed(imported)
    file = imported / "tables" / "rank-00000" / "device_event.parquet"
    pq.write_table(pa.table({"start_ns": [1]}), file)
    assert same(analyzed(imported), whole)


def test_part_of_a_run_is_one_document() -> None:
    assert json.loads(encode(RankManifest(rank=0)))["rank"] == 0
