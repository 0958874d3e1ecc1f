"""A timeline that was exported is the run again, to the nanosecond."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chopper
from chopper import pipeline
from chopper.attribution import Attribution
from chopper.errors import InputError
from chopper.reports.export import export
from chopper.storage.parquet import plain
from tests.command import run as run_command
from tests.golden.own import OWN

RUNS = [p.name for p in sorted(OWN.iterdir()) if p.is_dir()]
REAL = (
    "hta/a100-ddp-rank0of2-nccl-metadata.json.gz",
    "hta/a100-recsys-rank3of8.json.gz",
    "kineto/v100-resnet50-toplevel-list-2021.json.gz",
    "aorta/mi350x-rocprofiler-sdk-backend-train-step.json.gz",
    "tracelens/b300-moe-unit.json.gz",
    "rocmprofiledata/matmul.rpd.gz",
    "param/v100-dlrm-8ranks",
    "pipit-nsys/nsys-export-a100.sqlite.gz",
)


def everything(run: Attribution) -> dict[str, Any]:
    """Return all that is attributed: every piece of every rank and step, and what is said of it."""
    whole = run.whole
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


def imported(timeline: Path, *options: str | Path) -> None:
    done = run_command("import", timeline, *options)
    assert done.code == 0, done.err


def check_round_trip(source: Any, folder: Path, **options: Any) -> None:
    run = pipeline.attribute(source, **options)
    (timeline,) = export(run, "perfetto", folder / "timeline")
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


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline")
    (path,) = export(pipeline.attribute(OWN / "model-cuda"), "perfetto", folder)
    return path


def test_reports_and_queries_are_the_same(timeline: Path, tmp_path: Path) -> None:
    sql = "SELECT rank, cause, sum(time_ns) AS ns FROM piece GROUP BY ALL ORDER BY ALL"
    assert chopper.query(timeline, sql) == chopper.query(OWN / "model-cuda", sql)
    imported(timeline, "-o", tmp_path / "run", "--device", "h200")
    on_h200 = pipeline.attribute(OWN / "model-cuda", device="h200")
    assert chopper.query(tmp_path / "run", sql) == chopper.query(on_h200, sql)
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
