"""Workers that are killed, that have too little memory or disk, and whose parent ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks._ranks import write_ranks
from chopper.engines import Lost
from chopper.engines.processes import Processes
from chopper.errors import InputError, OutputError
from chopper.storage.results import Folder
from tests.engines import tasks
from tests.engines.tasks import done
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Temporary files of a test."""
    path = tmp_path / "temporary"
    path.mkdir()
    return path


def test_a_task_whose_worker_is_killed_is_done_again(tmp_path: Path) -> None:
    calls = [(n, 5, tmp_path / "once") for n in range(12)]
    with Processes(2) as engine:
        assert done(engine.map(tasks.killed_once, calls, label="")) == [*range(12)]


def test_a_task_that_kills_each_worker_is_lost_alone() -> None:
    with Processes(2) as engine:
        results = [*engine.map(tasks.killed, [(n, 5) for n in range(12)], label="")]
        assert done(engine.map(tasks.doubled, [(4,)], label="")) == [8]
    assert done(results) == [n for n in range(12) if n != 5]
    (lost,) = [r for r in results if isinstance(r, Lost)]
    assert lost is results[5]
    assert lost.reason == (
        "its process died 3 times (SIGKILL), often for lack of memory: use fewer --workers"
    )


def test_a_worker_that_is_killed_while_it_waits_is_replaced() -> None:
    with Processes(1) as engine:
        (first,) = engine.map(tasks.where, [(0,)], label="")
        worker = psutil.Process(first[0])
        worker.kill()
        until(lambda: worker.status() == psutil.STATUS_ZOMBIE, "the worker ends")
        assert done(engine.map(tasks.doubled, [(n,) for n in range(5)], label="")) == [
            0,
            2,
            4,
            6,
            8,
        ]


@pytest.mark.parametrize("function", [tasks.filled, tasks.arrow_filled])
def test_a_task_that_takes_more_than_the_memory_is_lost_alone(function: object) -> None:
    with Processes(2, memory_bytes=512 << 20) as engine:
        calls = [(1 << 20,), (1 << 30,), (2 << 20,)]
        results = [*engine.map(function, calls, label="")]  # type: ignore[arg-type]
    assert done(results) in ([1, 1], [1 << 20, 2 << 20])
    assert isinstance(results[1], Lost)
    assert results[1].reason == "it takes more than --memory 537 MB: raise it"


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Inherited by the workers: as a disk that has no room for the second.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with Processes(1, folder=folder) as engine:
            calls = [(size, engine.folder) for size in (1 << 10, 1 << 20, 1 << 11)]
            results = [*engine.map(tasks.noise, calls, label="")]
            assert isinstance(results[1], Lost)
            assert isinstance(results[1].error, OutputError)
            (spill,) = folder.iterdir()
            assert results[1].reason == (
                f"{spill}: a temporary file cannot be written (File too large); free space there, "
                "or set TMPDIR to another disk"
            )
            assert len([*spill.iterdir()]) == 2
            del results
            assert [*spill.iterdir()] == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*folder.iterdir()] == []


def test_values_stay_as_long_as_they_are_held(folder: Path) -> None:
    with Processes(1, folder=folder) as engine:
        results = [*engine.map(tasks.table, [(n, engine.folder) for n in (3, 4)], label="")]
    left = [result for _, result in results]
    assert [one.get()["rows"].num_rows for one in left] == [3, 4]
    (spill,) = folder.iterdir()
    next(spill.iterdir()).unlink()
    with pytest.raises(InputError, match="a temporary file was removed while it was in use"):
        [one.get() for one in left]
    del results, left
    assert [*folder.iterdir()] == []


def test_workers_that_rest_are_gone_and_what_they_held_is_not() -> None:
    with Processes(2) as engine:
        ((_, left),) = engine.map(tasks.table, [(3, engine.folder)], label="")
        (worker,) = engine.map(tasks.where, [(0,)], label="")
        engine.rest()
        assert not psutil.pid_exists(worker[0])
        assert left.get()["number"] == 3
        assert done(engine.map(tasks.doubled, [(4,)], label="")) == [8]


def test_a_folder_that_cannot_be_written_is_one_line(folder: Path) -> None:
    with pytest.raises(OutputError, match="cannot create a temporary folder there"):
        Folder(folder / "missing")


PROGRAM = """
import signal, sys
from pathlib import Path
from chopper.engines.processes import Processes
from tests.engines import tasks

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, for what it starts too
folder = Path(sys.argv[1])
with Processes(2, folder=folder) as engine:
    (folder / "loaded").touch()
    left = [*engine.map(tasks.table, [(3, engine.folder)], label="")]
    [*engine.map(tasks.begun, [(folder, n) for n in range(4)], label="")]
"""


class Running:
    """A program that waits for two tasks, in a process group of its own as of a terminal."""

    def __init__(self, folder: Path, script: str = PROGRAM) -> None:
        file = folder.parent / "program.py"
        file.write_text(script)
        self.folder = folder
        environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, file, folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def begun(self) -> list[Path]:
        if self.process.poll() is not None:
            raise AssertionError(f"the program ended: {self.process.communicate()[1]}")
        return [*self.folder.glob("[0-9]*.*")]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signalled(self, number: int, *, group: bool) -> str:
        """Send a signal; return what was said when all processes have ended."""
        family = self.family()
        (os.killpg if group else os.kill)(self.process.pid, number)
        until(lambda: not any(p.is_running() for p in family), "all processes end")
        return self.process.communicate(timeout=PATIENCE_S)[1]


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    program = Running(folder)
    yield program
    if program.process.poll() is None:
        for process in program.family():
            process.kill()
        program.process.kill()
        program.process.communicate()


@pytest.mark.parametrize("group", [True, False])
def test_an_interrupt_ends_at_once_and_leaves_nothing(running: Running, group: bool) -> None:
    until(lambda: len(running.begun()) == 2, "two tasks run")
    said = running.signalled(signal.SIGINT, group=group)
    # The program's own traceback, none of a worker's.
    assert said.count("KeyboardInterrupt") == 1
    assert said.count("Traceback") == 1
    assert [p.name for p in running.folder.iterdir() if "." not in p.name] == ["loaded"]


def test_an_interrupt_while_workers_start_ends_at_once(running: Running) -> None:
    until(lambda: (running.folder / "loaded").exists(), "the engine is there")
    said = running.signalled(signal.SIGINT, group=True)
    assert said.count("Traceback") == 1
    assert [p.name for p in running.folder.iterdir() if "." not in p.name] == ["loaded"]


COMMAND = """
import sys
from chopper import cli
sys.argv = {!r}
cli.main()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traces")
    write_ranks(directory, 64, 1_000)
    return directory


def interrupted(
    folder: Path,
    words: Sequence[object],
    is_begun: Callable[[Running], bool],
    number: signal.Signals = signal.SIGINT,
) -> None:
    """Send a signal to a command in the middle of 64 ranks: it ends, and nothing is left."""
    before = {*folder.parent.iterdir()}
    program = Running(folder, COMMAND.format(["chopper", *map(str, words)]))
    try:
        until(lambda: program.process.poll() is not None or is_begun(program), "ranks are read")
        said = program.signalled(number, group=True)
        how = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}[number]
        assert said.splitlines()[-1:] == [f"chopper: {how}"], said
        assert program.process.returncode == 128 + number
        assert [*folder.iterdir()] == []
        assert {*folder.parent.iterdir()} - before == {folder.parent / "program.py"}
    finally:
        program.process.kill()


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("analyze",), signal.SIGINT),
        (("report", "-o", "x.html"), signal.SIGINT),
        (("import", "-o", "x"), signal.SIGINT),
        (("import", "-o", "x"), signal.SIGTERM),
    ],
)
def test_an_interrupted_command_leaves_nothing(
    folder: Path, traces: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    command, *output = words
    where = [folder.parent / one if one.startswith("x") else one for one in output]
    interrupted(
        folder,
        [command, traces, *where, "--workers", "2"],
        lambda _: any(folder.glob(".chopper-spill-*/*")),
        number,
    )


@pytest.mark.long
@pytest.mark.parametrize("words", [("analyze",), ("import", "-o", "x")])
def test_an_interrupted_command_leaves_nothing_of_a_cluster(
    folder: Path, traces: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # A name that leaves room for sockets below it.
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        place = Path(short) / "t"
        place.mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(place))  # no cluster of this machine
        command, *output = words
        where = [place.parent / one if one == "x" else one for one in output]

        def is_begun(program: Running) -> bool:
            names = []
            for process in program.family():
                with contextlib.suppress(psutil.Error):
                    names += process.cmdline()[:1]
            return any(name.startswith("ray::task") for name in names)

        interrupted(place, [command, traces, *where, "--ray"], is_begun)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_end_with_their_parent_and_remove_its_files(running: Running, number: int) -> None:
    until(lambda: len(running.begun()) == 2, "two tasks run")
    # What kills cannot be handed on: the others must see that it is gone.
    running.signalled(number, group=number != signal.SIGKILL)
    assert [p.name for p in running.folder.iterdir() if "." not in p.name] == ["loaded"]


def test_a_program_without_a_guard_runs_once(folder: Path) -> None:
    script = """
import sys
from pathlib import Path
with open(sys.argv[1] + "/runs", "a") as file:
    file.write("run\\n")
from chopper.engines.processes import Processes
from tests.engines import tasks
with Processes(2) as engine:
    calls = [(n, 1, Path(sys.argv[1]) / "once") for n in range(4)]
    results = [*engine.map(tasks.killed_once, calls, label="")]
assert [*results] == [0, 1, 2, 3]
assert __file__ and __spec__ is None
"""
    program = Running(folder, script)
    said = program.process.communicate(timeout=PATIENCE_S)[1]
    assert program.process.returncode == 0, said
    assert said == ""
    assert (folder / "runs").read_text() == "run\n"


def test_workers_do_without_pandas() -> None:
    with Processes(1) as engine:
        assert done(engine.map(tasks.imports_pandas, [()], label="look")) == [False]


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(folder: Path) -> None:
    used, left, new = (
        Folder(folder),
        folder / ".chopper-spill-left_one.tmp",
        folder / ".chopper-spill-new_one_.tmp",
    )
    for path in (left, new):
        path.mkdir()
        (path / "1").touch()
    for path in (used.path, left):
        os.utime(path, (1, 1))
    more = Folder(folder)
    assert {*folder.iterdir()} == {used.path, more.path, new}
