"""An exported timeline: the original traces, Chopper's tracks beside them, and the run again."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.errors import InputError
from chopper.reports.export import export, note
from chopper.storage.parquet import plain
from tests.command import run as run_command
from tests.golden.own import OWN
from tests.kineto_writer import BASE_NS, Trace, small_trace

RUNS = [p.name for p in sorted(OWN.iterdir()) if p.is_dir()]
REAL = (
    "hta/a100-ddp-rank0of2-nccl-metadata.json.gz",
    "aorta/mi350x-rocprofiler-sdk-backend-train-step.json.gz",
    "tracelens/b300-moe-unit.json.gz",
    "rocmprofiledata/matmul.rpd.gz",
    "pipit-nsys/nsys-export-a100.sqlite.gz",
    pytest.param("hta/a100-recsys-rank3of8.json.gz", marks=pytest.mark.long),
    pytest.param("kineto/v100-resnet50-toplevel-list-2021.json.gz", marks=pytest.mark.long),
    pytest.param("param/v100-dlrm-8ranks", marks=pytest.mark.long),
)


def everything(run: Attribution) -> dict[str, Any]:
    """Return all that is attributed: every piece of every rank and step, and what is said of it."""
    whole = run.all_steps
    tables = {name: getattr(whole, name) for name in ("pieces", "windows", "gaps", "communication")}
    tables |= {f"links of {rank}": links for rank, links in whole.links.items()}
    return {name: table.cast(plain(table.schema)) for name, table in tables.items()} | {
        "causes": run.causes(),
        "ranks": run.ranks,
        "step": run.step,
        "findings": run.findings,
        "withheld": run.withheld,
        "coverage": run.coverage,
    }


def decoded(path: Path) -> Any:
    """Return JSON with the digits of its numbers."""
    content = path.read_bytes()
    text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    return json.loads(text, parse_float=str)


def nanoseconds(microseconds: Any) -> int:
    return int(Decimal(microseconds) * 1000)


def added(timeline: Any) -> dict[str, list[dict[str, Any]]]:
    """Return Chopper's slices of a timeline, by category; times in Unix ns."""
    base_ns = int(timeline.get("baseTimeNanoseconds", 0))
    slices: dict[str, list[dict[str, Any]]] = {}
    begun: dict[Any, dict[str, Any]] = {}
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in timeline["traceEvents"]
        if e.get("name") == "thread_name"
    }
    for event in timeline["traceEvents"]:
        key = event.get("pid"), event.get("tid")
        if not str(names.get(key)).startswith("chopper: ") or event["ph"] not in "BE":
            continue
        at_ns = base_ns + nanoseconds(event["ts"])
        if event["ph"] == "B":
            assert key not in begun
            begun[key] = {**event, "start_ns": at_ns}
        else:
            one = begun.pop(key)
            own = {**one, "end_ns": at_ns, "dur_ns": at_ns - one["start_ns"]}
            slices.setdefault(event["cat"], []).append(own)
    assert not begun
    return slices


def check_tracks(run: Any, path: Path) -> None:
    """Check that the tracks of causes tile the steps, and sum to the causes."""
    slices = added(decoded(path))
    whole = run.all_steps
    wanted: dict[str, int] = {}
    for row in whole.pieces.to_pylist():
        wanted[row["cause"]] = wanted.get(row["cause"], 0) + row["time_ns"]
    found: dict[str, int] = {}
    ends: dict[tuple[int, int], int] = {}
    for one in slices["cause"]:
        found[one["args"]["cause"]] = found.get(one["args"]["cause"], 0) + one["dur_ns"]
        key = one["pid"], one["start_ns"]
        assert key not in ends
        ends[key] = one["end_ns"]
    assert found == {cause: ns for cause, ns in wanted.items() if ns}
    for step in slices["step"]:
        at = step["start_ns"]
        while at < step["end_ns"]:
            at = ends[step["pid"], at]
        assert at == step["end_ns"]


def imported(timeline: Path, *options: str | Path) -> None:
    done = run_command("import", timeline, *options)
    assert done.code == 0, done.err


def check_round_trip(source: Any, folder: Path, **options: Any) -> None:
    run = pipeline.attribute(source, **options)
    (timeline,) = export(run, "perfetto", folder / "timeline")
    check_tracks(run, timeline)
    imported(timeline, "-o", folder / "imported")
    wanted = everything(run)
    assert wanted["pieces"].num_rows
    for again in (folder / "timeline", folder / "imported"):
        found = everything(pipeline.attribute(again))
        for name, value in wanted.items():
            assert found[name] == value, (name, again)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_comes_back_from_its_timeline(name: str, tmp_path: Path) -> None:
    check_round_trip(OWN / name, tmp_path)


def test_what_the_user_said_and_chose_comes_back(tmp_path: Path) -> None:
    check_round_trip(OWN / "model-cuda", tmp_path, device="h200", steps=[12, 13])


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_comes_back_from_its_timeline(
    name: str, traces_dir: Path, tmp_path: Path
) -> None:
    check_round_trip(traces_dir / name, tmp_path)


ORIGINAL = (
    "hta/a100-ddp-rank0of2-nccl-metadata.json.gz",
    pytest.param("kineto/v100-resnet50-toplevel-list-2021.json.gz", marks=pytest.mark.long),
    "tracelens/b300-moe-unit.json.gz",
    "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz",
)


@pytest.mark.parametrize("name", ORIGINAL)
def test_a_real_trace_is_in_its_timeline_unchanged(
    name: str, traces_dir: Path, tmp_path: Path
) -> None:
    check_unchanged(traces_dir / name, tmp_path)


def check_unchanged(source: Path, folder: Path) -> None:
    run = pipeline.attribute(source)
    (path,) = export(run, "perfetto", folder / "timeline")
    timeline, original = decoded(path), decoded(source)
    events = original if isinstance(original, list) else original.pop("traceEvents")
    kept, more = timeline["traceEvents"][: len(events)], timeline["traceEvents"][len(events) :]
    assert Counter(e["ph"] for e in kept) == Counter(e["ph"] for e in events)
    base_ns = int(timeline.get("baseTimeNanoseconds", 0))
    if isinstance(original, list) or "baseTimeNanoseconds" not in original:
        # Unix times in microseconds are too large for a viewer's floats.
        for event in kept:
            if event["ph"] != "M":
                at_ns = nanoseconds(event["ts"]) + base_ns
                event["ts"] = at_ns
        for event in events:
            if event["ph"] != "M":
                event["ts"] = nanoseconds(event["ts"])
    assert kept == events
    if isinstance(original, dict):
        assert {name: timeline[name] for name in original} == original
    pids = {e.get("pid") for e in events}
    assert not {e["pid"] for e in more} & pids
    assert note(run) == ""
    check_tracks(run, path)


def rank_trace(rank: int, base_ns: int) -> Trace:
    """A rank whose process and arrows have the numbers that other ranks' have, too."""
    trace = small_trace(rank=rank, world=2, base_ns=base_ns)
    at = {"cat": "ac2g", "name": "ac2g"}
    trace.events += [
        {"ph": "s", "id": 1, "ts": 2_000, "pid": 4711, "tid": 4711, **at},
        {"ph": "f", "id": 1, "ts": 3_000, "pid": 0, "tid": 7, "bp": "e", **at},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "x",
            "ts": 0,
            "dur": 20_000,
        },
    ]
    trace.memory(4_000, 512, 1024, 2048)
    trace.counter("GPU power", 5_003, watts=301.5)
    return trace


def test_a_trace_is_in_its_timeline_unchanged(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_bytes(rank_trace(0, BASE_NS).encode())
    check_unchanged(source, tmp_path)
    run = pipeline.attribute(source)
    slices = added(decoded(tmp_path / "timeline" / "trace.json.gz"))["cause"]
    # Kernels of the first step run from 1 000 to 2 000, 3 000 to 5 000 and 6 000 to 9 000 ns.
    busy = [s for s in slices if not s["args"]["cause"].startswith("idle")]
    first_ns = run.windows["start_ns"][0].as_py()
    edges = {s["start_ns"] - BASE_NS for s in busy} | {s["end_ns"] - BASE_NS for s in busy}
    assert edges >= {1_000, 2_000, 3_000, 5_000, 6_000, 9_000}
    assert min(s["start_ns"] for s in slices) == first_ns


def test_several_ranks_have_processes_and_arrows_of_their_own(tmp_path: Path) -> None:
    originals = []
    for rank, later_ns in ((0, 0), (1, 4_567_891)):
        path = tmp_path / f"rank{rank}.json"
        path.write_bytes(rank_trace(rank, BASE_NS + later_ns).encode())
        originals.append((decoded(path), later_ns))
    run = pipeline.attribute([tmp_path / "rank0.json", tmp_path / "rank1.json"])
    (path,) = export(run, "perfetto", tmp_path / "timeline")
    timeline = decoded(path)
    check_tracks(run, path)
    assert [h["ranks"] for h in timeline["headers"]] == [[0], [1]]
    assert [h["baseTimeNanoseconds"] for h in timeline["headers"]] == [BASE_NS, BASE_NS + 4_567_891]
    at = 0
    pids: list[dict[Any, Any]] = []
    ids: list[dict[Any, Any]] = []
    for original, later_ns in originals:
        new_pid: dict[Any, Any] = {}
        new_id: dict[Any, Any] = {}
        events = [e for e in timeline["traceEvents"][at:] if e["name"] != "process_labels"]
        for before, event in zip(original["traceEvents"], events, strict=False):
            assert new_pid.setdefault(before["pid"], event["pid"]) == event["pid"]
            moved_ns = 0 if before["ph"] == "M" else later_ns
            assert nanoseconds(event["ts"]) == nanoseconds(before["ts"]) + moved_ns
            if "id" in before:
                assert new_id.setdefault(before["id"], event["id"]) == event["id"]
            changed = {"pid": event["pid"], "ts": event["ts"], "id": event.get("id")}
            assert event == {**before, **{k: v for k, v in changed.items() if k in before}}
        at += len(original["traceEvents"]) + len(new_pid)
        pids.append(new_pid)
        ids.append(new_id)
    assert pids[0] == {4711: 4711, 0: 0, "Spans": "Spans"}
    assert ids[0] == {1: 1}
    for first, second in (pids, ids):
        assert not {*first.values()} & {*second.values()}


def test_the_run_of_an_imported_trace_keeps_its_events(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_bytes(rank_trace(0, BASE_NS).encode())
    done = run_command("import", source, "-o", tmp_path / "run")
    assert done.code == 0, done.err
    (path,) = export(pipeline.attribute(tmp_path / "run"), "perfetto", tmp_path / "timeline")
    original = decoded(source)["traceEvents"]
    assert decoded(path)["traceEvents"][: len(original)] == original


def test_a_second_command_finds_the_original_trace(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_bytes(rank_trace(0, BASE_NS).encode())
    original = decoded(source)["traceEvents"]
    for name in ("first", "second"):
        done = run_command("export", source, "--to", "perfetto", "-o", tmp_path / name)
        assert "without an original trace" not in done.err
        events = decoded(tmp_path / name / "trace.json.gz")["traceEvents"]
        assert events[: len(original)] == original


def test_without_the_original_trace_the_tables_are_shown_and_a_line_says_so(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    source.write_bytes(rank_trace(0, BASE_NS).encode())
    assert run_command("import", source, "-o", tmp_path / "run").code == 0
    for file in (tmp_path / "run").glob("rank-*/trace*"):
        file.unlink()
    done = run_command("export", tmp_path / "run", "--to", "perfetto", "-o", tmp_path / "timeline")
    assert "1 rank without an original trace in Kineto's JSON (0)" in done.err
    path = tmp_path / "timeline" / "trace.json.gz"
    run = pipeline.attribute(tmp_path / "run")
    check_tracks(run, path)
    events = decoded(path)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    joined = run.joined[0]
    assert len(spans) == joined.host_span.num_rows + joined.device_event.num_rows
    # Six launches, each an arrow to its kernel or copy.
    assert Counter(e["ph"] for e in events)["s"] == 6
    assert Counter(e["ph"] for e in events)["f"] == 6


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline")
    (path,) = export(pipeline.attribute(OWN / "model-cuda"), "perfetto", folder)
    return path


def test_reports_and_queries_are_the_same(timeline: Path, tmp_path: Path) -> None:
    sql = "SELECT rank, cause, sum(time_ns) AS ns FROM piece GROUP BY ALL ORDER BY ALL"
    assert chopper.query(timeline, sql).arrow() == chopper.query(OWN / "model-cuda", sql).arrow()
    imported(timeline, "-o", tmp_path / "run", "--device", "h200")
    on_h200 = chopper.attribute(OWN / "model-cuda", device="h200")
    assert chopper.query(tmp_path / "run", sql).arrow() == chopper.query(on_h200, sql).arrow()
    said = pipeline.read(tmp_path / "run").part(1).stated_device
    assert said is not None
    assert said.name.startswith("NVIDIA H200")


def test_viewers_find_one_object_with_events(timeline: Path) -> None:
    trace = json.loads(gzip.decompress(timeline.read_bytes()))
    assert [*trace][-1] == "traceEvents"
    assert {*trace["chopperRun"]} > {"manifest.json", "rank-00001/device_event.parquet"}
    assert all(isinstance(event, dict) and "ph" in event for event in trace["traceEvents"])


def test_other_files_beside_a_timeline_are_refused(timeline: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other.json.gz"
    copy.write_bytes(timeline.read_bytes())
    with pytest.raises(InputError, match=r"carries a whole run.*name it alone, without .*other"):
        pipeline.read([timeline, copy])


def _damaged(timeline: Path, target: Path, pattern: bytes, by: bytes) -> Path:
    text, count = re.subn(pattern, by, gzip.decompress(timeline.read_bytes()), count=1)
    assert count == 1
    target.write_bytes(text)
    return target


def _forged(timeline: Path, target: Path, change: Callable[[dict[str, bytes]], Any]) -> Path:
    """Change the files that a timeline carries, with the checksum that they then have."""
    trace = json.loads(gzip.decompress(timeline.read_bytes()))
    files = {name: base64.b64decode(text) for name, text in trace["chopperRun"].items()}
    del files["sha256"]
    change(files)
    checksum = hashlib.sha256(b"".join(name.encode() + data for name, data in files.items()))
    files["sha256"] = checksum.digest()
    trace |= {"chopperRun": {name: base64.b64encode(d).decode() for name, d in files.items()}}
    target.write_text(json.dumps(trace))
    return target


def test_a_damaged_timeline_is_one_clear_line(timeline: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(timeline.read_bytes()[:9000])
    with pytest.raises(InputError, match="ends within the run that it carries; export the run"):
        pipeline.read(cut)
    bad = _damaged(timeline, tmp_path / "bad.json", rb'manifest.json":"....', b'manifest.json":"#!')
    with pytest.raises(InputError, match=r"that it carries is damaged .*; export the run again"):
        pipeline.read(bad)
    table = rb'(device_event.parquet":".{400}).'
    flip = _damaged(timeline, tmp_path / "flip.json", table, rb"\g<1>/")
    with pytest.raises(InputError, match=r"flip.json: the checksum of the run .* is damaged; expo"):
        pipeline.read(flip)
    last = tmp_path / "last.json"
    trace = json.loads(gzip.decompress(timeline.read_bytes()))
    last.write_text(json.dumps({"traceEvents": trace.pop("traceEvents"), **trace}))
    with pytest.raises(InputError, match=r"last.json: carries a run, but not at its beginning"):
        pipeline.read(last)


EVENTS = "rank-00000/device_event.parquet"


def _with(**of_first_rank: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        run = json.loads(files["manifest.json"])
        run["ranks"][0] |= of_first_rank
        files["manifest.json"] = json.dumps(run).encode()

    return change


def _with_times(files: dict[str, bytes]) -> None:
    events = pq.read_table(io.BytesIO(files[EVENTS]))
    at = events.schema.get_field_index("start_ns")
    times = pa.repeat(pa.scalar(-(2**63)), events.num_rows)
    files[EVENTS] = _parquet(events.set_column(at, events.field(at), times))


def _with_nulls(files: dict[str, bytes]) -> None:
    events = pq.read_table(io.BytesIO(files[EVENTS]))
    at = events.schema.get_field_index("start_ns")
    files[EVENTS] = _parquet(events.set_column(at, "start_ns", pa.nulls(len(events), pa.int64())))


def _with_a_column_twice(files: dict[str, bytes]) -> None:
    events = pq.read_table(io.BytesIO(files[EVENTS]))
    files[EVENTS] = _parquet(events.append_column("start_ns", events["start_ns"]))


def _parquet(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


ONE_COLUMN = pa.table({"dur_ns": pa.repeat(pa.scalar(1), 6_000_000)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: files.update({"../evil.parquet": b""}),
            "carries '../evil.parquet', which is no file of a run",
        ),
        (lambda files: files.pop("manifest.json"), "the run that it carries lacks manifest.json"),
        (
            lambda files: files.update({"manifest.json": b'{"schema_version": 99}'}),
            "manifest.json of the run that it carries: written by a newer",
        ),
        (_with(rank=1), "manifest.json of the run that it carries: damaged manifest .ranks 1, 1."),
        (
            _with(traces=["../gone.json.gz"]),
            "the run that it carries names raw traces",
        ),
        (lambda files: files.update({EVENTS: b"PAR1 nothing PAR1"}), f"{EVENTS} .* is damaged"),
        (lambda files: files.update({EVENTS: _parquet(ONE_COLUMN[:9])}), f"{EVENTS} .* is damaged"),
        (_with_times, f"{EVENTS} of the run that it carries is damaged; export the run again"),
        (_with_nulls, f"{EVENTS} of the run that it carries is damaged; export the run again"),
        (_with_a_column_twice, f"{EVENTS} of the run that it carries is damaged; export the run"),
        (
            lambda files: files.update({EVENTS: _parquet(ONE_COLUMN)}),
            ".* of it unpack to 22.9 MiB, more than 200",
        ),
    ],
    ids=(
        "path",
        "no manifest",
        "newer",
        "ranks",
        "traces",
        "no table",
        "columns",
        "times",
        "nulls",
        "twice",
        "size",
    ),
)
def test_a_forged_timeline_is_one_clear_line(
    timeline: Path, tmp_path: Path, change: Any, message: str
) -> None:
    forged = _forged(timeline, tmp_path / "forged.json", change)
    with pytest.raises(InputError, match=f"forged.json(: |, ){message}"):
        pipeline.read(forged)


def test_a_forged_table_is_refused_whatever_may_be_unpacked(
    timeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHOPPER_MAX_INPUT", "10GB")
    forged = _forged(
        timeline,
        tmp_path / "forged.json",
        lambda files: files.update({EVENTS: _parquet(ONE_COLUMN)}),
    )
    with pytest.raises(InputError, match=f"forged.json: {EVENTS} .* is damaged; export"):
        pipeline.read(forged)
