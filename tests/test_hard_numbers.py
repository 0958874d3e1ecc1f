"""Data that supports less than it seems: the right number, or none with the reason.

All through the public API: traces are written as Kineto writes them, loaded and attributed.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

import chopper
import chopper.reports
from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.pipeline import clocks_of, share_a_clock
from chopper.storage.findings import checks
from chopper.storage.manifest import Device, Finding, RankManifest, RunManifest
from chopper.storage.run import Run
from tests.kineto_writer import Trace

US = 1_000
MS = 1_000_000


def attributed(directory: Path, *traces: Trace, **tables: str) -> Attribution:
    """Attribute traces, one file each, with tables beside them; closed whatever comes."""
    directory.mkdir(exist_ok=True)
    for i, trace in enumerate(traces):
        (directory / f"trace-{i}.json").write_bytes(trace.encode())
    for name, text in tables.items():
        (directory / f"{name}.csv").write_text(text)
    found = pipeline.attribute(directory)
    assert sum(row.time_ns for row in found.leaves()) == found.observed_ns
    for level in ("step", "phase", "op", "kernel", "rank"):
        assert sum(group.time_ns for group in found.by(level)) == found.observed_ns
    for finding in found.findings:
        assert set(finding.withholds) <= set(checks()[finding.code].withholds)
    return found


def time_of(found: Attribution, cause: str) -> int:
    return next((row.time_ns for row in found.causes() if row.id == cause), 0)


def finding(found: Attribution, code: str) -> Any:
    matches = [f for f in found.findings if f.code == code]
    assert len(matches) == 1, [f.code for f in found.findings]
    return matches[0]


def reasons(found: Attribution) -> dict[str, str]:
    return {held.id: held.reason for held in found.withheld}


# ---------------------------------------------------------------- telemetry


def products(steps: int = 4, device_name: str = "NVIDIA A100-SXM4-40GB", **how: Any) -> Trace:
    """Steps of 1 ms with one product of 900 µs each."""
    trace = Trace(device_name=device_name, **how)
    for s in range(steps):
        at = s * MS
        trace.step(s, at, MS)
        op = trace.op(
            "aten::mm",
            at + 10 * US,
            50 * US,
            shapes=[[4096, 4096], [4096, 4096]],
            types=["c10::BFloat16"] * 2,
        )
        trace.launch(
            "ampere_bf16_gemm",
            at + 20 * US,
            10 * US,
            kernel_at=at + 60 * US,
            kernel_for=900 * US,
            op=op,
        )
    return trace


def clock_log(trace: Trace, *, after_ns: int = 0, clock: str = "1065", every_ns: int = MS) -> str:
    """What ``nvidia-smi --format=csv`` would have written beside a trace, its zone named."""
    lines = ["timestamp, index, clocks.current.sm [MHz], power.draw [W]"]
    for i in range(-3, 8):
        at = dt.datetime.fromtimestamp((trace.base_ns + after_ns + i * every_ns) / 1e9, dt.UTC)
        lines.append(f"{at:%Y-%m-%dT%H:%M:%S.%f}+00:00, 0, {clock}, 300.0 W")
    return "\n".join(lines) + "\n"


def test_clock_samples_of_another_time(tmp_path):
    trace = products()
    found = attributed(tmp_path / "t", trace, smi=clock_log(trace, after_ns=3600 * 10**9))
    assert (
        "no clock samples before and after them"
        in finding(found, "telemetry.clock_elsewhere").message
    )
    assert time_of(found, "compute.clock") == 0
    assert "compute.clock" in reasons(found)
    basis = next(r.basis for r in found.causes() if r.id == "compute.efficiency.rest")
    assert "clock not measured" in basis


@pytest.mark.parametrize("clock", ["0 MHz", "[N/A]", "N/A", "-1 MHz"])
def test_clocks_that_are_no_clocks(tmp_path, clock):
    trace = products()
    found = attributed(tmp_path / "t", trace, smi=clock_log(trace, clock=clock))
    assert time_of(found, "compute.clock") == 0
    assert "compute.clock" in reasons(found)


def test_clocks_that_are_clocks(tmp_path):
    trace = products()
    # Half of the 1410 MHz that the A100's peak is quoted at.
    found = attributed(tmp_path / "t", trace, smi=clock_log(trace, clock="705 MHz"))
    assert "compute.clock" not in reasons(found)
    assert time_of(found, "compute.clock") > 0.3 * time_of(found, "compute")


def test_a_device_without_peaks(tmp_path):
    found = attributed(tmp_path / "t", products(device_name="Accelerator X1"))
    assert reports.document(found)["ideal_ns"] is None
    assert time_of(found, "compute.ideal") == 0
    assert time_of(found, "compute.no_peak") == time_of(found, "compute") == 4 * 900 * US
    assert "'Accelerator X1' is not in the table of peaks" in reasons(found)["compute.ideal"]
    assert reports.document(found)["utilization"] == [] or all(
        row["mfu_ratio"] is None for row in reports.document(found)["utilization"]
    )


def test_products_faster_than_the_peak_have_no_ideal_and_no_utilization(tmp_path):
    # 137 GFLOP in 10 µs are 44 times what an A100 can do in bf16: the times, or the device, are
    # wrong, and neither an ideal time nor an MFU of 44 (of the step: 0.44) follows from them.
    trace = products()
    for event in trace.events:
        if event["name"] == "ampere_bf16_gemm":
            event["dur"] = 10 * US
    found = attributed(tmp_path / "t", trace)
    document = reports.document(found)
    assert document["ideal_ns"] is None
    assert "44" in reasons(found)["compute.ideal"]
    whole = next(r for r in document["utilization"] if r["ceiling"] == "theoretical")
    assert (whole["mfu_ratio"], whole["hfu_ratio"]) == (None, None)
    assert whole["reason"].startswith("withheld: the products ran at 44")
    assert "MFU" in finding(found, "utilization.above_one").message
    assert "MFU 4" not in chopper.reports.render(found, "txt")


def test_products_at_the_peak_are_believed(tmp_path):
    trace = products()
    for event in trace.events:
        if event["name"] == "ampere_bf16_gemm":
            event["dur"] = 440 * US  # 137.4 GFLOP in 440.5 µs are 312 TFLOP/s
    found = attributed(tmp_path / "t", trace)
    assert reports.document(found)["utilization"][0]["mfu_ratio"] == pytest.approx(0.50, abs=0.01)
    assert "compute.ideal" not in reasons(found)


# ---------------------------------------------------------------- collectives


def reducing(
    rank: int,
    *,
    world: int = 2,
    late_ns: int = 0,
    elements: int = 1 << 20,
    metadata: bool = True,
    clock_ns: int = 0,
    steps: int = 3,
) -> Trace:
    """Steps of 10 ms: a kernel of 4 ms, then an all-reduce that all ranks leave at 8 ms.

    ``late_ns``: how much longer this rank computes, and so how much later it enters.
    """
    trace = Trace(rank=rank, world=world, pid=100 + rank, base_ns=Trace.base_ns + clock_ns)
    trace.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    for s in range(steps):
        at = s * 10 * MS
        trace.step(s, at, 10 * MS)
        op = trace.op("aten::mm", at + 10 * US, 50 * US, shapes=[[64, 64], [64, 64]])
        trace.launch(
            "gemm",
            at + 20 * US,
            10 * US,
            kernel_at=at + 100 * US,
            kernel_for=4 * MS + late_ns,
            op=op,
        )
        about = {
            "Collective name": "allreduce",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": world,
            "dtype": "Float",
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(world))),
        }
        begin = at + 100 * US + 4 * MS + late_ns
        trace.launch(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
            at + 40 * US,
            10 * US,
            kernel_at=begin,
            kernel_for=at + 8 * MS - begin,
            stream=20,
            args=about if metadata else None,
        )
    return trace


WAITED = 3 * 1 * MS  # in each of three steps one rank waits for the other by a millisecond


def test_waiting_is_told_from_transfer(tmp_path):
    found = attributed(tmp_path / "t", reducing(0), reducing(1, late_ns=MS))
    assert time_of(found, "communication.wait") == WAITED
    assert "communication.wait" not in reasons(found)


def test_without_the_other_ranks_waiting_is_not_claimed(tmp_path):
    found = attributed(tmp_path / "t", reducing(0, world=4), reducing(1, world=4, late_ns=MS))
    assert time_of(found, "communication.wait") == 0
    assert time_of(found, "communication.unseparated") == time_of(found, "communication") > 0
    assert "2 of 4 ranks are missing" in reasons(found)["communication.wait"]


def test_without_metadata_collectives_are_known_by_name(tmp_path):
    found = attributed(
        tmp_path / "t", reducing(0, metadata=False), reducing(1, late_ns=MS, metadata=False)
    )
    assert time_of(found, "communication") == 3 * (2 * (4 * MS - 100 * US) - MS)
    assert time_of(found, "communication.wait") == WAITED


def test_collectives_of_different_sizes_are_not_one(tmp_path):
    found = attributed(tmp_path / "t", reducing(0), reducing(1, late_ns=MS, elements=1 << 10))
    assert time_of(found, "communication.wait") == 0
    assert "could not be matched on all ranks" in reasons(found)["communication.wait"]


@pytest.mark.parametrize("clock_ns", [2 * 10**9, -3 * 10**9])
def test_clocks_of_ranks_that_disagree_by_seconds(tmp_path, clock_ns):
    found = attributed(
        tmp_path / "t", reducing(0, steps=8), reducing(1, late_ns=MS, clock_ns=clock_ns, steps=8)
    )
    # Taken out by when both leave.
    assert time_of(found, "communication.wait") == 8 * MS
    offset = finding(found, "run.clock_offset").message
    assert f"{abs(clock_ns) // 1000} µs {'ahead' if clock_ns > 0 else 'behind'}" in offset
    assert "offsets were corrected" in finding(found, "run.no_common_time").message


@pytest.mark.parametrize(
    ("devices", "listed", "hosts", "same"),
    [
        ((0, 1, 2), 8, (None,) * 3, True),
        # One GPU of each of three hosts; of two hosts with two each; of devices that are not
        # listed.
        ((0, 0, 0), 8, (None,) * 3, False),
        ((0, 1, 0), 2, (None,) * 3, False),
        ((0, 1, 2), 1, (None,) * 3, False),
        ((0, 1, None), 8, (None,) * 3, False),
        ((0, 0, 0), 1, ("a", "a", "a"), True),
        ((0, 1, 2), 8, ("a", "a", "b"), False),
        ((0, 1, 2), 8, ("a", "a", None), False),
    ],
)
def test_ranks_of_one_host_are_known_by_its_name_or_by_its_devices(devices, listed, hosts, same):
    every = [Device(device_id=i) for i in range(listed)]
    parts = [
        RankManifest(rank=8 + i, device_id=device, devices=every, hostname=host)
        for i, (device, host) in enumerate(zip(devices, hosts, strict=True))
    ]
    run = Run(RunManifest(kind="imported", name="", ranks=parts), None)
    assert share_a_clock(run.manifest) is same
    apart = Finding(code="run.no_common_time", severity="warning", message="")
    run.manifest.findings.append(apart)
    assert share_a_clock(run.manifest) is (same and hosts[0] is not None)


BOOTS = ("7a1f6b3c-0c5e-4a55-9f0e-2f0c1f0a9d11", "f3b0c442-98fc-4c14-9afb-f4c8996fb924")


@pytest.mark.parametrize(
    ("machines", "clocks"),
    [
        # Containers of one machine; one name on two machines; recorded before boots were.
        ((f"pod-0 {BOOTS[0]} pid:[1]", f"pod-1 {BOOTS[0]} pid:[2]"), {0: 0, 1: 0}),
        ((f"pod-0 {BOOTS[0]} pid:[1]", f"pod-0 {BOOTS[1]} pid:[1]"), {0: 0, 1: 1}),
        (("pod-0", "pod-1"), {0: 0, 1: 1}),
        (("pod-0", "pod-0"), {0: 0, 1: 0}),
    ],
)
def test_ranks_of_one_boot_share_a_clock(machines, clocks):
    parts = [
        RankManifest(rank=rank, hostname=machine.split()[0], machine=machine)
        for rank, machine in enumerate(machines)
    ]
    assert clocks_of(RunManifest(kind="recorded", name="", ranks=parts)) == clocks


# ---------------------------------------------------------------- steps


def test_steps_of_wildly_different_length(tmp_path):
    trace = Trace()
    at = 0
    lengths = [MS, 40 * MS, MS, MS, 2 * MS]
    for s, length in enumerate(lengths):
        trace.step(s, at, length)
        trace.launch("k", at + 10 * US, 5 * US, kernel_at=at + 20 * US, kernel_for=length - 30 * US)
        at += length
    found = attributed(tmp_path / "t", trace)
    assert "longest 40.0 ms" in finding(found, "steps.uneven").message
    low, high = next(r.ci95_ns for r in found.causes() if r.id == "compute") or (0, 0)
    total = time_of(found, "compute")
    # The interval says how little the mean of such steps is worth.
    assert low < 0.5 * total < total < high


def test_a_single_step_has_no_interval(tmp_path):
    found = attributed(tmp_path / "t", products(steps=1))
    assert all(row.ci95_ns is None for row in found.causes())
    assert (
        reasons(found)["confidence"]
        == "there is only one step, so there are no confidence intervals"
    )


# ---------------------------------------------------------------- launches


def test_kernels_without_a_launch(tmp_path):
    trace = Trace()
    for s in range(4):
        trace.step(s, s * MS, MS)
        trace.launch("a", s * MS + 10 * US, 5 * US, kernel_at=s * MS + 20 * US, kernel_for=100 * US)
        trace.work("kernel", "orphan", s * MS + 500 * US, 200 * US, 9_000 + s)
    found = attributed(tmp_path / "t", trace)
    assert finding(found, "event.without_launch").count == 4
    assert time_of(found, "compute") == 4 * 300 * US
    # The gaps before them have no cause, and say so.
    assert time_of(found, "idle.unlaunched") == 4 * 380 * US
    assert "4 of 8 device events (50.0 %) have no launch" in reasons(found)["idle.causes"]


def test_launches_into_a_graph_that_is_captured_have_no_kernels(tmp_path):
    trace = Trace()
    for s in range(2):
        at = s * MS
        trace.step(s, at, MS)
        trace.launch("a", at + 10 * US, 5 * US, kernel_at=at + 20 * US, kernel_for=100 * US)
        trace.call("cudaStreamBeginCapture", at + 30 * US, 5 * US)
        for i in range(5):
            trace.call("cudaLaunchKernel", at + (40 + 10 * i) * US, 5 * US)
        trace.call("cudaStreamEndCapture", at + 100 * US, 5 * US)
        trace.call("cudaLaunchHostFunc", at + 110 * US, 5 * US)
        trace.launch("b", at + 120 * US, 5 * US, kernel_at=at + 420 * US, kernel_for=100 * US)
    found = attributed(tmp_path / "t", trace)
    assert "launch.without_kernel" not in {f.code for f in found.findings}


def test_a_graph_replay_is_one_launch_of_many_kernels(tmp_path):
    trace = Trace()
    for s in range(2):
        at = s * MS
        trace.step(s, at, MS)
        launch = trace.call("cudaGraphLaunch", at + 100 * US, 20 * US)
        for i in range(5):
            trace.work("kernel", f"k{i}", at + (200 + 100 * i) * US, 90 * US, launch)
    found = attributed(tmp_path / "t", trace)
    assert "event.without_launch" not in {f.code for f in found.findings}
    assert time_of(found, "compute") == 2 * 5 * 90 * US
    by_step = {group.key: group.causes for group in found.by("step")}
    # Gaps within a replay are the device's own: no host was late.
    within = 4 * 10 * US
    for causes in by_step.values():
        inside = sum(causes.get(c, 0) for c in ("idle.dependency", "idle.launch_latency"))
        assert inside >= within
    assert sum(c.get("idle.unlaunched", 0) for c in by_step.values()) == 0


# ---------------------------------------------------------------- counters

COUNTERS = "Dispatch_Id,Agent_Id,Kernel_Name,Counter_Name,Counter_Value\n"


def test_counters_whose_names_do_not_match(tmp_path):
    rows = "".join(f"{i},4,another_kernel,MfmaUtil,50\n" for i in range(4))
    found = attributed(tmp_path / "t", products(), counters=COUNTERS + rows)
    said = finding(found, "counters.not_matched")
    assert said.count == 4
    assert "compute.counters" in reasons(found)
    assert time_of(found, "compute.efficiency.tensor_core") == 0


def test_counters_that_match(tmp_path):
    rows = "".join(f"{i},4,ampere_bf16_gemm,MfmaUtil,50\n" for i in range(4))
    found = attributed(tmp_path / "t", products(), counters=COUNTERS + rows)
    assert "counters.not_matched" not in {f.code for f in found.findings}
    assert "compute.counters" not in reasons(found)
    assert time_of(found, "compute.efficiency.tensor_core") > 0
