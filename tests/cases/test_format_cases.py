"""Unusual and damaged files of every kind, and the right answer to each.

The files lie in ``formats``; what else goes wrong in the same way is made from its reference.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chopper import pipeline, reports
from chopper.analyzers.trace import names
from chopper.collectors.formats import kineto
from chopper.collectors.formats.cleaning import cut_overruns
from chopper.collectors.formats.kineto import read_trace
from chopper.collectors.formats.telemetry_csv import read_log
from chopper.errors import InputError
from chopper.storage.manifest import Finding
from tests.command import run

FILES = Path(__file__).parent / "formats"
GOOD = (FILES / "good-reference.json").read_text(encoding="utf-8")
Edit = Callable[[dict[str, Any]], None]


def kernels(path: Path) -> list[tuple[int, str]]:
    """Duration and name of each kernel, in their order."""
    [trace] = read_trace(path)
    table = trace.tables["device_event"]
    return list(zip(table["dur_ns"].to_pylist(), table["name"].to_pylist(), strict=True))


def findings(path: Path) -> dict[str, Finding]:
    """What is said of the file's damage, by code."""
    return {f.code: f for trace in read_trace(path) for f in trace.findings}


def steps_of(path: Path) -> tuple[int, int]:
    """Return the number of steps, and the time of all, in ns."""
    found = reports.document(pipeline.attribute(pipeline.read(path)))
    return found["steps"], found["observed_ns"]


def edited(tmp_path: Path, edit: Edit) -> Path:
    document = json.loads(GOOD)
    edit(document)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


# ------------------------------------------------------------------ damaged JSON


def test_reference() -> None:
    path = FILES / "good-reference.json"
    assert findings(path) == {}
    assert [dur for dur, _ in kernels(path)] == [100_000] * 36
    assert steps_of(path) == (6, 5_890_000)


BROKEN = {
    "unescaped-quotes.json": ("event.repaired", '{"device": "cpu", "dtype": "float32"}(12): run'),
    "control-char.json": ("event.repaired", "torch/_inductor/config.py(0): \x01\x1f"),
    "windows-backslash.json": ("event.repaired", r"torch\cuda\__init__.py(219): _lazy_init"),
    "newline-in-name.json": ("event.repaired", "lib = Library(1)\n(1): <module>"),
    "info-metadata-quotes.json": ("trace.not_strict", "aten::mm"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("in_python", [False, True])
def test_one_broken_text_loses_nothing(
    name: str, in_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_python:
        monkeypatch.setattr(kineto, "scan_file", lambda _: None)
    path, (code, python_name) = FILES / name, BROKEN[name]
    found = findings(path)
    assert [f.severity for f in found.values()] == ["warning"]
    assert found[code].count in (1, None)
    assert kernels(path) == kernels(FILES / "good-reference.json")
    [trace] = read_trace(path)
    assert python_name in trace.tables["host_span"]["name"].to_pylist()
    assert trace.devices[0].name == "NVIDIA H100 80GB HBM3"
    assert steps_of(path) == (6, 5_890_000)


NAME = '"torch/nn/modules/module.py(1501): _call_impl"'
EVENTS = {
    # Text of one event → what stands there instead, the finding, kernels that are lost.
    "quotes and commas": (NAME, '"f("a", "b"): run"', "event.repaired", 0),
    "windows path in quotes": (NAME, r'"C:\new\"torch"\x.py"', "event.repaired", 0),
    "quotes in an argument": (
        '"stream": 7,', '"stream": 7, "desc": "a "b", c", "x": "d "e"",', "event.repaired", 0
    ),
    "null byte": (NAME, '"a\0b"', "event.repaired", 0),
    "missing quote": (NAME, '"open', "event.not_json", 0),
    "missing first quote": (NAME, 'open"', "event.not_json", 0),
    "nothing": (NAME, "", "event.not_json", 0),
    "inf": ('"dur": 100.0', '"dur": inf', "trace.nan", 0),
    "nan": ('"stream": 7,', '"stream": 7, "est. achieved occupancy %": -nan,', "trace.nan", 0),
    "Infinity": ('"stream": 7,', '"stream": 7, "x": Infinity,', "trace.nan", 0),
    "stray comma": ('"cat": "kernel",', '"cat": "kernel",,', "event.repaired", 0),
    "comma before a bracket": ('"stream": 7,', '"stream": 7, "x": [1,],', "event.repaired", 0),
    "truncated number": ('"dur": 100.0', '"dur": 100.', "event.not_json", 1),
    "hexadecimal": ('"dur": 100.0', '"dur": 0x64', "event.not_json", 1),
    "missing colon": ('"dur": 100.0', '"dur" 100.0', "event.not_json", 1),
    "missing comma": ('"dur": 100.0,', '"dur": 100.0', "event.not_json", 1),
    "missing brace": ('"stream": 7,', '"stream": [7,', "event.not_json", 1),
}  # fmt: skip


@pytest.mark.parametrize("case", EVENTS, ids=lambda c: c.replace(" ", "-"))
@pytest.mark.parametrize("in_python", [False, True])
def test_one_broken_event_is_the_only_one(
    case: str, in_python: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_python:
        monkeypatch.setattr(kineto, "scan_file", lambda _: None)
    old, new, code, lost = EVENTS[case]
    at = GOOD.index(old)
    path = tmp_path / "broken.json"
    path.write_text(GOOD[:at] + new + GOOD[at + len(old) :], encoding="utf-8")
    found = findings(path)
    assert found[code].count == 1
    assert found[code].severity == "warning"
    assert len(kernels(path)) == 36 - lost
    assert steps_of(path) == (6, 5_890_000)


def test_the_last_event_may_be_the_broken_one(tmp_path: Path) -> None:
    at = GOOD.rindex('"ph"')
    path = tmp_path / "broken.json"
    path.write_text(GOOD[:at] + '"ph": "X" "broken", ' + GOOD[at:], encoding="utf-8")
    assert findings(path)["event.not_json"].count == 1
    assert "trace.truncated" not in findings(path)
    # What follows the events is read too.
    [trace] = read_trace(path)
    assert trace.span_ns is not None
    assert trace.span_ns[0] > 1_759_300_000 * 10**9


def test_a_cut_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    text = GOOD.replace(NAME, '"a "b""')[: len(GOOD) * 2 // 3]
    path.write_text(text, encoding="utf-8")
    found = findings(path)
    assert {c: f.severity for c, f in found.items()} == {
        "trace.truncated": "warning",
        "event.repaired": "warning",
    }
    assert len(kernels(path)) == text.count('"cat": "kernel"') - 1


# ------------------------------------------------------------------ times that cannot be


def test_duration_beyond_later_kernels_is_cut() -> None:
    path = FILES / "dur-overflow.json"
    assert findings(path)["event.overrun"].count == 1
    assert findings(path)["event.overrun"].severity == "warning"
    assert sorted(dur for dur, _ in kernels(path))[-2:] == [100_000, 150_000]
    assert steps_of(path) == (6, 5_890_000)


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        # (stream, launch, start µs, duration µs) → durations; cut at the next start.
        ([(7, 1, 0, 100), (7, 2, 200, 9000), (7, 3, 300, 100), (7, 4, 500, 100)], {1: 100}),
        ([(7, 1, 0, 9000), (7, 2, 200, 9000), (7, 3, 300, 100)], {0: 200, 1: 100}),
        # The last of a stream has nothing to be measured by; another stream may run beside it.
        ([(7, 1, 0, 100), (7, 2, 200, 9000), (8, 3, 300, 100)], {}),
        # Programmatic dependent launch: the next one begins early and ends later.
        ([(7, 1, 0, 300), (7, 2, 100, 400), (7, 3, 600, 10)], {}),
        # Branches of one graph launch; the launch that follows shows that one overflowed.
        ([(7, 1, 0, 300), (7, 1, 10, 100), (7, 1, 120, 90), (7, 2, 400, 10)], {}),
        ([(7, 1, 0, 900), (7, 1, 10, 100), (7, 1, 120, 90), (7, 2, 400, 10)], {0: 400}),
        # Clocks that err by a few µs.
        ([(7, 1, 0, 40), (7, 2, 10, 20), (7, 3, 60, 10)], {}),
    ],
)
def test_which_durations_are_cut(
    kernels: list[tuple[int, int, int, int]], expected: dict[int, int]
) -> None:
    stream, launch, start, dur = np.array(kernels, dtype=np.int64).T
    device = {"device_id": 0 * stream, "stream_id": stream, "correlation_id": launch}
    device |= {"start_ns": start * 1000, "dur_ns": dur * 1000}
    counts: Counter[str] = Counter()
    found = cut_overruns(counts, {**device, "kind": (0 * stream + 1, [None, "kernel"])})
    wanted = [expected.get(i, d) * 1000 for i, d in enumerate(dur.tolist())]
    assert found["dur_ns"].tolist() == wanted
    assert counts["event.overrun"] == len(expected)


def test_lost_timestamps_are_named() -> None:
    path = FILES / "ts0-kernels.json"
    finding = findings(path)["event.without_time"]
    assert (finding.count, finding.severity) == (6, "warning")
    assert "6 kernels without a time" in finding.message
    assert [dur for dur, _ in kernels(path)] == [100_000] * 18
    assert steps_of(path) == (4, 3_890_000)
    codes = {
        q["code"] for q in reports.document(pipeline.attribute(pipeline.read(path)))["quality"]
    }
    assert not codes & {"trace.outside_steps", "event.without_launch"}


def test_a_trace_that_begins_at_zero_loses_nothing(tmp_path: Path) -> None:
    def from_zero(document: dict[str, Any]) -> None:
        for event in document["traceEvents"]:
            event["ts"] -= 1_000_000.0

    path = edited(tmp_path, from_zero)
    assert findings(path) == {}
    assert steps_of(path) == (6, 5_890_000)


# ------------------------------------------------------------------ other writers


def halves(event: dict[str, Any]) -> list[dict[str, Any]]:
    end = {"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]}
    return [{**{k: v for k, v in event.items() if k != "dur"}, "ph": "B"}, end]


def test_begin_and_end_events() -> None:
    path = FILES / "begin-end-events.json"
    assert findings(path) == {}
    assert [dur for dur, _ in kernels(path)] == [100_000] * 24
    assert steps_of(path) == (4, 3_890_000)


@pytest.mark.parametrize("order", ["as listed", "by time", "begins first"])
def test_begin_and_end_events_in_any_order(order: str, tmp_path: Path) -> None:
    def split(document: dict[str, Any]) -> None:
        events = [e for e in document["traceEvents"] if e["ph"] == "X"]
        if order != "by time":
            # Their ends have no name, so that only time tells which is the inner one.
            events.sort(key=lambda e: e["dur"])
        listed = [half for e in events for half in halves(e)]
        if order != "as listed":
            listed.sort(key=lambda e: e["ts"] if order == "by time" else e["ph"] == "E")
        document["traceEvents"] = [*listed, {**listed[0], "ts": 9e6}, {**listed[-1], "ph": "E"}]

    path = edited(tmp_path, split)
    assert steps_of(path) == (6, 5_890_000)
    assert [dur for dur, _ in kernels(path)] == [100_000] * 36
    assert findings(path)["event.unpaired"].count == 2


def test_another_vendors_trace_is_named(tmp_path: Path) -> None:
    line = run("report", FILES / "ascend-trace_view.json", "-o", tmp_path / "r.html").line
    assert "device work of 'Ascend Hardware' (15 events without a category)" in line
    assert "trace_view.json of torch_npu (Huawei Ascend)" in line
    jax = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "X", "name": "fusion", "pid": 1, "tid": 1, "ts": 1, "dur": 5},
    ]
    path = tmp_path / "jax.json"
    path.write_text(json.dumps({"traceEvents": jax}), encoding="utf-8")
    with pytest.raises(InputError, match=r"device work of '/device:GPU:0' \(1 events"):
        read_trace(path)


@pytest.mark.parametrize("below", [2000, 2**31, 2**62])
def test_negative_correlation_ids_are_matched(below: int, tmp_path: Path) -> None:
    def negative(document: dict[str, Any]) -> None:
        for event in document["traceEvents"]:
            if "correlation" in event.get("args", {}):
                event["args"]["correlation"] -= below

    path = edited(tmp_path, negative)
    found = reports.document(pipeline.attribute(pipeline.read(path)))
    assert found["observed_ns"] == 5_890_000
    assert "event.without_launch" not in {q["code"] for q in found["quality"]}


@pytest.mark.parametrize(
    "name",
    [
        "oneccl_reduce_base<float, 2, 16, 1, 1, 2>",
        "oneccl_kernel_memcpy_bytes",
        "xccl:all_reduce",
        "hcclAllReduce_float",
        "hcom_allGather_",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    ],
)
def test_kernels_of_every_collective_library_communicate(name: str) -> None:
    assert names.is_communication(name)
    assert not names.is_communication("__amd_rocclr_copyBuffer")


# ------------------------------------------------------------------ tables of other tools


@pytest.mark.parametrize(
    "name", ["reference-integer-times.csv", "rocprof-compute-decimal-times.csv"]
)
def test_decimal_times_of_rocprofiler_compute(name: str) -> None:
    run_ = pipeline.read(FILES / name)
    table = run_.store[0, "device_event"]
    assert table.num_rows == 12
    assert sum(table["dur_ns"].to_pylist()) == 480_000
    assert reports.document(pipeline.attribute(run_))["observed_ns"] == 1_140_000


def test_log_without_a_device_column_is_of_one_device() -> None:
    with (FILES / "nvidia-smi-without-index.csv").open(encoding="utf-8") as lines:
        table = read_log(lines, "log.csv").tables["device_clock"]
    assert table["device_id"].to_pylist() == [0] * 20
    assert table["power_w"].to_pylist() == [float(100 + i) for i in range(20)]


def test_log_of_several_devices_names_the_missing_column() -> None:
    rows = [
        f"2026/01/02 10:00:{second:02d}.{device:03d}, 100.00 W\n"
        for second in range(10)
        for device in range(4)
    ]
    with pytest.raises(InputError, match="several devices, and no column says which"):
        read_log(["timestamp, power.draw [W]\n", *rows], "log.csv")
    heading = "timestamp, pci.bus_id, power.draw [W]\n"
    named = [r.replace(",", f", 00000000:{i % 4:02d}:00.0,") for i, r in enumerate(rows)]
    table = read_log([heading, *named], "log.csv").tables["device_clock"]
    assert set(table["device_id"].to_pylist()) == {0, 1, 2, 3}


# ------------------------------------------------------------------ what is no trace


def tarred() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(FILES / "good-reference.json", "trace.json")
    return content.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>GitHub</title></head></html>\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("trace.tar.gz", tarred(), r"is a tar archive; unpack it \(tar -xf\)"),
        ("trace.json.gz", tarred(), r"is a tar archive; unpack it \(tar -xf\)"),
        ("trace.json", LFS, r"is a Git LFS pointer, .*\(git lfs pull\)"),
        ("trace.json.gz", LFS, "is a Git LFS pointer"),
        ("run.sqlite", LFS, "is a Git LFS pointer"),
        ("kernels.csv", LFS, "is a Git LFS pointer"),
        ("trace.json", PAGE, r"is a web page \(HTML or XML\)"),
        ("kernels.csv", PAGE, r"is a web page \(HTML or XML\)"),
        ("t.json.gz", gzip.compress(gzip.compress(GOOD.encode())), "is compressed twice; decompr"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_named(
    name: str, content: bytes, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{path}: {expected}") as refused:
        pipeline.read(path)
    assert "\\x" not in str(refused.value)
