"""The run directory: written rank by rank, closed once, read whole or half."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from chopper.errors import OutputError, SchemaError
from chopper.hardware.launchers import LaunchEnvironment
from chopper.recording.claim import claim
from chopper.recording.finish import finalize
from chopper.storage import destination
from chopper.storage import processes as _processes
from chopper.storage.caches import scratch
from chopper.storage.destination import (
    check_output,
    new_output,
    recover,
    set_aside,
    settle,
)
from chopper.storage.files import write_atomic
from chopper.storage.manifest import Measure, encode
from chopper.storage.parts import RunWriter
from chopper.storage.processes import identity_of
from chopper.storage.run import Run
from chopper.storage.streams import StreamWriter, read_stream
from chopper.tables import TABLES, Table


def counters(*times: int) -> dict[str, list[object]]:
    return {
        "time_ns": list(times),
        "track": [f"t{t % 2}" for t in times],
        "name": ["n"] * len(times),
        "value": [float(t) if t else None for t in times],
    }


# ---------------------------------------------------------------- streams


def test_stream_holds_what_was_written_batch_by_batch(tmp_path: Path) -> None:
    stream = StreamWriter(tmp_path / "counter.arrow", "counter")
    for batch in ((0, 1), (2,), (3, 4, 5)):
        stream.write(counters(*batch))
        # Flushed: a reader sees it while the writer is at work.
        table, finding = read_stream(stream.path, "counter")
        assert table["time_ns"].to_pylist()[-1] == batch[-1]
        assert finding is None
    stream.close()
    stream.close()
    table, finding = read_stream(stream.path, "counter")
    assert finding is None
    assert table.to_pylist() == [
        {"time_ns": t, "track": f"t{t % 2}", "name": "n", "value": float(t) if t else None}
        for t in range(6)
    ]
    assert table.schema.equals(TABLES["counter"].arrow)


def test_a_stream_of_an_older_version_lacks_columns_that_are_null_now(tmp_path: Path) -> None:
    declared = TABLES["device_counter"]
    lacking = [c for c in declared.columns if c.name not in ("power_average_w", "energy_j")]
    older = Table(declared.name, declared.doc, tuple(lacking), 1)
    rows = [{"time_ns": 1, "span_ns": 0, "device_id": 0, "temperature_c": 50.0}]
    path = tmp_path / "device_counter.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, older.arrow) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=older.arrow))
    table, _ = read_stream(path, "device_counter")
    assert table["temperature_c"].to_pylist() == [50.0]
    assert table["energy_j"].to_pylist() == [None]
    assert table.schema.equals(declared.arrow)


def test_a_stream_of_a_newer_version_is_refused_in_words(tmp_path: Path) -> None:
    declared = TABLES["counter"]
    newer = Table(declared.name, declared.doc, declared.columns, declared.version + 1)
    path = tmp_path / "counter.arrow"
    row = {"time_ns": 0, "track": "t", "name": "n", "value": 1.0}
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, newer.arrow) as writer:
        writer.write_table(pa.Table.from_pylist([row], schema=newer.arrow))
    with pytest.raises(SchemaError, match="table counter: version 2, and this chopper knows 1"):
        read_stream(path, "counter")


def test_stream_cut_anywhere_gives_its_whole_batches(tmp_path: Path) -> None:
    stream = StreamWriter(tmp_path / "counter.arrow", "counter")
    ends = []
    for t in range(4):
        stream.write(counters(t))
        ends.append(stream.path.stat().st_size)
    stream.close()
    data = stream.path.read_bytes()
    for size in range(0, len(data), 7):
        stream.path.write_bytes(data[:size])
        table, finding = read_stream(stream.path, "counter")
        whole = sum(end <= size for end in ends)
        # New dictionary values come just before the batch that uses them.
        assert table.num_rows == whole
        assert table["time_ns"].to_pylist() == list(range(whole))
        if size not in ends and size < ends[-1]:
            assert finding is not None
            assert finding.code == "telemetry.truncated"


def test_stream_on_a_full_device_says_so(tmp_path: Path) -> None:
    stream = StreamWriter(Path("/dev/full"), "counter")
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space"):
        stream.write(counters(1))
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written"):
        stream.close()
    stream.close()
    with pytest.raises(OutputError, match="cannot be written"):
        StreamWriter(tmp_path, "counter")


# ---------------------------------------------------------------- parts and the whole


def test_run_is_made_of_its_parts(tmp_path: Path) -> None:
    for rank in (1, 0):
        writer = RunWriter(tmp_path, rank)
        writer.manifest.world_size = 4
        writer.manifest.start_ns = 100 + rank
        writer.manifest.status = "complete"
        writer.manifest.traced_steps = (50, 55) if rank else (2, 7)
        writer.save()
    closed = finalize(tmp_path, command=["torchrun", "x.py"], workload="fsdp2", exit_code=0)
    assert [p.rank for p in closed.ranks] == [0, 1]
    assert (closed.created_ns, closed.exit_code, closed.workload) == (100, 0, "fsdp2")
    assert [f.code for f in closed.findings] == ["run.ranks_missing", "run.windows_apart"]
    assert closed.findings[0].count == 2
    assert "(2 to 6 on rank 0; 50 to 54 on rank 1)" in closed.findings[1].message
    opened = Run.open(tmp_path)
    assert encode(opened.manifest) == encode(closed)
    assert opened.ranks == [0, 1]
    assert opened.part(1).start_ns == 101
    assert opened.table(0, "counter").num_rows == 0


# ---------------------------------------------------------------- places


def test_output_is_prepared_but_nothing_is_overwritten(tmp_path: Path) -> None:
    fresh = tmp_path / "a" / "b"
    fresh.mkdir(parents=True)
    with new_output(fresh) as place:
        assert place == fresh
        assert list(fresh.iterdir()) == []
    (fresh / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match="holds a run already; pass --force"), new_output(fresh):
        pass
    assert check_output(fresh, force=True)
    assert (fresh / "manifest.json").exists()
    with new_output(fresh, force=True) as place:
        assert list(place.iterdir()) == []
    (fresh / "manifest.json").unlink()
    (fresh / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match="holds files that are not a chopper run"):
        check_output(fresh, force=True)
    with pytest.raises(OutputError, match="is a file"):
        check_output(fresh / "thesis.tex")
    assert (fresh / "thesis.tex").read_text() == "mine"
    nowhere = Path("/proc/nothing/run")
    with pytest.raises(OutputError, match="cannot write here"), new_output(nowhere):
        pass


def test_atomic_write_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomic(file, b"old")
    write_atomic(file, b"new")
    assert file.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    with pytest.raises(OutputError, match="cannot be written"):
        write_atomic(tmp_path / "missing" / "f", b"x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(OutputError, match=r"taken: cannot be written \(Is a directory\)"):
        write_atomic(tmp_path / "taken", b"x")
    assert sorted(os.listdir(tmp_path)) == ["f", "taken"]  # noqa: PTH208


# ---------------------------------------------------------------- replacing a run


STEPS: dict[str, Any] = {"steps_source": "mark", "end_ns": 1}


def recorded(path: Path, rank: int = 0, **fields: object) -> Path:
    writer = RunWriter(path, rank)
    writer.manifest.status = "complete"
    for name, value in fields.items():
        setattr(writer.manifest, name, value)
    writer.save()
    return path


def test_temporary_files_of_killed_commands_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone, new, foreign = (
        ".chopper-doctor-abcd_fgh.tmp",
        ".chopper-doctor-abcdefgh.tmp",
        ".chopper-mine.tmp",
    )
    for name in (gone, new, foreign):
        (tmp_path / name / "run").mkdir(parents=True)
    with scratch("validate") as living:
        for name in (gone, foreign, living.name):
            os.utime(tmp_path / name, (0, 0))
        with scratch("doctor") as inner:
            names = {p.name for p in tmp_path.iterdir()}
            assert names == {new, foreign, living.name, inner.name}
    assert {p.name for p in tmp_path.iterdir()} == {new, foreign}


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_force_removes_what_chopper_wrote_and_nothing_else(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    finalize(run)
    (run / "tables" / "rank-00000").mkdir(parents=True)
    recorded(run / "attempt-0")
    (run / "model.ckpt").write_text("a week of work")
    before = files(run)
    with pytest.raises(OutputError, match=r"that chopper did not write \(model.ckpt\)"):
        check_output(run, force=True)
    with pytest.raises(OutputError, match=r"model\.ckpt"), new_output(run, force=True):
        pass
    assert files(run) == before
    (run / "model.ckpt").unlink()
    with new_output(run, force=True) as place:
        assert list(place.iterdir()) == []
        recorded(place, rank=3, **STEPS)
    assert list(files(run)) == ["rank-00003/manifest.json"]


def test_the_old_run_goes_when_the_new_one_has_a_rank(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", world_size=1)
    before = files(run)
    for fails in (False, True):
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():  # noqa: SIM117
            with new_output(run, force=True) as place:
                assert list(place.iterdir()) == []
                (place / "rank-00000").mkdir()
                (place / "rank-00000" / "step.arrow").touch()
                if fails:
                    raise KeyError
        assert files(run) == before
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
    with new_output(run, force=True) as place:
        recorded(place, rank=3, **STEPS)
    assert list(files(run)) == ["rank-00003/manifest.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


MEASURES: dict[str, Any] = {"measures": [Measure(name="peak_bytes", value=1)]}


@pytest.mark.parametrize(
    ("before", "after", "replaces"),
    [
        (STEPS, {}, False),
        (STEPS, {"traces": ("trace.json",)}, False),
        (STEPS, {"status": "running"}, False),
        ({}, {}, False),
        (MEASURES, {}, False),
        (MEASURES, {"traces": ("trace.json",)}, True),
        (MEASURES, STEPS, True),
        (STEPS, {"status": "imported"}, True),
        ({"status": "imported"}, MEASURES, False),
    ],
)
def test_a_recording_without_a_step_replaces_no_run(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], replaces: bool
) -> None:
    run = recorded(tmp_path / "run", hostname="earlier", **before)
    finalize(run)
    earlier = files(run)
    for number in (1, 2):
        with contextlib.ExitStack() as stack:
            if not replaces:
                stack.enter_context(pytest.raises(OutputError, match=r"as .*/run\.no-steps"))
            place = stack.enter_context(new_output(run, force=True))
            recorded(place, rank=3, **after)
            (place / "model.ckpt").write_text("mine")
        if replaces:
            (run / "model.ckpt").unlink()
            assert list(files(run)) == ["rank-00003/manifest.json"]
            assert [p.name for p in tmp_path.iterdir()] == ["run"]
            return
        (run / "model.ckpt").unlink()
        assert files(run) == earlier
        assert len([*tmp_path.iterdir()]) == 1 + number
    assert list(files(tmp_path / "run.no-steps-2")) == ["rank-00003/manifest.json"]


def test_a_killed_recording_without_a_step_replaces_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each state that a kill can leave, the earlier run comes back."""
    run = recorded(tmp_path / "run", **STEPS)
    (run / "model.ckpt").write_text("mine")
    earlier = files(run)
    original = Path.replace
    for left in range(9):
        moves = itertools.count(-left)

        def replace(self: Path, target: Path) -> Path:
            if next(moves) == 0:  # noqa: B023
                raise KeyboardInterrupt
            return original(self, target)

        with monkeypatch.context() as killed, contextlib.suppress(KeyboardInterrupt):
            killed.setattr(Path, "replace", replace)
            old = set_aside(run)
            assert old is not None
            recorded(run, rank=0)
            settle(run, old)
        recover(run)
        assert {name: (run / name).read_bytes() for name in earlier} == earlier
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert next(moves) == 6 - 8  # the last of them went to the end


def test_a_command_that_removes_or_fills_the_output_loses_no_run(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    before = files(run)
    with new_output(run, force=True) as place:
        place.rmdir()
    assert files(run) == before
    with new_output(run, force=True) as place:
        (place / "model.ckpt").write_text("mine")
    assert files(run) == before | {"model.ckpt": b"mine"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_output_that_stays_empty_is_as_it_was(tmp_path: Path) -> None:
    with new_output(tmp_path / "new"):
        pass
    (tmp_path / "mine").mkdir()
    with new_output(tmp_path / "mine"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_what_a_command_left_that_was_killed_hinders_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".hook-notes.here-7", ".chopper-probe", ".claim", ".rank-00000.here-7.new"):
        (run / name).touch()
    assert not check_output(run)


def test_links_to_a_run_are_followed(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    link = tmp_path / "latest"
    link.symlink_to(run)
    with new_output(link, force=True) as place:
        assert place == run
        recorded(place, rank=1, **STEPS)
    assert link.is_symlink()
    assert Run.open(link).ranks == [1]
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "target")
    with new_output(dangling) as place:
        assert place == tmp_path / "target"
        recorded(place)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(OutputError) as caught, new_output(circle):
        pass
    assert "None" not in str(caught.value)


def test_a_living_recording_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    here = socket.gethostname()
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            process: Any = identity_of(other.pid)._asdict()
            recorded(run, status="running", hostname=here, **process)
            with pytest.raises(OutputError, match=rf"process {other.pid} is recording into it"):
                check_output(run, force=True)
            # Its number, once another process has it, is not it.
            recorded(run, status="running", hostname=here, **process | {"process_started": 1})
            assert check_output(run, force=True)
            recorded(run, status="running", hostname=here, **process)
            with monkeypatch.context() as hidden:  # as another user's, by hidepid=2 of /proc
                hidden.setattr(_processes, "_PROC", tmp_path / "proc")
                with pytest.raises(OutputError, match="is recording into it"):
                    check_output(run, force=True)
                hidden.setattr(os, "kill", Mock(side_effect=PermissionError))
                with pytest.raises(OutputError, match="is recording into it"):
                    check_output(run, force=True)
            other.kill()
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
            assert check_output(run, force=True)  # a process that nobody has waited for is over
        finally:
            other.kill()
    assert check_output(run, force=True)
    with monkeypatch.context() as hidden:
        hidden.setattr(_processes, "_PROC", tmp_path / "proc")
        assert check_output(run, force=True)
    # On another host, nobody here can tell: for an hour after its last sign of life it may live.
    recorded(run, status="running", hostname="node7", pid=1, start_ns=time.time_ns())
    with pytest.raises(OutputError, match="of the host node7 is recording into it"):
        check_output(run, force=True)
    hour_ago = time.time() - 3601
    os.utime(run / "rank-00000" / "manifest.json", (hour_ago, hour_ago))
    assert check_output(run, force=True)
    recorded(run, status="complete", hostname="node7", pid=1)
    assert check_output(run, force=True)


# ---------------------------------------------------------------- restarts


def test_ranks_of_an_older_attempt_are_not_in_the_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        recorded(tmp_path, rank, world_size=2, start_ns=500 + rank, status="complete",
                 environment={"TORCHELASTIC_RESTART_COUNT": "1"})  # fmt: skip
    for rank in (2, 3):
        recorded(tmp_path, rank, world_size=4, start_ns=100, status="running",
                 environment={"TORCHELASTIC_RESTART_COUNT": "0"})  # fmt: skip
    for run in (Run.open(tmp_path).manifest, finalize(tmp_path)):
        assert [p.rank for p in run.ranks] == [0, 1]
        codes = [f.code for f in run.findings if f.code != "run.manifest_missing"]
        assert codes == ["run.older_attempt"]
        assert "rank-00002, rank-00003: recorded before" in run.findings[0].message
        assert run.findings[0].count == 2
    assert (tmp_path / "rank-00003" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("world_size", "start_ns", "kept"), [(4, 100, False), (4, 900, True), (2, 100, True)]
)
def test_without_torchrun_the_world_tells_attempts_apart(
    tmp_path: Path, world_size: int, start_ns: int, kept: bool
) -> None:
    recorded(tmp_path, 0, world_size=2, start_ns=500)
    recorded(tmp_path, 1, world_size=world_size, start_ns=start_ns)
    assert Run.open(tmp_path).ranks == ([0, 1] if kept else [0])


def test_folders_of_attempts_are_named_by_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    # Rank 0 was there in all attempts, rank 1 is missing from the first two.
    for count, ranks in (("0", [0]), ("1", [0]), ("2", [0, 1]), ("3", [0, 1])):
        for rank in ranks:
            claim(tmp_path, LaunchEnvironment(rank, rank, len(ranks)), force=False)
            recorded(tmp_path, rank, environment={"TORCHELASTIC_RESTART_COUNT": count})
    assert Run.open(tmp_path / "attempt-2").ranks == [0, 1]
    assert Run.open(tmp_path / "attempt-1").ranks == [0]
    # A second process of the same attempt takes the next free one.
    finding = claim(tmp_path, LaunchEnvironment(0, 0, 2), force=False).finding
    assert finding is not None
    assert "attempt-3/" in finding.message
    recorded(tmp_path, 0, environment={"TORCHELASTIC_RESTART_COUNT": "3"})
    finding = claim(tmp_path, LaunchEnvironment(0, 0, 2), force=False).finding
    assert finding is not None
    assert "attempt-4/" in finding.message


def test_a_run_without_a_manifest_says_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        recorded(tmp_path, rank, world_size=2, status="complete")
    (found,) = Run.open(tmp_path).manifest.findings
    assert (found.code, found.severity) == ("run.manifest_missing", "info")
    assert "no manifest.json" in found.message
    finalize(tmp_path)
    assert not Run.open(tmp_path).manifest.findings


def test_a_run_without_a_manifest_names_the_ranks_that_are_not_there(tmp_path: Path) -> None:
    for rank in (0, 2):
        recorded(tmp_path, rank, world_size=4, status="complete")
    found = {f.code: f for f in Run.open(tmp_path).manifest.findings}
    assert found.keys() == {"run.manifest_missing", "run.ranks_missing"}
    assert "2 of 4 ranks are missing (1, 3)" in found["run.ranks_missing"].message
    finalize(tmp_path)
    assert [f.code for f in Run.open(tmp_path).manifest.findings] == ["run.ranks_missing"]


def test_recorders_of_one_job_share_a_directory_and_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "_PROVIDED_S", 0.0)
    run = tmp_path / "run"
    with new_output(run, job="port 1 a") as first:
        with new_output(run, job="port 1 a") as second:
            assert second == first
        for job in (None, "port 1 b"):
            with (
                pytest.raises(OutputError, match=f"process {os.getpid()} is writing into it"),
                new_output(run, job=job),
            ):
                pass
        (run / "rank-00000").mkdir()
        (run / "rank-00000/manifest.json").write_text("{}")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    with pytest.raises(OutputError, match="holds a run already"), new_output(run):
        pass
