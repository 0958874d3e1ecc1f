"""The host's sources: fake trees of /proc and /sys worked by hand, and this machine's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import psutil
import pytest

from chopper.collectors.base import CollectorContext
from chopper.collectors.host import HostCollector
from chopper.collectors.host._machine import CoreSource, MachineSource, NicSource
from chopper.collectors.host._processes import ProcessSource
from chopper.collectors.sampler import SamplerProcess
from chopper.errors import CollectorUnavailable
from chopper.recording.live import StreamTail
from chopper.storage.parts import RunWriter
from chopper.storage.streams import read_stream
from tests.collectors.sampled import put, take
from tests.waiting import PATIENCE_S, until

SECOND = 1_000_000_000
HERE = socket.gethostname()
BY_MACHINE = {
    f"{name}.arrow" for name in ("process_event", "core_clock", "core_cycle", "host_energy")
}
"""What some machines offer and others do not."""


# Cores.

STAT = "cpu  9 9 9 9 9 9 9 9 9 9\n{cores}intr 12345 0 0\nctxt 1\n"


def cores(root: Path, *lines: str) -> None:
    put(root, "proc/stat", STAT.format(cores="".join(line + "\n" for line in lines)))


def opened_cores(root: Path, *lines: str) -> CoreSource:
    cores(root, *lines)
    source = CoreSource(str(root))
    source.open()
    return source


def test_core_ratios_by_hand(tmp_path: Path) -> None:
    source = opened_cores(tmp_path, "cpu0 100 10 50 1000 20 5 5 30 7 0", "cpu1 0 0 0 0 0 0 0 0 0 0")
    # user +20, nice +5, system +10, idle +40, iowait +10, irq +3, softirq +2, steal +10: 100 ticks.
    # Guest time (+50) is inside user already and must not count twice.
    cores(tmp_path, "cpu0 120 15 60 1040 30 8 7 40 57 0", "cpu1 0 0 0 100 0 0 0 0 0 0")
    assert take(source) == [(0, 0.40, 0.15, 0.10), (1, 0.0, 0.0, 0.0)]


def test_a_counter_that_goes_backwards_is_unknown_and_then_known_again(tmp_path: Path) -> None:
    source = opened_cores(tmp_path, "cpu0 0 0 0 100 50 0 0 0")
    cores(tmp_path, "cpu0 10 0 0 110 40 0 0 0")  # iowait fell: proc(5) warns of it
    assert take(source) == [(0, None, None, None)]
    cores(tmp_path, "cpu0 15 0 0 115 40 0 0 0")
    assert take(source) == [(0, 0.5, 0.0, 0.0)]


def test_two_readings_within_one_tick_are_unknown_not_idle(tmp_path: Path) -> None:
    source = opened_cores(tmp_path, "cpu0 1 1 1 1 1 1 1 1")
    assert take(source) == [(0, None, None, None)]


def test_cores_that_come_and_go(tmp_path: Path) -> None:
    source = opened_cores(tmp_path, "cpu0 0 0 0 0 0 0 0 0", "cpu3 0 0 0 0 0 0 0 0")
    cores(tmp_path, "cpu0 1 0 0 0 0 0 0 0", "cpu7 1 0 0 0 0 0 0 0")
    assert [row[0] for row in take(source)] == [0]
    cores(tmp_path, "cpu0 2 0 0 0 0 0 0 0", "cpu7 1 0 0 1 0 0 0 0")
    assert take(source) == [(0, 1.0, 0.0, 0.0), (7, 0.0, 0.0, 0.0)]


def test_an_old_kernel_without_steal(tmp_path: Path) -> None:
    source = opened_cores(tmp_path, "cpu0 0 0 0 0 0 0 0")
    assert source.absent == {"cpu_core.steal_ratio": f"{tmp_path}/proc/stat has no steal column"}
    cores(tmp_path, "cpu0 1 0 0 1 0 0 0")
    assert take(source) == [(0, 0.5, 0.0, None)]


def test_a_core_whose_line_is_damaged_costs_no_other(tmp_path: Path) -> None:
    source = opened_cores(tmp_path, "cpu0 0 0 0 0 0 0 0 0", "cpu1 0 0 0 0 0 0 0 0")
    for damaged in ("cpu1 1 nan 0 0 0 0 0 0", "cpu1 1 -5 0 0 0 0 0 0", "cpu1 1", "cpu1e9 1 1 1 1"):
        cores(tmp_path, "cpu0 1 0 0 0 0 0 0 0", damaged)
        assert [row[0] for row in take(source)] == [0]


def test_no_cores_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="No such file"):
        CoreSource(str(tmp_path)).open()
    cores(tmp_path)
    with pytest.raises(CollectorUnavailable, match="names no core"):
        CoreSource(str(tmp_path)).open()


def test_a_stat_file_longer_than_the_buffer_is_read_whole(tmp_path: Path) -> None:
    many = [f"cpu{n} 0 0 0 0 0 0 0 0" for n in range(2000)]
    source = opened_cores(tmp_path, *many)
    cores(tmp_path, *(line.replace(" 0", " 1", 1) for line in many))
    assert len(take(source)) == 2000


# Machine: memory, pressure, throttling.

MEMINFO = "MemTotal:       24684096 kB\nMemFree:        1 kB\nMemAvailable:   {} kB\n"
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=7\n"


def machine(root: Path) -> MachineSource:
    put(root, "proc/meminfo", MEMINFO.format(1000))
    for n, kind in enumerate(("cpu", "memory", "io"), start=1):
        put(root, f"proc/pressure/{kind}", PRESSURE.format(n))
    source = MachineSource(str(root))
    source.open()
    return source


def cgroup(root: Path, memberships: str, mounts: str) -> None:
    put(root, "proc/self/cgroup", memberships)
    put(root, "proc/self/mountinfo", mounts)


V2_MOUNT = "30 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "31 24 0:28 {} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def test_memory_and_pressure_in_bytes_and_nanoseconds(tmp_path: Path) -> None:
    [row] = take(machine(tmp_path))
    assert row == (1000 * 1024, 1000, 2000, 3000, None, None)


def test_a_kernel_without_pressure_is_null_with_a_reason(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", MEMINFO.format(1))
    source = MachineSource(str(tmp_path))
    source.open()
    assert take(source) == [(1024, None, None, None, None, None)]
    for kind in ("cpu", "memory", "io"):
        reason = source.absent[f"host.pressure_{kind}_some_ns"]
        assert reason == f"{tmp_path}/proc/pressure/{kind}: No such file or directory"


def test_a_machine_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="meminfo: No such file"):
        MachineSource(str(tmp_path)).open()


def test_cgroup_v2_throttling_of_the_job_and_of_what_it_is_in(tmp_path: Path) -> None:
    cgroup(tmp_path, "0::/pod/job\n", V2_MOUNT)
    put(tmp_path, "sys/fs/cgroup/cpu.stat", "usage_usec 5\n")  # the root never throttles
    stat = "usage_usec 1\nnr_periods 9\nnr_throttled {}\nthrottled_usec {}\n"
    put(tmp_path, "sys/fs/cgroup/pod/cpu.stat", stat.format(2, 30))
    put(tmp_path, "sys/fs/cgroup/pod/job/cpu.stat", stat.format(3, 400))
    source = machine(tmp_path)
    assert take(source)[0][4:] == (430_000, 5)
    assert source.absent == {}
    put(tmp_path, "sys/fs/cgroup/pod/job/cpu.stat", stat.format(4, 900))
    assert take(source)[0][4:] == (930_000, 6)


def test_cgroup_v1_throttling_is_in_nanoseconds_already(tmp_path: Path) -> None:
    cgroup(tmp_path, "9:name=systemd:/\n4:cpu,cpuacct:/job\n", V1_MOUNT.format("/") + V2_MOUNT)
    put(
        tmp_path,
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat",
        "nr_periods 7\nnr_throttled 2\nthrottled_time 123456789\n",
    )
    assert take(machine(tmp_path))[0][4:] == (123_456_789, 2)


def test_a_container_sees_a_part_of_the_hierarchy(tmp_path: Path) -> None:
    cgroup(tmp_path, "4:cpu,cpuacct:/docker/abc/inner\n", V1_MOUNT.format("/docker/abc"))
    put(
        tmp_path,
        "sys/fs/cgroup/cpu,cpuacct/inner/cpu.stat",
        "nr_throttled 1\nthrottled_time 5\n",
    )
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.stat", "nr_throttled 1\nthrottled_time 70\n")
    assert take(machine(tmp_path))[0][4:] == (75, 2)


def test_no_cpu_controller_is_null_with_a_reason(tmp_path: Path) -> None:
    cgroup(tmp_path, "0::/\n", V2_MOUNT)
    put(tmp_path, "sys/fs/cgroup/cpu.stat", "usage_usec 5\n")
    source = machine(tmp_path)
    assert take(source)[0][4:] == (None, None)
    assert source.absent["host.cgroup_throttled_ns"] == (
        "no cgroup with a cpu controller above this process counts throttling"
    )


def test_a_file_that_vanishes_nulls_its_columns_only(tmp_path: Path) -> None:
    source = machine(tmp_path)
    put(tmp_path, "proc/pressure/cpu", "")
    assert take(source) == [(1000 * 1024, None, 2000, 3000, None, None)]


@pytest.mark.parametrize("text", ["", "nan", "-5", "1e9", "\0\0", str(1 << 64), "9" * 40])
def test_what_is_no_count_nulls_its_columns_only(tmp_path: Path, text: str) -> None:
    cgroup(tmp_path, "0::/job\n", V2_MOUNT)
    stat = "nr_throttled 3\nthrottled_usec {}\n"
    put(tmp_path, "sys/fs/cgroup/job/cpu.stat", stat.format(7))
    source = machine(tmp_path)
    assert take(source)[0][4:] == (7000, 3)
    put(tmp_path, "sys/fs/cgroup/job/cpu.stat", stat.format(text))
    put(tmp_path, "proc/pressure/memory", PRESSURE.format(text))
    put(tmp_path, "proc/meminfo", MEMINFO.format(text))
    assert take(source) == [(None, 1000, None, 3000, None, None)]


# Network interfaces.


def nics(root: Path, *lines: str) -> None:
    head = "Inter-|   Receive\n face |bytes    packets\n"
    put(root, "proc/self/net/dev", head + "".join(line + "\n" for line in lines))


def test_thousands_of_interfaces_are_bounded_and_odd_lines_skipped(tmp_path: Path) -> None:
    lines = ["Inter-|   Receive", " face |bytes"]
    lines += [f"veth{i}: {i} 0 0 0 0 0 0 0 {i} 0 0 0 0 0 0 0" for i in range(3000)]
    lines += ["odd: 1 2", "none", f"huge0: {2**64 - 1} 0 0 0 0 0 0 0 7 0 0 0 0 0 0 0"]
    put(tmp_path, "proc/self/net/dev", "\n".join(lines) + "\n")
    source = NicSource(str(tmp_path))
    source.open()
    found = {row[0]: row[1:] for row in take(source)}
    source.close()
    assert len(found) == 256
    assert found["veth2999"] == (2999, 2999)
    assert found["huge0"] == (None, 7)
    assert "veth1" not in found
    assert source.absent["nic[others]"].startswith("2744 of 3000 interfaces are left out")


def test_interfaces_appear_once_they_carry_something(tmp_path: Path) -> None:
    zeros = " 0 0 0 0 0 0 0"
    nics(tmp_path, f"    lo:    11{zeros} 22{zeros}", f"eth0.1:0{zeros} 0{zeros}")
    source = NicSource(str(tmp_path))
    source.open()
    assert take(source) == [("lo", 11, 22)]
    # An alias has a colon in its name, and a big counter leaves no blank behind it.
    nics(tmp_path, f"    lo:    11{zeros} 22{zeros}", f"eth0:1:{2**63 - 1}{zeros} 0{zeros}")
    assert take(source) == [("lo", 11, 22), ("eth0:1", 2**63 - 1, 0)]


# Ranks.


def announce(run: Path, rank: int, pid: int, hostname: str = HERE) -> RunWriter:
    writer = RunWriter(run, rank)
    writer.manifest.hostname = hostname
    writer.manifest.pid = pid
    writer.save()
    return writer


class Watch:
    """Samples ranks under a clock of its own; rows by rank, as dicts."""

    COLUMNS = (
        "rank",
        "pid",
        "cpu_ratio",
        "child_cpu_ratio",
        "run_delay_ns",
        "rss_bytes",
        "thread_count",
        "child_count",
    )

    def __init__(self, run: Path, **options: Any) -> None:
        self.source = ProcessSource(str(run), HERE, scan_ns=1, **options)
        self.source.open()

        # So far apart that whatever spaces itself out by its cost is due at each.
        self.step_ns = 1000 * SECOND
        self._now_ns = time.monotonic_ns()

    def rows(self, step_ns: int | None = None) -> dict[int, dict[str, Any]]:
        self._now_ns += self.step_ns if step_ns is None else step_ns
        now_ns = self._now_ns
        found = [dict(zip(self.COLUMNS, row, strict=True)) for row in take(self.source, now_ns)]
        return {row["rank"]: row for row in found}


@pytest.fixture
def watch() -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def make(run: Path, **options: Any) -> Watch:
        made.append(Watch(run, **options))
        return made[-1]

    yield make
    for one in made:
        one.source.close()


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python children that say when they are ready, and end with the test."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        ready = "print('ready', flush=True)\nimport sys\nsys.stdin.read()\n"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code) + "\n" + ready],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in children:
        process.communicate()


def test_cpu_time_of_a_rank_is_exact(tmp_path: Path, watch: Callable[..., Watch]) -> None:
    announce(tmp_path, 3, os.getpid())
    watching = watch(tmp_path)
    first_low_ns = time.process_time_ns()
    watching.rows()
    first_high_ns = time.process_time_ns()
    while time.process_time_ns() - first_high_ns < 50_000_000:
        sum(range(1000))
    second_low_ns = time.process_time_ns()
    row = watching.rows()[3]
    second_high_ns = time.process_time_ns()
    used_ns = round(row["cpu_ratio"] * watching.step_ns)
    # Each reading lies between two of the process' own clock: no tolerance is needed.
    assert second_low_ns - first_high_ns <= used_ns <= second_high_ns - first_low_ns
    assert row["pid"] == os.getpid()
    assert row["child_cpu_ratio"] == 0.0
    assert row["run_delay_ns"] is None or row["run_delay_ns"] >= 0
    assert row["thread_count"] >= 1


def test_children_count_with_their_rank_and_samplers_do_not(
    tmp_path: Path, watch: Callable[..., Watch], child: Callable[..., subprocess.Popen[str]]
) -> None:
    announce(tmp_path, 0, os.getpid())
    watching = watch(tmp_path)
    before = watching.rows()[0]
    busy = child("import time\nwhile time.process_time() < 0.05: pass")
    child("import ctypes\nassert ctypes.CDLL(None).prctl(15, b'chopper-sampler', 0, 0, 0) == 0")
    row = watching.rows()[0]
    assert row["child_count"] == before["child_count"] + 1
    assert row["rss_bytes"] > before["rss_bytes"]
    assert row["thread_count"] > before["thread_count"]
    # What it used before it was found is not counted as if it had used it since.
    assert row["child_cpu_ratio"] * watching.step_ns < 0.05 * SECOND
    busy.communicate()
    gone = watching.rows()[0]
    assert gone["child_count"] == before["child_count"]


def test_a_childs_cpu_time_is_told_from_the_ranks(
    tmp_path: Path, watch: Callable[..., Watch], child: Callable[..., subprocess.Popen[str]]
) -> None:
    announce(tmp_path, 0, os.getpid())
    worker = child(
        """
        import sys, time
        print("ready", flush=True)
        for line in sys.stdin:
            end = time.process_time() + 0.05
            while time.process_time() < end: pass
            print("done", flush=True)
        """
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    watching = watch(tmp_path)
    watching.rows()
    worker.stdin.write("work\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "done\n"
    row = watching.rows()[0]
    assert row["child_cpu_ratio"] * watching.step_ns >= 0.05 * SECOND
    assert row["cpu_ratio"] >= row["child_cpu_ratio"]


def test_a_grandchild_belongs_to_the_rank(
    tmp_path: Path, watch: Callable[..., Watch], child: Callable[..., subprocess.Popen[str]]
) -> None:
    announce(tmp_path, 0, os.getpid())
    watching = watch(tmp_path)
    before = watching.rows()[0]["child_count"]
    child("import subprocess\nsubprocess.Popen(['cat'])")
    assert watching.rows()[0]["child_count"] == before + 2


def test_ranks_come_when_they_announce_themselves(
    tmp_path: Path, watch: Callable[..., Watch], child: Callable[..., subprocess.Popen[str]]
) -> None:
    watching = watch(tmp_path / "run")
    assert watching.rows() == {}
    # Of tests before: multiprocessing's tracker stays as long as this process.
    before = len(psutil.Process().children(recursive=True))
    other = child("")
    announce(tmp_path / "run", 0, os.getpid())
    announce(tmp_path / "run", 1, other.pid)
    announce(tmp_path / "run", 2, os.getpid(), hostname="another-host")
    (tmp_path / "run/rank-00003").mkdir()
    (tmp_path / "run/rank-00003/manifest.json").write_text('{"rank": 3, "hostn')
    (tmp_path / "run/rank-00004").mkdir()
    rows = watching.rows()
    assert {rank: row["pid"] for rank, row in rows.items()} == {0: os.getpid(), 1: other.pid}
    # A rank that is a child of another one is not its data loader worker.
    assert rows[0]["child_count"] == before


def test_a_rank_that_dies_leaves_the_others(
    tmp_path: Path, watch: Callable[..., Watch], child: Callable[..., subprocess.Popen[str]]
) -> None:
    other = child("")
    announce(tmp_path, 0, os.getpid())
    announce(tmp_path, 1, other.pid)
    watching = watch(tmp_path)
    assert set(watching.rows()) == {0, 1}
    other.kill()
    # A zombie has no memory to speak of: it is dead although its number is taken.
    until(lambda: set(watching.rows()) == {0}, "the end of rank 1")
    again = child("")
    announce(tmp_path, 1, again.pid)
    until(lambda: set(watching.rows()) == {0, 1}, "rank 1 under another process")
    assert watching.rows()[1]["pid"] == again.pid


def test_ticks_serve_where_the_kernel_has_no_clock_of_a_process(
    tmp_path: Path, watch: Callable[..., Watch]
) -> None:
    # 22 fields after the name, which may itself hold blanks and brackets; utime and stime are the
    # 12th and 13th of them, threads the 18th, rss in pages the 22nd.
    stat = "42 (a) b (c) S 1 42 42 0 -1 0 0 0 0 0 {utime} {stime} 0 0 20 0 6 0 0 0 {rss}\n"
    put(tmp_path, "proc/42/stat", stat.format(utime=100, stime=20, rss=3))
    put(tmp_path, "proc/self/stat", "")
    announce(tmp_path / "run", 0, 42)
    watching = watch(tmp_path / "run", root=str(tmp_path))
    watching.rows()
    ticks = 500 * os.sysconf("SC_CLK_TCK")
    put(tmp_path, "proc/42/stat", stat.format(utime=100 + ticks, stime=20, rss=4))
    row = watching.rows()[0]
    assert row["cpu_ratio"] == pytest.approx(0.5)
    assert row["rss_bytes"] == 4 * os.sysconf("SC_PAGE_SIZE")
    assert row["thread_count"] == 6
    assert row["run_delay_ns"] is None
    assert "schedstat: not found" in watching.source.absent["process.run_delay_ns"]
    put(tmp_path, "proc/42/stat", stat.format(utime=50, stime=20, rss=4))
    assert watching.rows()[0]["cpu_ratio"] is None


# The collector as a whole, on this machine.


def context(run: Path, writer: RunWriter) -> CollectorContext:
    return CollectorContext(
        directory=writer.directory, run_path=run, pid=os.getpid(), hostname=HERE
    )


def test_a_recording_of_this_machine(
    tmp_path: Path,
    child: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = child("")
    patient = partialmethod(SamplerProcess.stop, timeout_s=PATIENCE_S)
    monkeypatch.setattr(SamplerProcess, "stop", patient)
    writer = announce(tmp_path, 0, os.getpid())
    announce(tmp_path, 1, other.pid)
    collector = HostCollector(hz=50.0)
    assert collector.probe(context(tmp_path, writer)).ok
    tail = StreamTail(writer.directory / "process.arrow")
    told: set[int] = set()

    def both_told() -> bool:
        # What a rank used is known from its second reading on.
        for batch in tail.poll():
            told.update(row["rank"] for row in batch.to_pylist() if row["cpu_ratio"] is not None)
        return told == {0, 1}

    collector.start(context(tmp_path, writer))
    try:
        until(both_told, "what both ranks used")
    finally:
        report = collector.stop()
        tail.close()
    assert report.status == "obtained"
    assert set(report.files) - BY_MACHINE == {
        "clock.arrow",
        "cpu_core.arrow",
        "host.arrow",
        "nic.arrow",
        "process.arrow",
        "process_thread.arrow",
    }
    assert report.requested_hz == 50.0
    assert report.clock_alignment_error_ns is not None
    tables = {}
    for file in report.files:
        name = file.removesuffix(".arrow")
        tables[name], finding = read_stream(writer.directory / file, name)
        assert finding is None
        assert tables[name].num_rows > 0
        spans = tables[name]["span_ns"].to_pylist()
        assert min(spans) >= 0
    assert set(tables["process"]["rank"].to_pylist()) == {0, 1}
    assert set(tables["cpu_core"]["core_id"].to_pylist()) <= set(range(os.cpu_count() or 1))
    busy = [b for b in tables["cpu_core"]["busy_ratio"].to_pylist() if b is not None]
    assert all(0 <= b <= 1 for b in busy)
    # Each column that is null throughout is named with a reason, and only those.
    for name in ("host", "process"):
        for column in tables[name].column_names:
            empty = tables[name][column].null_count == tables[name].num_rows
            why = report.absent.get(f"{name}.{column}", "")
            # What is left out later has some rows before.
            assert empty == bool(why) or "left out after" in why, (column, report.absent)


def test_a_machine_without_proc_is_refused_with_a_remedy(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, 0)
    answer = HostCollector(root=str(tmp_path)).probe(context(tmp_path, writer))
    assert not answer.ok
    assert "proc/stat: No such file" in (answer.reason or "")
    assert answer.remedy == "run on Linux with /proc mounted"
