"""The link of a run is judged by what is known of that link, never by another one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chopper.hardware import calibration, environment
from chopper.hardware.calibration import Calibration, Measured
from chopper.hardware.ceilings import Link, ceilings_of, device_of
from chopper.storage.manifest import Device, Measure, RankManifest, RunManifest
from chopper.storage.run import Run

BOOT = "11111111-2222-3333-4444-555555555555"
NAMESPACE, OTHER = "net:[1]", "net:[2]"
NOWHERE = "the link between the ranks was not recorded"
APART = "no loopback joins the ranks, and their link was not measured"


def calibrated(ranks: int = 2, hostname: str = "a", **known: Any) -> dict[str, Any]:
    measured = Measured(
        what="all_reduce",
        best_per_s=2e9,
        median_per_s=2e9,
        spread_ratio=0.0,
        repeats_count=3,
    )
    one = Calibration(
        kind="full",
        created_ns=0,
        chopper_version="0",
        torch_version="2",
        hostname=hostname,
        device_type="cpu",
        device_name="EPYC",
        ranks=ranks,
        threads=1,
        cores=2,
        **{"link": [measured], "link_ranks": ranks, **known},
    )
    return calibration.to_manifest(one)


def part(rank: int, hostname: str | None = "a", **known: Any) -> RankManifest:
    values: dict[str, Any] = {
        "status": "complete",
        "world_size": 2,
        "machine": f"{hostname} {hostname}{BOOT[1:]}",
        "loopback": NAMESPACE,
        "calibration": calibrated(),
    }
    return RankManifest(rank=rank, hostname=hostname, **values | known)


def link_of(*parts: RankManifest, rank: int = 0) -> Link:
    run = Run(RunManifest(kind="recorded", name="made", ranks=[*parts]), Path("made"), {})
    one = run.part(rank)
    return ceilings_of(run, one, device_of(one), on_host=not one.devices).link


@pytest.mark.parametrize(
    ("parts", "rate", "source"),
    [
        ([part(0), part(1)], 2e9, "loopback, measured on EPYC (a) with 2 processes"),
        ([part(0), part(1, loopback=OTHER)], None, APART),  # the user's own namespaces
        ([part(0), part(1, "b")], None, APART),  # two hosts, a calibration of the first
        ([part(0, loopback=None), part(1)], None, NOWHERE),  # lo is shaped, or a sandbox
        ([part(0, status="imported", loopback=None), part(1)], None, NOWHERE),
        ([part(0, calibration=None), part(1)], None, "`chopper calibrate` was not run there"),
        ([part(0, calibration=calibrated(4)), part(1)], None, "measured between 4 ranks"),
        (
            [part(0, calibration=calibrated(link=[], absent={"link": "lo is shaped"})), part(1)],
            None,
            "lo is shaped",
        ),
    ],
    ids=["one loopback", "namespaces", "hosts", "shaped", "imported", "none", "four", "absent"],
)
def test_a_calibrated_loopback_holds_for_ranks_that_it_joins(
    parts: list[RankManifest], rate: float | None, source: str
) -> None:
    found = link_of(*parts)
    assert found.bytes_per_s == rate
    assert source in found.source
    assert found.ranks is None


def test_what_a_program_states_of_its_link_counts() -> None:
    stated = Measure(name="link_bytes_per_s", value=12.5e6)
    apart = [part(0, measures=[stated]), part(1, loopback=OTHER)]
    assert link_of(*apart) == Link(12.5e6, "stated by the program (link_bytes_per_s)")
    # Of no collective in particular; and no rate.
    labelled = Measure(name="link_bytes_per_s", value=1e6, labels={"link": "a-b"})
    for other in (labelled, Measure(name="link_bytes_per_s", value=0)):
        assert link_of(part(0, measures=[other]), part(1)).bytes_per_s == 2e9


def test_between_two_hosts_of_two_ranks_each_the_loopback_joins_pairs() -> None:
    parts = [part(r, "ab"[r // 2], world_size=4) for r in range(4)]
    found = link_of(*parts, rank=3)
    assert found.ranks == frozenset({2, 3})
    assert found.of_group(2, (2, 3))[0] == 2e9
    assert found.of_group(4, (0, 1, 2, 3)) == (
        None,
        "the group has ranks that this link does not join",
    )
    assert found.of_group(2, ())[0] is None  # which ranks it has is not recorded


def gpu(rank: int, count: int, hostname: str = "a", world: int = 8, **known: Any) -> RankManifest:
    devices = [
        Device(device_id=i, name="NVIDIA H100 80GB HBM3", multiprocessor_count=132)
        for i in range(count)
    ]
    of = {"devices": devices, "device_id": rank % count, "calibration": None, "loopback": None}
    return part(rank, hostname, world_size=world, **of | known)


def test_nvlink_holds_within_a_node_and_not_between_nodes() -> None:
    one_node = [gpu(r, 8) for r in range(8)]
    assert (link_of(*one_node).bytes_per_s, link_of(*one_node).ranks) == (450e9, None)
    two_nodes = [gpu(r, 8, "ab"[r // 8], world=16) for r in range(16)]
    found = link_of(*two_nodes, rank=9)
    assert found.of_group(8, range(8, 16))[0] == 450e9
    assert found.of_group(16, range(16))[0] is None
    assert link_of(*two_nodes[:4]).bytes_per_s is None  # who the other devices are is unknown
    kept_off = [gpu(r, 8, environment={"NCCL_P2P_DISABLE": "1"}) for r in range(8)]
    assert link_of(*kept_off).source == "NCCL_P2P_DISABLE keeps NCCL from the links between devices"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's network namespaces")
def test_a_loopback_with_a_queue_is_not_named() -> None:
    tools = [shutil.which(tool) for tool in ("unshare", "ip", "tc")]
    ask = (
        f"{sys.executable} -c 'from chopper.hardware import environment as e; print(e.loopback())'"
    )
    shaped = "tc qdisc add dev lo root tbf rate 1mbit burst 32kb latency 50ms"
    script = f"ip link set lo up; readlink /proc/self/ns/net; {ask}; {shaped} && {ask}"
    done = None
    if all(tools):
        command = ["unshare", "--net", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done is None or done.returncode:
        pytest.skip("needs root, unshare, ip and tc with tbf")
    namespace, free, queued = done.stdout.split()
    assert (free, queued) == (namespace, "None")
    assert namespace != environment.loopback()
