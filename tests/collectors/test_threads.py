"""Threads and kernel events of ranks: fake trees worked by hand, and real processes."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chopper.collectors.host._machine import CycleSource
from chopper.collectors.host._processes import (
    EVENTS,
    EventSource,
    ThreadSource,
    open_event,
    read_event,
)
from chopper.errors import CollectorUnavailable
from chopper.storage.parts import RunWriter
from tests.collectors.sampled import put, taken

HERE = socket.gethostname()


def rank(run: Path, pid: int, number: int = 0, host: str = HERE) -> None:
    part = RunWriter(run, number)
    part.manifest.pid = pid
    part.manifest.hostname = host
    part.save()


def thread(root: Path, pid: int, tid: int, name: str, run: int, delay: int, slices: int) -> None:
    put(root, f"proc/{pid}/task/{tid}/comm", f"{name}\n")
    put(root, f"proc/{pid}/task/{tid}/schedstat", f"{run} {delay} {slices}\n")


def test_each_thread_that_ran_or_waited_has_a_row(tmp_path: Path) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    put(root, "proc/self/schedstat", "1 2 3\n")
    rank(run, 40)
    rank(run, 41, 1, host="another")
    thread(root, 40, 40, "python", 900, 50, 7)
    thread(root, 40, 41, "pt_autograd_0", 300, 20, 3)
    source = ThreadSource(str(run), HERE, str(root), scan_ns=1)
    source.open()
    assert taken(source) == [
        {"rank": 0, "pid": 40, "tid": 40, "name": "python",
         "run_ns": 900, "run_delay_ns": 50, "slice_count": 7},
        {"rank": 0, "pid": 40, "tid": 41, "name": "pt_autograd_0",
         "run_ns": 300, "run_delay_ns": 20, "slice_count": 3},
    ]  # fmt: skip
    # Only the waiting of one thread grew; a third one began.
    thread(root, 40, 41, "pt_autograd_0", 300, 95, 4)
    thread(root, 40, 42, "loader", 5, 0, 1)
    rows = taken(source, time.monotonic_ns() + 10**10)
    assert [(r["tid"], r["run_delay_ns"]) for r in rows] == [(41, 95), (42, 0)]
    source.close()


def test_of_many_threads_the_main_one_and_the_busiest_are_watched(tmp_path: Path) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    put(root, "proc/self/schedstat", "1 2 3\n")
    rank(run, 40)
    for i in range(100):
        thread(root, 40, 40 + i, f"t{i}", i, 0, 1)
    source = ThreadSource(str(run), HERE, str(root))
    source.open()
    tids = [row["tid"] for row in taken(source)]
    assert len(tids) == 64
    assert tids[0] == 40
    assert min(tids[1:]) == 40 + 37
    assert source.absent["process_thread[rank 0]"].startswith("36 of 100 threads")
    source.close()


@pytest.mark.parametrize("text", [None, "0 0\n"])
def test_a_kernel_that_counts_no_delays_is_said_so(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        put(tmp_path, "proc/self/schedstat", text)
    with pytest.raises(CollectorUnavailable, match="schedstat"):
        ThreadSource(str(tmp_path), HERE, str(tmp_path)).open()


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    """A process with two threads; it faults 20 000 pages for each line that it is told."""
    code = """
import sys, threading, mmap
held = threading.Lock(); held.acquire()
threading.Thread(target=held.acquire, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    with mmap.mmap(-1, 20_000 * 4096) as block:
        for i in range(0, len(block), 4096):
            block[i] = 1
    print("done", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    for end in (process.stdin, process.stdout):
        if end is not None:
            end.close()


def work(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_a_real_threads_time_grows(tmp_path: Path, busy: subprocess.Popen[str]) -> None:
    rank(tmp_path / "run", busy.pid)
    source = ThreadSource(str(tmp_path / "run"), HERE)
    try:
        source.open()
    except CollectorUnavailable as exc:
        pytest.skip(str(exc))
    first = {row["tid"]: row for row in taken(source)}
    assert len(first) == 2
    work(busy)
    (row,) = [r for r in taken(source) if r["tid"] == busy.pid]
    assert row["run_ns"] > first[busy.pid]["run_ns"]
    assert row["run_delay_ns"] >= first[busy.pid]["run_delay_ns"]
    busy.kill()
    busy.wait()
    assert taken(source) == []
    source.close()


def software_allowed() -> None:
    try:
        os.close(open_event(*EVENTS["page_fault_count"], 0))
    except OSError as exc:
        pytest.skip(f"perf_event_open: {exc.strerror}")


def test_page_faults_of_a_real_rank_are_counted(
    tmp_path: Path, busy: subprocess.Popen[str]
) -> None:
    software_allowed()
    rank(tmp_path / "run", busy.pid)
    source = EventSource(str(tmp_path / "run"), HERE)
    source.open()
    (before,) = taken(source)
    work(busy)
    (after,) = taken(source)
    assert 20_000 <= after["page_fault_count"] - before["page_fault_count"] < 30_000
    for column in EVENTS:
        assert (after[column] is None) == (f"process_event.{column}" in source.absent)
    busy.kill()
    busy.wait()
    assert taken(source) == []
    source.close()


def test_an_event_that_this_machine_lacks_is_null_with_the_reason(
    tmp_path: Path, busy: subprocess.Popen[str]
) -> None:
    software_allowed()

    def without_hardware(kind: int, number: int, tid: int) -> int:
        if kind == 0:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return open_event(kind, number, tid)

    rank(tmp_path / "run", busy.pid)
    source = EventSource(str(tmp_path / "run"), HERE, opener=without_hardware)
    source.open()
    (row,) = taken(source)
    assert row["cycle_count"] is None
    assert row["page_fault_count"] is not None
    assert "does not count it" in source.absent["process_event.cycle_count"]
    source.close()


def test_a_kernel_that_forbids_it_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def forbidden(kind: int, number: int, tid: int) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    source = EventSource(str(tmp_path), HERE, opener=forbidden)
    with pytest.raises(CollectorUnavailable, match=r"perf_event_paranoid must be 1 or less"):
        source.open()


def test_a_count_is_made_up_for_the_time_that_others_had_the_counter(tmp_path: Path) -> None:
    file = tmp_path / "event"
    for words, expected in (((100, 1000, 250), 400), ((100, 1000, 1000), 100), ((7, 0, 0), 7)):
        file.write_bytes(b"".join(w.to_bytes(8, sys.byteorder) for w in words))
        descriptor = os.open(file, os.O_RDONLY)
        assert read_event(descriptor) == expected
        os.close(descriptor)


# The cores' own counters.


def registers(root: Path, core: int, aperf: int, mperf: int) -> None:
    """A register file as the msr driver shows it: eight bytes at the number of the register."""
    data = bytearray(0xE8 + 8)
    # Two registers, one byte apart by number: whoever reads at an offset reads eight bytes there.
    path = root / f"dev/cpu/{core}/msr"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(data))
    _VALUES[str(path)] = {0xE7: mperf, 0xE8: aperf}


_VALUES: dict[str, dict[int, int]] = {}


@pytest.fixture
def msr(monkeypatch: pytest.MonkeyPatch) -> None:
    """pread of a register file gives the register's value, as the driver does."""
    real = os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        if path in _VALUES:
            return _VALUES[path][offset].to_bytes(8, "little")
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)


@pytest.mark.usefixtures("msr")
def test_the_clock_of_a_core_is_the_ratio_of_its_counters(tmp_path: Path) -> None:
    registers(tmp_path, 0, 1000, 1000)
    registers(tmp_path, 1, 1 << 40, 1 << 40)
    for core in (0, 1):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/base_frequency", "2500000\n")
    source = CycleSource(str(tmp_path))
    source.open()
    registers(tmp_path, 0, 1000 + 640, 1000 + 800)  # at 80 % of 2.5 GHz
    registers(tmp_path, 1, 1 << 40, 1 << 40)  # did not run
    assert taken(source) == [{"core_id": 0, "clock_ratio": 0.8, "clock_hz": 2_000_000_000}]
    registers(tmp_path, 0, 10, 10)  # set back: nothing is known of this time
    registers(tmp_path, 1, (1 << 40) + 300, (1 << 40) + 200)
    assert taken(source) == [{"core_id": 1, "clock_ratio": 1.5, "clock_hz": 3_750_000_000}]
    source.close()


@pytest.mark.usefixtures("msr")
def test_without_a_nominal_clock_the_ratio_stays(tmp_path: Path) -> None:
    registers(tmp_path, 0, 5, 5)
    source = CycleSource(str(tmp_path))
    source.open()
    registers(tmp_path, 0, 15, 15)
    assert taken(source) == [{"core_id": 0, "clock_ratio": 1.0, "clock_hz": None}]
    assert "core_cycle.clock_hz" in source.absent
    source.close()


@pytest.mark.usefixtures("msr")
def test_counters_that_a_hypervisor_holds_at_zero_are_absent(tmp_path: Path) -> None:
    registers(tmp_path, 0, 0, 0)
    with pytest.raises(CollectorUnavailable, match="does not count"):
        CycleSource(str(tmp_path)).open()


def test_no_msr_driver_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="modprobe msr"):
        CycleSource(str(tmp_path)).open()
