"""Files on disk are checked before use, and a run directory reaches nothing outside itself."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.errors import ChopperError, InputError, RunFormatError
from chopper.experiments import results
from chopper.experiments.loading import load
from chopper.hardware import calibration
from chopper.storage.files import inside, write_atomic
from chopper.storage.parts import RunWriter
from chopper.storage.run import Run
from chopper.storage.streams import ChecksummedSink, StreamWriter, read_stream
from chopper.tables import TABLES
from tests.bad_input.make import analyzed, of_rank, quality, same, without_tables, write
from tests.command import run

FLIPS_COUNT = 600


def written(path: Path, *, checksums: bool = True) -> list[dict[str, Any]]:
    """Write a stream with dictionaries that grow, as samplers do; returns its rows."""
    rows = [
        {"time_ns": t, "track": f"t{t % 3}", "name": f"n{t}", "value": float(t) if t % 4 else None}
        for t in range(20)
    ]
    if not checksums:
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        schema = TABLES["counter"].arrow
        with path.open("wb") as file, pa.ipc.new_stream(file, schema, options=options) as writer:
            for start in range(0, 20, 5):
                writer.write_batch(
                    pa.RecordBatch.from_pylist(rows[start : start + 5], schema=schema)
                )
        return rows
    stream = StreamWriter(path, "counter")
    for start in range(0, 20, 5):
        batch = rows[start : start + 5]
        stream.write({name: [row[name] for row in batch] for name in rows[0]})
    stream.close()
    return rows


def flipped(data: bytes, count: int) -> list[bytes]:
    """Copies with one flipped bit each."""
    bits = random.Random(13).sample(range(len(data) * 8), count)
    copies = []
    for bit in bits:
        copy = bytearray(data)
        copy[bit // 8] ^= 1 << (bit % 8)
        copies.append(bytes(copy))
    return copies


def test_no_flipped_bit_in_a_stream_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "counter.arrow"
    rows = written(path)
    assert read_stream(path, "counter")[1] is None
    for data in flipped(path.read_bytes(), FLIPS_COUNT):
        path.write_bytes(data)
        table, finding = read_stream(path, "counter")
        kept = table.to_pylist()
        assert kept == rows[: len(kept)]
        assert finding is not None
        assert f"{len(kept)} rows before it are used" in finding.message


def test_a_flipped_bit_in_an_older_stream_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "counter.arrow"
    rows = written(path, checksums=False)
    table, finding = read_stream(path, "counter")
    assert (table.to_pylist(), finding) == (rows, None)
    for data in flipped(path.read_bytes(), FLIPS_COUNT):
        path.write_bytes(data)
        try:
            table, _ = read_stream(path, "counter")
        except ChopperError as exc:
            assert "\n" not in str(exc)  # noqa: PT017
        else:
            table.validate(full=True)
            table.to_pylist()


def test_a_stream_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "counter.arrow"
    written(path)
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = reader.read_all()
    twice = table.append_column(table.schema.field(0), table.column(0))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, twice.schema) as writer:
        writer.write_table(twice)
    with pytest.raises(ChopperError, match="a column occurs twice"):
        read_stream(path, "counter")


def test_checksums_are_invisible_to_other_readers(tmp_path: Path) -> None:
    path = tmp_path / "counter.arrow"
    rows = written(path)
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
        assert reader.read_all().to_pylist() == rows


def test_a_sink_counts_what_it_writes(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb", buffering=0) as file:
        sink = ChecksummedSink(file)
        assert sink.write(b"123456789") == 9
        assert sink.crc32 == 0xCBF43926  # the check value of CRC-32
        sink.write_trailer()
        sink.close()
    assert (tmp_path / "f").read_bytes() == b"123456789chopper.crc32=cbf43926"


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001/manifest.json"])
def test_a_manifest_that_is_not_utf8(imported: Path, name: str) -> None:
    whole = analyzed(imported)
    if name != "manifest.json":
        (imported / "manifest.json").unlink()
    file = imported / name
    file.write_bytes(file.read_bytes().replace(b'"trace.json.gz"', b'"trace\xff"', 1))
    damaged = analyzed(imported)
    assert same(damaged, whole)
    assert {"run.manifest_damaged", "run.part_missing"} & set(quality(damaged))


def test_documents_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_bytes(b'{"schema": "\xff"}')
    with pytest.raises(InputError, match=r"is not an experiment .*run the workload again"):
        results.read_plan(tmp_path)
    deep = tmp_path / "deep.json"
    deep.write_bytes(b"[" * 100_000)
    with pytest.raises(InputError, match="is not a calibration"):
        calibration.load_all(deep)


def test_a_damaged_calibration_file_stops_nothing_but_its_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded on this host's cores, whose ceiling would come from that file."""
    part = RunWriter(tmp_path / "run", 0)
    part.manifest.hostname = socket.gethostname()
    part.manifest.traces = ("trace.json",)
    part.manifest.status = "complete"
    part.save()
    write(part.directory / "trace.json", of_rank(0, platform="cpu"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = calibration.default_path()
    store.parent.mkdir()
    store.write_bytes(b'{"schema": "chopper.calibration/1", "x": "\xff"}')
    attribution = pipeline.attribute(tmp_path / "run")
    reason = attribution.ceilings[0].achievable_reason
    assert reason is not None
    assert "is not a calibration" in reason
    doctor = run("doctor")
    assert doctor.code == 0
    assert "is not a calibration" in " ".join(doctor.out.split())


def test_traces_that_a_manifest_names_lie_in_the_run(imported: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("password = hunter2\n")
    file = imported / "manifest.json"
    text = file.read_text()
    without_tables(imported)
    for name in (str(secret), "../../secret.txt", "../rank-00001/trace.json.gz"):
        file.write_text(text.replace('"trace.json.gz"', json.dumps(name), 1))
        outcome = run("analyze", imported)
        assert outcome.code == 1
        assert "which is not inside it" in outcome.line
        assert "hunter2" not in outcome.line
    file.write_text(text.replace('"trace.json.gz"', '""', 1))
    outcome = run("analyze", imported)
    assert outcome.code == 0
    assert "manifest.json:" in "".join(outcome.out.split())


def test_links_in_a_run_are_refused(imported: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("rank-00001/step.parquet", "rank-00001", "rank-00001/trace.json.gz"):
        if name.endswith("gz"):
            without_tables(imported)
        entry, moved = imported / name, tmp_path / "moved"
        entry.rename(moved)
        entry.symlink_to(moved)
        outcome = run("analyze", imported)
        assert outcome.code == 1, name
        assert f"{entry}: is a link" in outcome.line
        entry.unlink()
        moved.rename(entry)
    for name in ("manifest.json", "rank-00000/step.arrow"):
        entry = imported / name
        entry.unlink(missing_ok=True)
        entry.symlink_to(write(outside / "secret", b"hunter2"))
        assert f"{entry}: is a link" in run("analyze", imported).line
        entry.unlink()
    # The run itself may be reached through one.
    (tmp_path / "latest").symlink_to(imported)
    assert analyzed(tmp_path / "latest")["observed_ns"] > 0


def test_a_pipe_in_place_of_a_file_is_not_waited_for(imported: Path) -> None:
    whole = analyzed(imported)
    (imported / "rank-00001" / "device_clock.arrow").unlink(missing_ok=True)
    os.mkfifo(imported / "rank-00001" / "device_clock.arrow")
    assert same(analyzed(imported), whole)
    table = imported / "rank-00001" / "step.parquet"
    table.unlink()
    os.mkfifo(table)
    assert f"{table}: damaged (is not a regular file)" in run("analyze", imported).line


def test_joining_copies_no_link(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = write(tmp_path / f"{rank}.json", of_rank(rank))
        assert run("import", trace, "-o", tmp_path / f"node{rank}").code == 0
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "node1" / "rank-00001" / "notes").symlink_to(tmp_path / "secret")
    outcome = run("gather", tmp_path / "node0", tmp_path / "node1", "-o", tmp_path / "joined")
    assert outcome.code == 1
    assert "notes: is a link" in outcome.line
    assert not (tmp_path / "joined").exists()


def test_nothing_is_recorded_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-00000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFormatError, match="is a link"):
        RunWriter(tmp_path / "run", 0)
    # A temporary name that somebody else laid out leads nowhere either.
    victim = write(tmp_path / "victim", b"kept")
    (tmp_path / f".f.{os.getpid()}.tmp").symlink_to(victim)
    write_atomic(tmp_path / "f", b"new")
    assert (victim.read_bytes(), (tmp_path / "f").read_bytes()) == (b"kept", b"new")


def test_inside_takes_plain_names(tmp_path: Path) -> None:
    assert inside(tmp_path, Path("tables", "rank-00000")) == tmp_path / "tables" / "rank-00000"
    for name in ("/etc/passwd", "a/../../b", "..", ".", "", "a\0b"):
        with pytest.raises(RunFormatError, match="not inside it"):
            inside(tmp_path, name)


def test_runs_of_an_experiment_lie_in_it(imported: Path, tmp_path: Path) -> None:
    assert Run.open(imported).ranks == [0, 1]
    plan = results.Plan(
        chopper_version="0",
        workload="gemm",
        summary="",
        command=[],
        created_ns=1,
        ranks=2,
        device="cpu",
        options={},
        steps=True,
        baseline=None,
        variants=[results.VariantPlan(name="v", summary="", runs=["../run"])],
    )
    (tmp_path / "e").mkdir()
    results.write_plan(tmp_path / "e", plan)
    with pytest.raises(InputError, match="not inside it"):
        load(tmp_path / "e")
