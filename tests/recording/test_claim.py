"""Who records into which folder, when several processes want one."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from chopper.api import attribute
from chopper.errors import OutputError
from chopper.hardware.launchers import LaunchEnvironment
from chopper.recording import claim
from chopper.recording.finish import finalize
from chopper.storage import processes as _processes
from chopper.storage.layout import MANIFEST, rank_dir_name, sub_runs
from chopper.storage.manifest import encode
from chopper.storage.parts import RunWriter, yield_ranks
from chopper.storage.processes import HeldElsewhere, identity_of, locked, machine
from chopper.storage.run import Run
from tests.waiting import PATIENCE_S

UNRANKED = LaunchEnvironment(known=False)
PROCESSES, ROUNDS = 4, 100


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", claim.LAUNCHED_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def leave(path: Path, rank: int = 0, **more: Any) -> Path:
    """What a process that was killed left: a folder that is still said to be recorded into."""
    part = RunWriter(path, rank)
    for name, value in ({"pid": 1 << 22, "process_started": 1, "machine": "gone"} | more).items():
        setattr(part.manifest, name, value)
    part.save()
    return part.directory


def of_another(claimed: claim.Claim) -> Path:
    """What was claimed, as if another living process had: the one that started this one."""
    part = claimed.part
    other = identity_of(os.getppid())
    part.pid, part.process_started = other.pid, other.process_started
    (claimed.path / rank_dir_name(part.rank) / MANIFEST).write_bytes(encode(part))
    return claimed.path


def claims(directory: Path, number: int, barrier: Any, results: Any) -> None:
    """Claim once in each round, at the same moment as the others."""
    os.environ[claim.LAUNCHED_VARIABLE] = "record"
    for round_number in range(ROUNDS):
        path = directory / str(round_number)
        ranked = round_number % 3 == 2  # jobs, with the same rank each
        os.environ["MASTER_PORT"] = str(29500 + number)
        barrier.wait(PATIENCE_S)
        claimed = claim.claim(path, LaunchEnvironment(known=ranked), force=False)
        part = _processes.part_of(claimed.path / "rank-00000")
        assert part is not None
        assert part.pid == os.getpid()
        results.put((round_number, str(claimed.path.relative_to(path))))
    barrier.wait(PATIENCE_S)


def test_each_of_many_processes_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for round_number in range(1, ROUNDS, 3):  # a recording that died is there
        leave(tmp_path / str(round_number), machine=machine())
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [
        spawn.Process(target=claims, args=(tmp_path, number, barrier, results))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    places: dict[int, list[str]] = {}
    for _ in range(PROCESSES * ROUNDS):
        round_number, place = results.get(timeout=PATIENCE_S)
        places.setdefault(round_number, []).append(place)
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    for round_number, found in places.items():
        assert sorted(found) == [".", "process-2", "process-3", "process-4"], round_number
        path = tmp_path / str(round_number)
        assert len(sub_runs(path)) == PROCESSES - 1
        assert (path / "attempt-0").is_dir() == (round_number % 3 == 1)
        assert not list(path.glob(".*"))


def test_a_process_without_rank_takes_the_place_of_one_that_took_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(claim.LAUNCHED_VARIABLE, "record")
    leave(tmp_path, status="complete", end_ns=1)
    claimed = claim.claim(tmp_path, UNRANKED, force=False)
    assert claimed.path == tmp_path
    assert claimed.finding is not None
    assert claimed.finding.code == "run.restarted"
    leave(tmp_path, status="complete", end_ns=1, steps_source="mark")
    assert claim.claim(tmp_path, UNRANKED, force=False).path == tmp_path / "process-2"
    assert claim.claim(tmp_path, UNRANKED, force=False).path == tmp_path / "process-3"


def test_ranks_of_two_jobs_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path_of(port: int, rank: int) -> str:
        monkeypatch.setenv("MASTER_PORT", str(port))
        return of_another(claim.claim(tmp_path, LaunchEnvironment(rank, rank, 2), force=False)).name

    assert path_of(29500, 0) == tmp_path.name
    # Although rank 1 of the first job is not there yet.
    assert path_of(29501, 1) == "process-2"
    assert path_of(29501, 0) == "process-2"
    assert path_of(29500, 1) == tmp_path.name
    assert path_of(29502, 0) == "process-3"


def test_ranks_of_one_job_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a port, what the processes of a job have in common is a parent, on each host another.
    leave(tmp_path, 0, hostname="node7", machine="node7", world_size=2, job="parent 7.7")
    claimed = claim.claim(tmp_path, LaunchEnvironment(1, 0, 2), force=False)
    assert claimed.path == tmp_path
    # Another job on the other host is another one, and what it records stays where it is.
    monkeypatch.setenv("MASTER_PORT", "29501")
    leave(tmp_path / "a", 0, hostname="node7", machine="node7", world_size=1, job="port 29500")
    assert (
        claim.claim(tmp_path / "a", LaunchEnvironment(0, 0, 1), force=False).path.name
        == "process-2"
    )
    # A restart on this host takes over from the other one.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert claim.claim(tmp_path / "a", LaunchEnvironment(0, 0, 1), force=False).path.name == "a"


def test_what_was_recorded_before_is_refused_and_what_is_recorded_meanwhile_is_not(
    tmp_path: Path,
) -> None:
    folder = leave(tmp_path, status="complete", end_ns=1, steps_source="mark")
    with pytest.raises(OutputError, match="holds a run already"):
        claim.check_rank_output(tmp_path, 0, force=False)
    # It ended after this process started: both were started into one directory.
    leave(tmp_path, status="complete", end_ns=1 << 61, steps_source="mark")
    claim.check_rank_output(tmp_path, 0, force=False)
    for force in (False, True):
        assert claim.claim(tmp_path, UNRANKED, force=force).path != tmp_path
    assert (folder / MANIFEST).is_file()


def test_the_rank_goes_to_the_process_that_took_steps(tmp_path: Path) -> None:
    leave(tmp_path, status="complete", end_ns=2, command=("python", "parent.py"), steps_count=0)
    for rank in (0, 1):
        leave(
            tmp_path / "process-3", rank, world_size=2, status="complete", end_ns=2,
            steps_source="mark", steps_count=4, command=("python", "train.py"),
        )  # fmt: skip
    leave(tmp_path / "process-2", status="complete", end_ns=2)
    finalize(tmp_path)
    run = Run.open(tmp_path)
    assert run.ranks == [0, 1]
    assert {part.steps_count for part in run.manifest.ranks} == {4}
    (finding,) = run.manifest.findings
    assert (finding.code, finding.severity, finding.count) == ("run.processes", "info", 3)
    assert "3 processes recorded" in finding.message
    assert f"{tmp_path / 'process-3'} (0 steps, python parent.py)" in finding.message
    parent = Run.open(tmp_path / "process-3")
    assert parent.manifest.command == ("python", "parent.py")
    assert not list(tmp_path.glob(".*"))
    # The same as data.
    pid = parent.part(0).pid
    assert attribute(run).to_dict()["processes"] == [
        {"path": str(tmp_path / "process-2"), "pid": pid, "ranks": 1, "steps": 0},
        {"path": str(tmp_path / "process-3"), "pid": pid, "ranks": 1, "steps": 0},
    ]
    assert attribute(parent).to_dict()["processes"] == []


def test_a_living_process_keeps_its_rank(tmp_path: Path) -> None:
    of_another(claim.claim(tmp_path, UNRANKED, force=False))
    leave(tmp_path / "process-2", status="complete", end_ns=2, steps_source="mark")
    yield_ranks(tmp_path)
    part = _processes.part_of(tmp_path / "rank-00000")
    assert part is not None
    assert part.pid == os.getppid()


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.write_text("99")  # left by a process that was killed
    with locked(file):
        assert file.read_text() == str(os.getpid())
        with pytest.raises(HeldElsewhere), locked(file):
            raise AssertionError("entered")
    assert not file.exists()
    with locked(Path("/proc/nothing/lock")):  # where there can be none, nothing is held
        pass
