"""Worker processes that are watched: each input runs in one, and may crash, hang or eat memory."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CPU_MOST_S = 20.0
"""Seconds of CPU time that one input may take: a busy machine does not make one fail."""
STILL_MOST_S = 60.0
"""Seconds that a worker may wait for something: a runnable process gets some time in that."""
MEMORY_MOST_BYTES = 700 << 20
"""That one input may add to what the worker holds."""
ADDRESS_MOST_BYTES = 24 << 30
_INPUTS_MOST = 400
"""A worker is then replaced, so that what it has learned does not help the inputs that follow."""

Job = Any
Work = Callable[[Job, Path], str | None]


def _serve(connection: Connection, work: Work, folder: Path) -> None:
    """Take jobs until there are none."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_MOST_BYTES, ADDRESS_MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (folder / "crash").open("w") as crash:
        faulthandler.enable(crash)
        # What native code writes must not stand between the campaign's own lines.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while (job := connection.recv()) is not None:
            place = folder / "case"
            shutil.rmtree(place, ignore_errors=True)
            before = _peak_bytes(reset=True)
            try:
                problem = work(job, place)
            except Exception:  # noqa: BLE001 - of the campaign itself: shown, not lost
                problem = f"the campaign itself failed\n{traceback.format_exc()}"
            grown = _peak_bytes() - before
            if problem is None and grown > MEMORY_MOST_BYTES:
                problem = f"memory: {grown >> 20} MiB more"
            connection.send(problem)


def _peak_bytes(*, reset: bool = False) -> int:
    """Most memory that this process held, since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


class _Worker:
    def __init__(self, work: Work) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chopper-fuzz-"))
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work, self.folder), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job = None
        self.done_count = 0

    def give(self, job: Job) -> None:
        self.job, self._cpu_s = job, self._cpu()
        self._moved_cpu_s, self._moved_s = self._cpu_s, time.monotonic()
        self.connection.send(job)

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def overdue(self) -> str | None:
        """Why the job is given up, if it is."""
        with contextlib.suppress(OSError):
            cpu_s = self._cpu()
            if cpu_s - self._cpu_s > CPU_MOST_S:
                return f"hang: more than {CPU_MOST_S:.0f} s of CPU time"
            if cpu_s != self._moved_cpu_s:
                self._moved_cpu_s, self._moved_s = cpu_s, time.monotonic()
        if time.monotonic() - self._moved_s > STILL_MOST_S:
            return f"hang: waits for more than {STILL_MOST_S:.0f} s"
        return None

    def words(self) -> str:
        """What a crash left."""
        self.process.join()
        text = (self.folder / "crash").read_text()[:1500]
        return f"crash: exit code {self.process.exitcode}\n{text}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_all(
    work: Work, jobs: Iterable[Job], *, workers_count: int, give_up_s: float | None = None
) -> Iterator[tuple[Job, str | None]]:
    """Run jobs in watched processes; yields each with its problem, as it ends.

    Args:
        work: runs one job in a folder that is not there yet; importable, for it runs elsewhere.
        jobs: picklable.
        workers_count: processes.
        give_up_s: take no new job after so many seconds.
    """
    began_s = time.monotonic()
    waiting = iter(jobs)
    workers: list[_Worker] = []

    def next_job() -> Job:
        late = give_up_s is not None and time.monotonic() - began_s > give_up_s
        return None if late else next(waiting, None)

    try:
        for _ in range(workers_count):
            job = next_job()
            if job is not None:
                workers.append(_Worker(work))
                workers[-1].give(job)
        while workers:
            ready = wait([w.connection for w in workers], timeout=1.0)
            for worker in list(workers):
                problem: str | None
                if worker.connection in ready:
                    try:
                        problem, alive = worker.connection.recv(), True
                    except EOFError:
                        problem, alive = worker.words(), False
                elif (problem := worker.overdue()) is not None:
                    alive = False
                else:
                    continue
                yield worker.job, problem
                worker.done_count += 1
                job = next_job()
                if job is None or not alive or worker.done_count >= _INPUTS_MOST:
                    worker.end()
                    workers.remove(worker)
                    if job is None:
                        continue
                    worker = _Worker(work)
                    workers.append(worker)
                worker.give(job)
    finally:
        for worker in workers:
            worker.end()
        sys.stdout.flush()
