"""Clocks and energy of the host's processors, on trees made like /sys."""

from __future__ import annotations

import errno
import os
import types
from pathlib import Path

import numpy as np
import pytest

from chopper.analyzers.events.meter import meter_of
from chopper.collectors import procfs
from chopper.collectors.host._machine import CoreClockSource, RaplSource
from chopper.errors import CollectorUnavailable
from chopper.hardware.environment import affinity_nodes, environment
from tests.collectors.sampled import put, take


def core(root: Path, number: int, khz: str) -> Path:
    return put(root, f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_cur_freq", khz)


def test_core_clocks_are_hertz_in_the_order_of_cores(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        core(tmp_path, number, str(2_000_000 + number))
    put(tmp_path, "sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "performance")
    source = CoreClockSource(str(tmp_path))
    source.open()
    assert take(source) == [(0, 2_000_000_000), (2, 2_000_002_000), (10, 2_000_010_000)]


def test_a_core_without_a_clock_now_has_no_row(tmp_path: Path) -> None:
    file = core(tmp_path, 0, "0")
    core(tmp_path, 1, "<unknown>")
    source = CoreClockSource(str(tmp_path))
    source.open()
    assert take(source) == []
    file.write_text(f"{1 << 64}\n")
    assert take(source) == []
    file.write_text("1500000\n")
    assert take(source) == [(0, 1_500_000_000)]


def test_a_machine_without_cpufreq_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu/cpu0").mkdir(parents=True)
    with pytest.raises(CollectorUnavailable, match="cpufreq: not found"):
        CoreClockSource(str(tmp_path)).open()


def domain(root: Path, folder: str, name: str, uj: int, top_uj: int | None = 1_000_000) -> Path:
    base = f"sys/class/powercap/{folder}"
    put(root, f"{base}/name", name)
    if top_uj is not None:
        put(root, f"{base}/max_energy_range_uj", str(top_uj))
    return put(root, f"{base}/energy_uj", str(uj))


def test_energy_counts_from_the_first_reading_and_survives_a_wrap(tmp_path: Path) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0", 900_000)
    domain(tmp_path, "intel-rapl:0:1", "dram", 5)
    source = RaplSource(str(tmp_path))
    source.open()
    assert take(source) == [("package-0", 0.0), ("package-0/dram", 0.0)]
    package.write_text("950000\n")
    assert take(source)[0] == ("package-0", pytest.approx(0.05))
    package.write_text("100000\n")
    assert take(source)[0] == ("package-0", pytest.approx(0.2))


@pytest.mark.parametrize("top_uj", [None, 1_000_000], ids=["no range", "too far for a wrap"])
def test_energy_is_told_over_no_reset(tmp_path: Path, top_uj: int | None) -> None:
    """The counter of the table goes back, so that the energy view leaves that time out."""
    file = domain(tmp_path, "amd-rapl:0", "package-0", 10, top_uj=top_uj)
    source = RaplSource(str(tmp_path))
    source.open()
    found = []
    for count in (10, 400_010, 20, 15, 500_015):
        file.write_text(f"{count}\n")
        found += [energy_j for _, energy_j in take(source)]
    assert found == pytest.approx([0.0, 0.4, 0.0, -1e-6, 0.499999])
    meter = meter_of(np.arange(5) * 10**9, np.array(found))
    assert meter is not None
    assert meter.broken.tolist() == [False, True, True, False]


def test_without_a_domain_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="no RAPL domain"):
        RaplSource(str(tmp_path)).open()


def test_a_domain_that_only_root_may_read_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 1).chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def deny(path: str, flags: int) -> int:
            if path.endswith("energy_uj"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return os.open(path, flags)

        monkeypatch.setattr(procfs, "os", types.SimpleNamespace(**vars(os) | {"open": deny}))
    with pytest.raises(
        CollectorUnavailable, match="energy_uj: Permission denied; run as root, or chmod a"
    ):
        RaplSource(str(tmp_path)).open()


def test_the_cores_that_may_be_used_by_numa_node(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert affinity_nodes(str(tmp_path)) == {}
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "0-3,8")
    put(tmp_path, "sys/devices/system/node/node1/cpulist", "")
    inside = len(allowed & {0, 1, 2, 3, 8})
    assert affinity_nodes(str(tmp_path)) == ({0: inside} if inside else {})
    told = environment().get("cores_by_numa_node", "")
    counts = [int(part.partition(":")[2]) for part in told.split()]
    assert not counts or sum(counts) == len(allowed)
