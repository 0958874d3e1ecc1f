"""Recordings of other profilers: the same work says the same, whoever wrote it down."""

from __future__ import annotations

import gzip
import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace import collectives
from chopper.analyzers.work import kernels
from chopper.causes import LEVELS
from chopper.cli import cli
from chopper.collectors.formats import kineto as kineto_reader
from chopper.collectors.formats import recording, rocprof_csv, steps
from chopper.collectors.formats.kineto import _events
from chopper.collectors.formats.recording import torch_range
from chopper.errors import InputError
from chopper.storage.run import Run
from tests import recordings
from tests.kineto_writer import Trace
from tests.recordings import KERNEL, PID, START_NS, TID, Span, small

Writer = Callable[[Path], list[Path]]

WRITERS: dict[str, Writer] = {
    "nsys": lambda folder: [recordings.write_nsys(folder / "report.sqlite", small())],
    "rpd": lambda folder: [recordings.write_rpd(folder / "trace.rpd", small())],
    "rocpd": lambda folder: [recordings.write_rocpd(folder / "results.db", small())],
    "rocprof_json": lambda folder: [
        recordings.write_rocprof_json(folder / "results.json", small())
    ],
    "rocprof_csv": lambda folder: recordings.write_rocprof_csv(folder, small()),
}
BOOT_CLOCKS = set(WRITERS) - {"nsys"}


@pytest.fixture(params=list(WRITERS))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[Path]]:
    return request.param, WRITERS[request.param](tmp_path)


def closed(found: Attribution) -> None:
    assert sum(cause.time_ns for cause in found.leaves()) == found.observed_ns
    for level in LEVELS:
        groups = found.by(level)
        assert sum(g.time_ns for g in groups) == found.observed_ns


def rows(run: Run, table: str, *columns: str, rank: int = 0) -> list[tuple[Any, ...]]:
    return [tuple(row[c] for c in columns) for row in run.table(rank, table).to_pylist()]


def origin(format_: str) -> int:
    return 0 if format_ in BOOT_CLOCKS else START_NS


def test_device_events_are_the_same_in_every_format(written: tuple[str, list[Path]]) -> None:
    format_, files = written
    run = pipeline.read(files)
    start = origin(format_)
    expected = [
        (
            start + w.start,
            w.end - w.start,
            "kernel" if w.copied is None else "memcpy",
            w.correlation,
        )
        for w in small().work
    ]
    assert rows(run, "device_event", "start_ns", "dur_ns", "kind", "correlation_id") == expected
    kernels = [r for r in run.table(0, "device_event").to_pylist() if r["kind"] == "kernel"]
    assert {r["name"] for r in kernels} == {KERNEL}
    assert {(r["grid"], r["block"]) for r in kernels} == {("[4, 2, 1]", "[256, 1, 1]")}
    assert {r["device_id"] for r in kernels} == {0}
    copies = [r for r in run.table(0, "device_event").to_pylist() if r["kind"] == "memcpy"]
    assert all("DtoH" in r["name"] for r in copies)
    # The CSV has no column for it; every other format says how much was copied.
    assert {r["bytes_count"] for r in copies} == {None if format_ == "rocprof_csv" else 32_768}


def test_ranges_of_torch_become_operators(written: tuple[str, list[Path]]) -> None:
    _, files = written
    spans = pipeline.read(files).table(0, "host_span").to_pylist()
    operators = [s for s in spans if s["category"] == "cpu_op"]
    assert [(s["name"], s["sequence_id"], s["external_id"]) for s in operators] == [
        ("aten::mm", 10, 11),
        ("aten::mm", 20, 21),
    ]
    assert {s["input_dims"] for s in operators} == {"[[64, 32], [32, 128]]"}
    assert {(s["pid"], s["tid"]) for s in spans} == {(PID, TID)}
    calls = [s["name"] for s in spans if s["category"] == "runtime"]
    assert len(calls) == 4
    assert {c[3:] for c in calls if c.startswith("hip")} | {
        c[4:] for c in calls if c.startswith("cuda")
    } == {"LaunchKernel", "MemcpyAsync"}


def test_ranges_named_like_steps_are_steps(written: tuple[str, list[Path]]) -> None:
    format_, files = written
    start = origin(format_)
    assert rows(pipeline.read(files), "step", "number", "start_ns", "end_ns", "source") == [
        (5, start + 1_000_000, start + 1_900_000, "range"),
        (6, start + 2_000_000, start + 2_900_000, "range"),
    ]


def test_the_attribution_closes_and_finds_launches(written: tuple[str, list[Path]]) -> None:
    _, files = written
    found = pipeline.attribute(pipeline.read(files))
    closed(found)
    assert found.observed_ns == 1_650_000
    assert not [f for f in found.findings if f.code == "event.without_launch"]
    time = {g.key: g.time_ns for g in found.by("op")}
    assert time["aten::mm"] >= 800_000
    said = next(f for f in found.findings if f.code == "trace.not_recorded")
    assert "process groups" in said.message
    assert "operators" not in said.message


def test_an_imported_run_says_the_same(written: tuple[str, list[Path]], tmp_path: Path) -> None:
    _, files = written
    before = pipeline.attribute(pipeline.read(files))
    target = tmp_path / "run"
    done = CliRunner().invoke(cli, ["import", *map(str, files), "-o", str(target)])
    assert done.exit_code == 0, done.output
    for file in files:
        file.unlink()
    after = pipeline.attribute(target)
    assert [(c.id, c.time_ns) for c in after.causes()] == [
        (c.id, c.time_ns) for c in before.causes()
    ]


@pytest.mark.parametrize("format_", ["nsys", "rpd", "rocpd"])
def test_packed_databases_are_read(format_: str, tmp_path: Path) -> None:
    (plain,) = WRITERS[format_](tmp_path)
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert pipeline.attribute(packed).observed_ns == pipeline.attribute(plain).observed_ns
    cut = tmp_path / "cut.gz"
    cut.write_bytes(packed.read_bytes()[:-20])
    codes = {f.code for f in pipeline.attribute(cut).findings}
    assert "trace.truncated_gzip" in codes


def test_which_devices_there_are(written: tuple[str, list[Path]]) -> None:
    format_, files = written
    devices = pipeline.read(files).part(0).devices
    expected = {
        "nsys": (recordings.DEVICE, 108),
        "rpd": (None, None),
    }.get(format_, ("AMD Instinct MI300X", 304))
    assert [(d.name, d.multiprocessor_count) for d in devices] == [expected]


# ---------------------------------------------------------------- single formats


def test_nsys_of_several_processes_is_several_ranks(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small(), pids=(200, 100), inline=True)
    run = pipeline.read(path)
    assert run.ranks == [0, 1]
    assert [run.part(r).pid for r in run.ranks] == [200, 100]
    assert [run.part(r).device_id for r in run.ranks] == [0, 1]
    for rank in run.ranks:
        assert run.table(rank, "device_event").num_rows == len(small().work)
        assert {row["pid"] for row in run.table(rank, "host_span").to_pylist()} == {
            run.part(rank).pid
        }
    closed(pipeline.attribute(run))


def test_calls_of_another_process_launch_nothing(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small())
    with sqlite3.connect(path) as db:
        # A data loader that initialized CUDA, and numbers its calls from the same start.
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start - 500, end - 500, ?, "
            "correlationId, nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME",
            (recordings.packed(999, 999),),
        )
    db.close()
    run = pipeline.read(path)
    calls = [
        r for r in rows(run, "host_span", "pid", "category", "correlation_id") if r[1] == "runtime"
    ]
    assert {(pid, correlation is None) for pid, _, correlation in calls} == {
        (PID, False), (999, True),
    }  # fmt: skip


def test_nsys_without_a_start_time_counts_from_the_start(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small())
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
    db.close()
    run = pipeline.read(path)
    assert "trace.boot_clock" in {f.code for f in run.part(0).findings}
    assert rows(run, "device_event", "start_ns")[0] == (1_050_000,)


def test_whole_graphs_are_said(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small())
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE "
            "(start, end, deviceId, streamId, correlationId, globalPid, graphId)"
        )
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 0, 7, 20, ?, 3)",
            (2_700_000, 2_800_000, recordings.packed(PID)),
        )
    db.close()
    found = pipeline.attribute(path)
    closed(found)
    assert "trace.whole_graphs" in {f.code for f in found.findings}


@pytest.mark.parametrize("clock", [1410, 1_410_000_000])
def test_gpu_metrics_of_nsys_are_the_devices_activity_and_clock(clock: int, tmp_path: Path) -> None:
    """Names and types of an A100's export; typeId ends in the device, values are percent."""
    path = recordings.write_nsys(tmp_path / "r.sqlite", small(), pids=(100, 200))
    names = [
        "GPC Clock Frequency [MHz]", "SMs Active [Throughput %]", "SMs Active [Avg]",
        "Tensor Active [Throughput %]", "DRAM Read Bandwidth [Throughput %]",
        "DRAM Write Bandwidth [Throughput %]", "Compute Warps in Flight [Throughput %]",
    ]  # fmt: skip
    first = (clock, 90, 97, 62, 30, 12, 25)
    values = {(0, 1_000_000): first, (0, 1_100_000): (0, 101, 0, 0, 30, None, 0)}
    values[1, 1_000_000] = (clock, 10, 10, 1, 2, 3, 4)
    base = 8_358_680_908_399_640_576
    with sqlite3.connect(path) as db:
        columns = "typeId INTEGER, sourceId, typeName, metricId INTEGER, metricName TEXT"
        db.execute(f"CREATE TABLE TARGET_INFO_GPU_METRICS ({columns})")
        db.execute("CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId, value)")
        for device in (0, 1):
            listed = [(base + device, 1, "GPU Metrics", n, name) for n, name in enumerate(names)]
            db.executemany("INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, ?, ?, ?, ?)", listed)
        for (device, at), row in values.items():
            told = [(at, base + device, n, value) for n, value in enumerate(row)]
            db.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", told)
    db.close()
    run = pipeline.read(path)
    ratios = ("sm", "tensor", "dram")
    expected: list[tuple[Any, ...]] = [
        (0, "GPU-uuid-0", START_NS + 1_000_000, 0.9, 0.62, 0.42, 0.25),
        (0, "GPU-uuid-0", START_NS + 1_100_000, None, 0.0, None, 0.0),
        (1, "GPU-uuid-1", START_NS + 1_000_000, 0.1, 0.01, 0.05, 0.04),
    ]
    found = rows(
        run, "device_activity", "device_id", "device_uuid", "time_ns",
        *(f"{name}_utilization_ratio" for name in ratios), "sm_occupancy_ratio",
    )  # fmt: skip
    assert found == [pytest.approx(row) for row in expected]
    # A clock of 0 is of a device that slept.
    clocks = rows(run, "device_clock", "device_id", "sm_clock_hz", "power_w", "event_reasons")
    assert clocks == [(0, 1_410_000_000, None, None), (1, 1_410_000_000, None, None)]


@pytest.mark.parametrize("device", [-1, None, (1 << 32) - 1])
def test_events_of_an_unknown_device_are_device_work(device: int | None, tmp_path: Path) -> None:
    known = pipeline.attribute(recordings.write_nsys(tmp_path / "known.sqlite", small()))
    path = recordings.write_nsys(tmp_path / "unknown.sqlite", small())
    with sqlite3.connect(path) as db:
        for table in ("KERNEL", "MEMCPY"):
            db.execute(f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET deviceId = ?", (device,))
    db.close()
    found = pipeline.attribute(path)
    closed(found)
    assert "device.unknown" in {f.code for f in found.findings}
    sums = [
        {group: c.time_ns for c in a.causes() if (group := c.id) in ("compute", "copy", "idle")}
        for a in (known, found)
    ]
    assert sums[0] == sums[1]
    assert sums[0]["compute"]


def test_rpd_clocks_are_joined_where_their_device_is_certain(tmp_path: Path) -> None:
    sure = pipeline.read(recordings.write_rpd(tmp_path / "one.rpd", small()))
    clocks = sure.table(0, "device_clock")
    assert clocks["sm_clock_hz"].to_pylist()[:2] == [1_502_000_000, 1_502_000_000]
    assert clocks["time_ns"].to_pylist()[:2] == [1_000_000, 1_499_999]
    two = pipeline.read(recordings.write_rpd(tmp_path / "two.rpd", small(), monitored=(0, 1)))
    assert two.table(0, "device_clock").num_rows == 0
    assert {r[0] for r in rows(two, "counter", "track")} == {"GPU 0", "GPU 1"}
    assert "telemetry.device_unknown" in {f.code for f in two.part(0).findings}


def test_of_several_gpus_in_rpd_the_one_that_worked_has_the_kernels(tmp_path: Path) -> None:
    path = recordings.write_rpd(tmp_path / "a.rpd", small(), monitored=(), idle=(0, 1, 3))
    with sqlite3.connect(path) as db:
        rises = [(at * 500_000, (at + 1) * 500_000, str(400 * at)) for at in range(1, 6)]
        db.executemany("INSERT INTO rocpd_monitor VALUES ('gpu', 2, 'sclk', ?, ?, ?)", rises)
    db.close()
    run = pipeline.read(path)
    hz = run.table(0, "device_clock")["sm_clock_hz"].to_pylist()
    assert (hz[0], hz[-1]) == (400_000_000, 2_000_000_000)
    (said,) = [f for f in run.part(0).findings if f.code == "telemetry.device_inferred"]
    assert "only GPU 2 of 4 left its idle clock" in said.message
    # Where none or two did, nothing is taken.
    none = pipeline.read(
        recordings.write_rpd(tmp_path / "b.rpd", small(), monitored=(), idle=(0, 1))
    )
    assert none.table(0, "device_clock").num_rows == 0


def test_rocpd_of_merged_recordings(tmp_path: Path) -> None:
    path = recordings.write_rocpd(tmp_path / "r.db", small())
    once = pipeline.read(path).table(0, "device_event").num_rows
    recordings.write_rocpd(path, small(), guid="_0000_bb22")
    assert pipeline.read(path).table(0, "device_event").num_rows == 2 * once


@pytest.mark.parametrize("format_", ["rocpd", "rocprof_json"])
def test_counters_in_a_recording_are_summed_over_instances(format_: str, tmp_path: Path) -> None:
    run = pipeline.read(WRITERS[format_](tmp_path))
    counters = rows(run, "kernel_counter", "dispatch_id", "kernel", "counter", "value")
    value = 16.0 if format_ == "rocpd" else 8.0
    assert counters == [(0, KERNEL, "SQ_WAVES", value), (1, KERNEL, "SQ_WAVES", value)]


def test_rocprof_csv_alone_names_agents_by_their_nodes(tmp_path: Path) -> None:
    files = recordings.write_rocprof_csv(tmp_path, small(), agents=False)
    run = pipeline.read(tmp_path)
    assert run.part(0).device_id == 4
    said = next(f for f in run.part(0).findings if f.code == "trace.not_recorded")
    assert "agent_info.csv" in said.message
    kernels = next(f for f in files if "kernel_trace" in f.name)
    closed(pipeline.attribute(kernels))


def test_two_recordings_in_a_folder_are_two_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        for file in recordings.write_rocprof_csv(tmp_path, small()):
            file.rename(tmp_path / file.name.replace("run_", f"rank{rank}_"))
    assert pipeline.read(tmp_path).ranks == [0, 1]


def test_steps_are_the_numbered_ranges_that_do_not_overlap(tmp_path: Path) -> None:
    made = small()
    # Not steps: a loop around all, the optimizer's, and the same range on another thread's time.
    made.ranges += [
        Span("batch", 900_000, 3_000_000),
        Span("optimizer step 3", 1_200_000, 1_300_000),
        Span("iteration 9", 1_100_000, 1_200_000),
    ]
    run = pipeline.read(recordings.write_nsys(tmp_path / "r.sqlite", made))
    assert [r[0] for r in rows(run, "step", "number")] == [5, 6]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aten::mm, seq = 12, op_id = 34", (True, "aten::mm", 12, 34, None)),
        ("aten::relu", (True, "aten::relu", None, None, None)),
        (
            "MmBackward0, seq = 3, sizes = [[2], []]",
            (True, "MmBackward0", 3, None, "[[2], []]"),
        ),
        (
            "autograd::engine::evaluate_function: MmBackward0, op_id = 9",
            (True, "autograd::engine::evaluate_function: MmBackward0", None, 9, None),
        ),
        ("ProfilerStep#4, op_id = 3", (False, "ProfilerStep#4", None, 3, None)),
        ("forward pass", None),
        ("a, seq = x", None),
    ],
)
def test_ranges_as_torch_writes_them(text: str, expected: tuple[Any, ...] | None) -> None:
    found = torch_range(text)
    if found is not None:
        assert expected is not None
        found = tuple(None if v == -(2**63) else v for v in found)  # type: ignore[assignment]
    assert found == expected


# ---------------------------------------------------------------- what is wrong with files


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        pipeline.attribute(path)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def test_a_database_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "photos.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE photo (id, taken)")
    db.close()
    line = refused(path)
    assert "found photo" in line
    assert "CUPTI_ACTIVITY_KIND_KERNEL" in line


def test_missing_tables_and_columns_are_named_with_the_version(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small())
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN start TO began")
    db.close()
    line = refused(path)
    assert "CUPTI_ACTIVITY_KIND_KERNEL lacks start" in line
    assert "2024.5" in line
    only = tmp_path / "osrt.sqlite"
    with sqlite3.connect(only) as db:
        db.execute("CREATE TABLE StringIds (id, value)")
        db.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name, value)")
    db.close()
    assert "no CUDA was traced" in refused(only)
    rpd = recordings.write_rpd(tmp_path / "r.rpd", small())
    with sqlite3.connect(rpd) as db:
        db.execute("DROP TABLE rocpd_string")
    db.close()
    assert "without rocpd_string.string" in refused(rpd)


def test_an_encrypted_database_and_reports_of_tools(tmp_path: Path) -> None:
    path = tmp_path / "secret.sqlite"
    path.write_bytes(random.Random(1).randbytes(8192))
    assert "encrypted" in refused(path)
    for name in ("report.nsys-rep", "out.pftrace", "report.ncu-rep"):
        path = tmp_path / name
        path.write_bytes(b"binary")
        assert "export it" in refused(path)


def test_names_and_values_from_the_file_do_nothing(tmp_path: Path) -> None:
    path = recordings.write_rocpd(tmp_path / "r.db", small())
    with sqlite3.connect(path) as db:
        db.execute('CREATE TABLE "rocpd_region_aa"";DROP TABLE x;--" (start, end)')
        # A view that would never end, under a name that is read.
        db.execute(
            "CREATE VIEW rocpd_op AS WITH RECURSIVE r(start) AS (SELECT 1 UNION ALL "
            "SELECT start + 1 FROM r) SELECT start FROM r"
        )
        event, text, huge = "rocpd_kernel_dispatch_0000_aa11", "rocpd_string_0000_aa11", 2**63 - 1
        db.execute(f"UPDATE {event} SET start = 'soon', end = ? WHERE dispatch_id = 0", (huge,))
        db.execute(
            f"UPDATE {event} SET agent_id = ?, stream_id = x'00ff' WHERE dispatch_id = 1", (huge,)
        )
        db.execute(f"UPDATE {text} SET string = x'fffe00' WHERE id = 1")
    db.close()
    found = pipeline.attribute(path)
    closed(found)
    assert "event.without_ts" in {f.code for f in found.findings}


def test_a_text_that_no_name_has_is_not_held(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small())
    with sqlite3.connect(path) as db:
        db.execute("UPDATE StringIds SET value = zeroblob(40000000) WHERE id = 1")
    db.close()
    found = pipeline.attribute(path)
    assert "trace.damaged_table" in {f.code for f in found.findings}


def test_a_journal_that_is_not_written_back_is_said(tmp_path: Path) -> None:
    path = recordings.write_nsys(tmp_path / "r.sqlite", small())
    path.with_name("r.sqlite-wal").write_bytes(b"x" * 100)
    codes = {f.code for f in pipeline.read(path).part(0).findings}
    assert "trace.unwritten_log" in codes


@pytest.mark.parametrize("format_", list(WRITERS))
def test_damaged_files_give_an_answer_or_one_line(format_: str, tmp_path: Path) -> None:
    """Cut at many places, and with single bits flipped."""
    folder = tmp_path / "whole"
    folder.mkdir()
    file = WRITERS[format_](folder)[0]
    data = file.read_bytes()
    chance = random.Random(format_)
    cases = [data[: len(data) * i // 10] for i in range(10)]
    for _ in range(40):  # `make fuzz` takes as many as its time allows
        flipped = bytearray(data)
        for _ in range(chance.choice((1, 1, 8))):
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        cases.append(bytes(flipped))
    said = [_answer(tmp_path / f"{i}{file.suffix}", damaged) for i, damaged in enumerate(cases)]
    assert all(line is None or ("\n" not in line and file.suffix in line) for line in said)
    assert said.count(None) > 5


def _answer(path: Path, data: bytes) -> str | None:
    """What is said of a file that is refused; None for one that was attributed."""
    path.write_bytes(data)
    try:
        closed(pipeline.attribute(path))
    except InputError as exc:
        return str(exc)
    return None


# ---------------------------------------------------------------- beside a trace of torch's


def kineto(path: Path, recording: recordings.Recording) -> Path:
    """The same kernels as torch's profiler would have seen them."""
    made = Trace()
    for w in recording.work:
        if w.copied is None:
            made.launch(
                w.name, w.start - 30_000, 10_000, kernel_at=w.start, kernel_for=w.end - w.start
            )
    path.write_bytes(made.encode())
    return path


def many() -> recordings.Recording:
    """Fifty kernels of three names at uneven times."""
    made = recordings.Recording()
    chance = random.Random(5)
    at = 1_000_000
    for i in range(50):
        at += chance.randrange(20_000, 400_000)
        made.calls.append(Span("LaunchKernel", at - 30_000, at - 20_000, i + 1))
        made.work.append(recordings.Work(f"kernel_{i % 3}", at, at + 10_000, i + 1))
    return made


def test_a_recording_of_the_same_run_is_joined_by_its_kernels(tmp_path: Path) -> None:
    trace = kineto(tmp_path / "trace.json", many())
    other = recordings.write_rpd(tmp_path / "t.rpd", many())
    run = pipeline.read([trace, other])
    assert run.ranks == [0]
    # Its clock counts from the start of the host, and is now the trace's.
    first = run.table(0, "device_event")["start_ns"][0].as_py()
    clocks = run.table(0, "device_clock")["time_ns"].to_pylist()
    assert clocks[0] == 1_000_000 + first - many().work[0].start
    said = next(f for f in run.part(0).findings if f.code == "trace.joined_recording")
    assert "100 % of the trace's kernels" in said.message
    closed(pipeline.attribute(run))
    alone = pipeline.read(trace)
    assert run.table(0, "device_event").equals(alone.table(0, "device_event"))


def test_a_window_finds_its_place_in_a_recording_of_the_whole_run(tmp_path: Path) -> None:
    whole, window = many(), many()
    window.work = window.work[20:40]
    for work in (*whole.work, *window.work):
        # One name for all: only the times tell where the window lies.
        work.name = KERNEL
    trace = kineto(tmp_path / "trace.json", window)
    other = recordings.write_rocprof_json(tmp_path / "results.json", whole)
    target = tmp_path / "run"
    done = CliRunner().invoke(cli, ["import", str(trace), str(other), "-o", str(target)])
    assert done.exit_code == 0, done.output
    run = pipeline.read(target)
    assert run.table(0, "device_event").num_rows == 20
    assert run.table(0, "kernel_counter").num_rows == 50
    assert "trace.joined_recording" in {f.code for f in run.part(0).findings}


def test_a_recording_of_another_run_is_refused(tmp_path: Path) -> None:
    trace = kineto(tmp_path / "trace.json", many())
    other = recordings.write_rpd(tmp_path / "t.rpd", small())
    with pytest.raises(InputError, match="it belongs to another run; import them separately"):
        pipeline.read([trace, other])
    run = pipeline.read(tmp_path)
    assert run.ranks == [0]
    assert [f.code for f in run.manifest.findings] == ["run.file_left_out"]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (steps.PROFILER_STEP, "ProfilerStep#12"),
        (steps._NUMBERED, "train step 12"),
        (kineto_reader._RANK, "rank 12"),
        (_events._NUMBERED, "stream 12"),
        (recording._SEQUENCE, "aten::mm, seq = 12"),
        (recording._OPERATOR_ID, "aten::mm, op_id = 12"),
        (rocprof_csv._AGENT, "Agent 12"),
        (collectives._PEER, "nccl:recv 12<-12"),
        (kernels._OPAQUE, "OpaqueType<12u>"),
    ],
)
def test_only_ascii_digits_are_numbers_of_names(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
    assert not pattern.search(text.replace("12", "١٢"))
