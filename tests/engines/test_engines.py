"""Each engine gives the same results, in order; what it cannot do, it names."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chopper.engines import Engine, Lost, Serial
from chopper.engines.choice import EngineOptions, engine_of, trace_bytes
from chopper.engines.processes import Processes
from chopper.errors import ChopperError, InputError, UsageError
from tests.engines import tasks
from tests.engines.tasks import done


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    with contextlib.ExitStack() as stack:
        every: list[Engine] = [Serial(), Processes(1), Processes(2), Processes(3)]
        yield [stack.enter_context(engine) for engine in every]


@given(numbers=st.lists(st.integers(0, 50), max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_results_are_those_of_one_process_in_the_order_of_the_calls(
    engines: list[Engine], numbers: list[int]
) -> None:
    answers = []
    for engine in engines:
        first = [*engine.map(tasks.table, ((n, engine.folder) for n in numbers), label="read")]
        left = [result for _, result in first]
        later = engine.map(tasks.total, [*zip(left, numbers, strict=True)], label="sum")
        rows = [result.get()["rows"].to_pydict() for result in left]
        answers.append(([number for number, _ in first], rows, [*later]))
    assert answers[1:] == answers[:1] * (len(engines) - 1)
    assert answers[0][0] == numbers
    assert answers[0][2] == [(n, n * (n - 1) // 2 + n) for n in numbers]


def test_calls_are_taken_when_there_is_a_worker_for_them(tmp_path: Path) -> None:
    taken: list[int] = []

    def calls() -> Iterator[tuple[int]]:
        for number in range(20):
            taken.append(number)
            yield (number,)

    most = []
    with Processes(2, progress=lambda _label, done: most.append(len(taken) - done)) as engine:
        assert [*engine.map(tasks.doubled, calls(), label="")] == [*range(0, 40, 2)]
    assert max(most) <= 4
    assert len(most) == 20


def test_workers_are_other_processes_of_one_thread_that_know_nothing_of_the_program() -> None:
    with Processes(2) as engine:
        seen = done(engine.map(tasks.where, [(n,) for n in range(8)], label=""))
    assert len(seen) == 8
    assert 1 <= len({pid for pid, _, _ in seen} - {os.getpid()}) <= 2
    assert {(Path(main).name, single) for _, main, single in seen} == {("processes.py", True)}


@pytest.mark.parametrize("kind", [Serial, lambda: Processes(2)])
def test_what_is_wrong_with_the_data_is_the_result_of_its_task_alone(kind: Any) -> None:
    with kind() as engine:
        results = [*engine.map(tasks.refused, [(n,) for n in range(4)], label="")]
        odd = next(engine.map(tasks.odd, [(7,)], label=""))
        with pytest.raises(ZeroDivisionError):
            next(engine.map(tasks.wrong, [(1,)], label=""))
        # The engine is usable after an error.
        assert [*engine.map(tasks.doubled, [(1,)], label="")] == [2]
    assert done(results) == [0, 2]
    lost = [r for r in results if isinstance(r, Lost)]
    assert [r.reason for r in lost] == ["trace 1: is no trace", "trace 3: is no trace"]
    assert all(isinstance(r.error, InputError) for r in lost)
    assert isinstance(odd, Lost)
    assert isinstance(odd.error, ChopperError)
    assert "trace 7 is odd" in odd.reason


@pytest.mark.parametrize(
    ("sizes", "options", "name", "workers", "reason"),
    [
        ([10], {}, "serial", 1, "1 trace, about 10 B of trace"),
        ([10, 10], {}, "serial", 1, "2 traces, about 20 B of trace"),
        ([10, 10], {"workers": 2}, "processes", 2, "--workers 2"),
        ([10, 10], {"workers": 1}, "serial", 1, "--workers 1"),
        ([10], {"memory_bytes": 10**9}, "processes", 1, "--memory 1.00 GB"),
        ([200 << 20, 200 << 20], {"workers": 1}, "processes", 1, "--workers 1"),
        ([400 << 20], {}, "serial", 1, "1 trace, about 400 MiB of trace"),
    ],
)
def test_the_engine_is_chosen_by_what_there_is_to_do(
    tmp_path: Path, sizes: list[int], options: dict[str, int], name: str, workers: int, reason: str
) -> None:
    files = []
    for number, size in enumerate(sizes):
        files.append(tmp_path / f"{number}.json")
        with files[-1].open("wb") as file:
            file.truncate(size)
    with engine_of(trace_bytes(files), EngineOptions(**options)) as engine:  # type: ignore[arg-type]
        assert (engine.name, engine.workers, engine.reason) == (name, workers, reason)


def test_all_cores_are_used_where_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chopper.engines.choice.usable_cores", lambda: 3)
    files = [tmp_path / f"{number}.json.gz" for number in range(4)]
    for path in files:
        with path.open("wb") as file:
            file.truncate(6 << 20)
    for count, workers in ((4, 3), (2, 1)):
        with engine_of(trace_bytes(files[:count])) as engine:
            assert engine.workers == workers


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="contradict each other: a cluster schedules"):
        engine_of([], EngineOptions(ray="auto", workers=2))
    for ray in (None, "auto"):
        with pytest.raises(UsageError, match=r"--memory 1\.05 MB: too little for a worker; give"):
            engine_of([], EngineOptions(ray=ray, memory_bytes=1 << 20))


@pytest.mark.parametrize("ray", [None, "auto"])
def test_memory_is_bounded_on_linux_alone(ray: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="--workers and --memory need Linux; leave them out"):
        engine_of([], EngineOptions(ray=ray, memory_bytes=1 << 30))


def test_a_limit_of_memory_stays_below_the_user_s() -> None:
    program = (
        "import resource as r; from chopper.engines.processes import limited\n"
        "r.setrlimit(r.RLIMIT_DATA, (3 << 30, 4 << 30))\n"
        "with limited(8 << 30): print(r.getrlimit(r.RLIMIT_DATA))\n"
        "print(r.getrlimit(r.RLIMIT_DATA))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == 2 * [str((3 << 30, 4 << 30))]
