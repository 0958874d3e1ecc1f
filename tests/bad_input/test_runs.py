"""Several traces that do not belong together, and run directories that are damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.recording.finish import finalize
from chopper.storage.parts import RunWriter
from chopper.storage.streams import StreamWriter
from tests.bad_input.make import (
    GOOD,
    PNG,
    analyzed,
    of_rank,
    quality,
    refused,
    same,
    without_tables,
    write,
)
from tests.command import run
from tests.kineto_writer import small_trace


def test_duplicate_ranks(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", of_rank(0)), write(tmp_path / "b.json", of_rank(0))
    line = refused(tmp_path / "*.json", tmp_path)
    same_process = "of one process (pid 100) and overlapping in time: the same trace twice"
    assert line.startswith(f"{a} and {b}: {same_process}")
    other = write(tmp_path / "b.json", of_rank(0).replace(b'"pid": 100', b'"pid": 200'))
    line = refused(tmp_path / "*.json", tmp_path)
    assert line.startswith(f"two traces claim rank 0: {a} and {other}; pass one of them")


def test_missing_ranks_are_said(tmp_path: Path) -> None:
    files = [write(tmp_path / f"r{r}.json", of_rank(r, 4)) for r in (0, 2)]
    found = analyzed(*files)
    assert [r["rank"] for r in found["ranks"]] == [0, 2]
    assert "2 of 4 ranks are missing (1, 3)" in quality(found)["run.ranks_missing"]["message"]


def test_world_sizes_of_different_runs(tmp_path: Path) -> None:
    write(tmp_path / "a.json", of_rank(0, 2))
    write(tmp_path / "b.json", of_rank(1, 8))
    line = refused(tmp_path / "*.json", tmp_path)
    assert line.startswith(
        f"traces of different runs: world sizes differ ({tmp_path / 'a.json'} says 2, {tmp_path}"
    )


def test_times_of_different_runs(tmp_path: Path) -> None:
    write(tmp_path / "a.json", of_rank(0))
    write(tmp_path / "b.json", of_rank(1, base_ns=1_751_410_836_000_000_000 + 5 * 3600 * 10**9))
    line = refused(tmp_path / "*.json", tmp_path)
    said = f"{tmp_path / 'b.json'} starts 5.0 h after {tmp_path / 'a.json'} ended"
    assert line.startswith(f"traces of different runs: {said}")


def test_ranks_without_a_common_moment(tmp_path: Path) -> None:
    write(tmp_path / "a.json", of_rank(0))
    write(tmp_path / "b.json", of_rank(1, base_ns=1_751_410_836_000_000_000 + 10**9))
    assert "run.no_common_time" in quality(analyzed(tmp_path))


def test_a_file_that_does_not_say_its_rank_beside_one_that_does(tmp_path: Path) -> None:
    write(tmp_path / "a.json", of_rank(1))
    write(tmp_path / "b.json", small_trace().encode())
    found = analyzed(tmp_path)
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    assert "b.json do not name their rank" in quality(found)["run.rank_unknown"]["message"]


def test_rank_beyond_its_world(tmp_path: Path) -> None:
    found = analyzed(write(tmp_path / "a.json", of_rank(5, 2)))
    assert "rank 5 of a job of 2" in quality(found)["run.rank_beyond_world"]["message"]


def test_a_job_of_too_many_ranks_is_not_believed(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.json", of_rank(rank, 2**61))
    found = analyzed(tmp_path)
    assert "rejected" in quality(found)["run.world_size"]["message"]
    assert "run.ranks_missing" not in quality(found)


def test_a_rank_beyond_any_job_is_not_believed(tmp_path: Path) -> None:
    found = analyzed(write(tmp_path / "t.json", small_trace(rank=2**31).encode()))
    assert [r["rank"] for r in found["ranks"]] == [0]
    assert "rejected" in quality(found)["run.rank_number"]["message"]


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
    assert [r["observed_ns"] > 0 for r in found["ranks"]] == [True]
    message = quality(found)["run.ranks_missing"]["message"]
    assert message.startswith("1 rank of the manifest (1) left out: no folder in the run")


def test_run_whose_trace_is_truncated(imported: Path) -> None:
    path = imported / "rank-00001" / "trace.json.gz"
    whole = analyzed(imported)
    path.write_bytes(path.read_bytes()[:-120])
    assert analyzed(imported) == whole  # its tables are read
    found = analyzed(without_tables(imported))
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
        write(writer.directory / "trace.json", of_rank(r)[:-200])
        stream = StreamWriter(writer.directory / "counter.arrow", "counter")
        for i in range(3):
            stream.write({"time_ns": [i], "track": ["t"], "name": ["n"], "value": [1.0]})
        stream._sink.close()  # as a killed process leaves it
        if r == 1:
            data = stream.path.read_bytes()
            stream.path.write_bytes(data[:-40])
    opened = pipeline.read(tmp_path / "run")
    assert [opened.table(r, "counter").num_rows for r in (0, 1)] == [3, 2]
    cut = [f.message for f in opened.part(1).findings if f.code == "telemetry.truncated"]
    assert ["2 rows before it are used" in message for message in cut] == [True]
    found = analyzed(tmp_path / "run")
    assert "never closed its recording" in quality(found)["run.rank_died"]["message"]
    assert "trace.truncated" in quality(found)
    manifest = finalize(tmp_path / "run", exit_code=128 + 9)
    [died, _] = (f.message for f in manifest.findings if f.code == "run.rank_died")
    assert "the command's exit code is 137, as after SIGKILL; no step is on disk" in died
    assert [p.status for p in manifest.ranks] == ["running", "running"]


def test_stream_that_is_no_stream(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0)
    writer.save()
    for name, data in (("counter", b""), ("thread", PNG), ("memory_event", b"ARROW1")):
        (writer.directory / f"{name}.arrow").write_bytes(data)
    opened = pipeline.read(tmp_path / "run")
    for name in ("counter", "thread", "memory_event"):
        assert opened.table(0, name).num_rows == 0
    codes = [f.code for f in opened.part(0).findings]
    assert codes == [*["telemetry.truncated"] * 3, "trace.absent"]


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


def test_run_whose_manifest_lists_no_ranks(imported: Path, tmp_path: Path) -> None:
    whole = analyzed(imported)
    file = imported / "manifest.json"
    document = json.loads(file.read_bytes())
    file.write_text(json.dumps(document | {"ranks": []}))
    found = analyzed(imported)
    assert "damaged manifest (ranks none)" in quality(found)["run.manifest_damaged"]["message"]
    assert same(found, whole)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(file, alone)
    outcome = run("analyze", alone)
    assert outcome.code == 1
    assert outcome.lines == [f"chopper: {alone}/manifest.json: damaged manifest (ranks none)"]


def _naming(place: Path, ranks: int) -> Path:
    place.mkdir()
    each = ", ".join(f'{{"rank": {rank}}}' for rank in range(ranks))
    text = f'{{"schema_version": 1, "kind": "recorded", "name": "x", "ranks": [{each}]}}'
    (place / "manifest.json").write_text(text)
    return place


def test_ranks_that_only_a_manifest_names_are_left_out(tmp_path: Path) -> None:
    # 100 000 took 50 s before a word, and 20 000 more than ten minutes to the end.
    named = _naming(tmp_path / "named", 100_000)
    said = "ranks (0, 1, 2, 3, 4, 5, 6, 7 …), but there is no rank-00000 beside it"
    assert said in run("analyze", named).line
    writer = RunWriter(named, 3)
    (writer.directory / "trace.json").write_bytes(of_rank(3))
    writer.manifest.traces = ("trace.json",)
    writer.save()
    manifest = json.loads((named / "manifest.json").read_text())
    manifest["ranks"][3]["traces"] = ["trace.json"]
    (named / "manifest.json").write_text(json.dumps(manifest))
    found = analyzed(named)
    assert [r["rank"] for r in found["ranks"]] == [3]
    missing = quality(found)["run.ranks_missing"]
    assert (missing["count"], "copy it whole" in missing["message"]) == (99_999, True)


def test_a_manifest_is_bounded(tmp_path: Path) -> None:
    line = run("analyze", _naming(tmp_path / "many", (1 << 20) + 1)).line
    assert "names 1048577 ranks, expected at most 1048576" in line
    long = _naming(tmp_path / "long", 1)
    os.truncate(long / "manifest.json", 1 << 40)
    assert "has 1.00 TiB, expected at most 512 MiB of a document" in run("analyze", long).line
