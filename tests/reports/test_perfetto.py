"""A timeline that was exported is the run again, to the nanosecond."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chopper
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
    run = chopper.attribute(source, **options)
    (timeline,) = export(run, "perfetto", folder / "timeline")
    imported(timeline, "-o", folder / "imported")
    wanted = everything(run)
    assert wanted["pieces"].num_rows
    for again in (folder / "timeline", folder / "imported"):
        found = everything(chopper.attribute(again))
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
    (path,) = export(chopper.attribute(OWN / "model-cuda"), "perfetto", folder)
    return path


def test_reports_and_queries_are_the_same(timeline: Path, tmp_path: Path) -> None:
    sql = "SELECT rank, cause, sum(time_ns) AS ns FROM piece GROUP BY ALL ORDER BY ALL"
    assert chopper.query(timeline, sql) == chopper.query(OWN / "model-cuda", sql)
    imported(timeline, "-o", tmp_path / "run", "--device", "h200")
    on_h200 = chopper.attribute(OWN / "model-cuda", device="h200")
    assert chopper.query(tmp_path / "run", sql) == chopper.query(on_h200, sql)
    said = chopper.load(tmp_path / "run").part(1).stated_device
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
        chopper.load([timeline, copy])


def _damaged(timeline: Path, target: Path, pattern: bytes, by: bytes) -> Path:
    text, count = re.subn(pattern, by, gzip.decompress(timeline.read_bytes()), count=1)
    assert count == 1
    target.write_bytes(text)
    return target


def test_a_damaged_timeline_is_one_clear_line(timeline: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(timeline.read_bytes()[:9000])
    with pytest.raises(InputError, match="ends within the run that it carries; export the run"):
        chopper.load(cut)
    bad = _damaged(timeline, tmp_path / "bad.json", rb'manifest.json":"....', b'manifest.json":"#!')
    with pytest.raises(InputError, match=r"that it carries is damaged .*; export the run again"):
        chopper.load(bad)
    leads = _damaged(timeline, tmp_path / "up.json", rb'"manifest.json"', b'"../evil.parquet"')
    with pytest.raises(InputError, match=r"carries '../evil.parquet', which is no file of a run"):
        chopper.load(leads)
    lost = _damaged(timeline, tmp_path / "lost.json", rb'"manifest.json":"[^"]*",', b"")
    with pytest.raises(InputError, match=r"lost.json: the run that it carries lacks manifest.json"):
        chopper.load(lost)
    new = rb"\g<1>" + base64.b64encode(b'{"schema_version": 99}')
    newer = _damaged(timeline, tmp_path / "newer.json", rb'(manifest.json":")[^"]*', new)
    with pytest.raises(InputError, match=r"newer.json, .* that it carries: written by a newer"):
        chopper.load(newer)
    with pytest.raises(InputError, match=r"table.json: rank-.*device_event.parquet .* is damaged"):
        chopper.load(_with_table(timeline, tmp_path / "table.json", b"PAR1 nothing PAR1"))


def test_a_timeline_whose_tables_unpack_without_bound_is_refused(
    timeline: Path, tmp_path: Path
) -> None:
    numbers = pa.table({"dur_ns": pa.repeat(pa.scalar(1), 6_000_000)})
    content = io.BytesIO()
    pq.write_table(numbers, content, compression="zstd")
    bomb = _with_table(timeline, tmp_path / "bomb.json", content.getvalue())
    with pytest.raises(InputError, match=r"bomb.json: .* of it unpack to 22.9 MiB, more than 200"):
        chopper.load(bomb)


def _with_table(timeline: Path, target: Path, content: bytes) -> Path:
    pattern = rb'(device_event.parquet":")[^"]*'
    return _damaged(timeline, target, pattern, rb"\g<1>" + base64.b64encode(content))
