"""Checks of ``chopper doctor --prove``, on tables by hand, real recordings and failing programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import chopper
from chopper.cli import _proof as proof
from chopper.cli import doctor_
from chopper.errors import CaptureError, CollectorUnavailable
from chopper.reports import to_text
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES

GPU = {"device": "cuda:0", "name": "NVIDIA H100 80GB HBM3", "bf16_flop_per_s": 989.4e12}
SECOND_NS = 10**9


class TablesMachine(proof.Machine):
    """A machine with one GPU, whose recordings are tables by hand: variant → run."""

    runs: dict[str, Run]

    def query(self, name: str, sql: str, variant: str = "") -> list[dict[str, Any]]:
        del name
        rows: list[dict[str, Any]] = chopper.query(self.runs[variant], sql).arrow().to_pylist()
        return rows


class RowsMachine(proof.Machine):
    """A machine whose queries return these rows, one list per query."""

    rows: list[list[dict[str, Any]]]
    document: Any = None

    def query(self, name: str, sql: str, variant: str = "") -> list[dict[str, Any]]:
        del name, sql, variant
        return self.rows.pop(0)

    def printed(self, name: str) -> Any:
        del name
        return self.document


def from_rows(*rows: list[dict[str, Any]], document: Any = None) -> RowsMachine:
    machine = RowsMachine([GPU], Path())
    machine.rows, machine.document = [*rows], document
    return machine


def products(
    watts: float = 690.0, mhz: int = 1755, counter_w: float = 690.0, limit_mhz: int = 1980
) -> Run:
    """Ten seconds of a device that draws ``watts`` at ``mhz`` in seconds 2 to 8, else 70 W idle."""

    def sample(table: str, time_ns: int, **values: Any) -> dict[str, Any]:
        known = {"time_ns": time_ns, "span_ns": 1, "device_id": 0} | values
        return {column.name: known.get(column.name) for column in TABLES[table].columns}

    times_ns = range(0, 10 * SECOND_NS + 1, SECOND_NS // 10)
    clocks = []
    for time_ns in times_ns:
        busy = 2 * SECOND_NS <= time_ns <= 8 * SECOND_NS
        hz, power_w = (mhz * 10**6, watts) if busy else (345 * 10**6, 70.0)
        clocks.append(sample("device_clock", time_ns, sm_clock_hz=hz, power_w=power_w))
    # The mean of the samples by trapezoids: 6 s busy, 3.8 s idle, 0.2 s of slopes.
    scale = counter_w / watts
    mean_w = scale * (6 * watts + 3.8 * 70 + 0.2 * (watts + 70) / 2) / 10
    counters = [
        sample("device_counter", time_ns, energy_j=5000 + mean_w * time_ns / SECOND_NS)
        for time_ns in times_ns
    ]
    limit = sample("device_limit", 0, sm_clock_max_hz=limit_mhz * 10**6, power_limit_w=700.0)
    phase = {"name": "measured", "tid": 1, "start_ns": 2 * SECOND_NS, "end_ns": 8 * SECOND_NS}
    rows = {
        "device_clock": clocks,
        "device_counter": counters,
        "device_limit": [limit],
        "program_phase": [phase],
    }
    manifest = m.RunManifest(kind="recorded", name="made", ranks=[m.RankManifest(rank=0)])
    return Run(manifest, None, {(0, name): TABLES[name].of_rows(of) for name, of in rows.items()})


def from_tables(random: Run, zeros: Run | None = None) -> TablesMachine:
    machine = TablesMachine([GPU], Path())
    machine.runs = {"random-1": random, "zeros-1": zeros or random}
    return machine


# ---------------------------------------------------------------- telemetry, by hand


def test_clocks_and_power_within_and_beyond_the_device() -> None:
    text = "device 0: 345 to 1755 of 1980 MHz, 70 to 690 of 700 W"
    assert proof.clocks(from_tables(products())) == (text, True)
    assert proof.clocks(from_tables(products(limit_mhz=1700)))[1] is False
    assert proof.clocks(from_tables(products(watts=1500)))[1] is False


@pytest.mark.parametrize(("counter_w", "agrees"), [(690.0, True), (720.0, True), (1380.0, False)])
def test_a_counter_is_compared_with_the_mean_of_power(counter_w: float, agrees: bool) -> None:
    text, as_expected = proof.energy(from_tables(products(counter_w=counter_w)))
    assert as_expected is agrees
    # (6 · 690 + 3.8 · 70 + 0.2 · 380) / 10 W
    assert "448.2 W by samples over 10.0 s" in text
    assert f"{448.2 * counter_w / 690:.4g} W by its counter" in text


@pytest.mark.parametrize(
    ("zeros", "passes"),
    [((480.0, 1980), True), ((480.0, 1700), False), ((695.0, 1980), False), ((70.0, 1750), True)],
)
def test_zeros_draw_less_at_no_lower_a_clock(zeros: tuple[float, int], passes: bool) -> None:
    machine = from_tables(products(), products(*zeros))
    text = f"random 690 W at 1755 MHz, zeros {zeros[0]:g} W at {zeros[1]} MHz"
    assert proof.data_dependence(machine) == (text, passes)


@pytest.mark.parametrize("check", [proof.clocks, proof.energy, proof.data_dependence])
def test_a_gpu_without_telemetry_cannot_be_checked(check: Any) -> None:
    with pytest.raises(CollectorUnavailable):
        check(from_rows([], []))
    with pytest.raises(CollectorUnavailable, match="torch sees no accelerator"):
        check(proof.Machine([], Path()))


# ---------------------------------------------------------------- attribution

REAL = (
    "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz",
    "tracelens/mi300x-bert-small-inference.json.gz",
)


@pytest.mark.parametrize("trace", REAL)
def test_recordings_of_real_devices_pass(trace: str, traces_dir: Path) -> None:
    machine = proof.Machine([GPU], Path(), {"training": traces_dir / trace})
    text, as_expected = proof.launches(machine)
    assert as_expected, text
    assert re.match(r"(\d+) of \1 kernels with a launch, 0 before it", text), text
    text, as_expected = proof.closure(machine)
    assert as_expected, text
    assert re.match(r"\d+ steps? of all ranks off by 0 ns at most", text), text


def test_a_nanosecond_or_an_unmatched_collective_fails() -> None:
    exact, off = {"off_ns": 0}, {"off_ns": -1}
    collectives = {"all_count": 98, "matched_count": 98}
    assert proof.closure(from_rows([exact, exact], [collectives])) == (
        "2 steps of all ranks off by 0 ns at most, 98 of 98 collectives matched",
        True,
    )
    assert not proof.closure(from_rows([exact, off], [collectives]))[1]
    assert not proof.closure(from_rows([exact], [collectives | {"matched_count": 97}]))[1]
    assert not proof.closure(from_rows([], [collectives]))[1]


@pytest.mark.parametrize(
    ("linked", "early", "passes"), [(1000, 1, True), (989, 0, False), (1000, 2, False)]
)
def test_kernels_without_or_before_their_launch_fail(linked: int, early: int, passes: bool) -> None:
    row = {"all_count": 1000, "linked_count": linked, "early_count": early}
    assert proof.launches(from_rows([row]))[1] is passes


@pytest.mark.parametrize(("found_ms", "passes"), [(20.5, True), (17.0, False), (23.0, False)])
def test_a_known_cause_is_found_within_a_tenth(found_ms: float, passes: bool) -> None:
    """Steps take 1 ms of Python each; every second one has 20 ms of injected Python in addition."""
    steps = [
        {"number": n, "python_ns": 1_000_000 + round(n % 2 * found_ms * 1e6)} for n in range(2, 12)
    ]
    machine = from_rows(steps, document=[n % 2 * 20_000_000 for n in range(12)])
    assert proof.known_cause(machine) == (
        f"injected 20.0 ms per step, found {found_ms:.1f} ms",
        passes,
    )


@pytest.mark.parametrize(
    ("rate", "passes"), [(794e12, True), (200e12, False), (1.1e15, False), (None, False)]
)
def test_a_calibration_is_held_against_the_peak(rate: float | None, passes: bool) -> None:
    gemm = {} if rate is None else {"bf16": [{"best_per_s": rate}]}
    assert proof.ceiling(from_rows(document={"gemm": gemm}))[1] is passes


@pytest.mark.parametrize(
    ("achieved_hz", "cpu_ratio", "error_ns", "passes"),
    [
        (98.0, 0.01, 500, True),
        (80.0, 0.01, 500, False),
        (98.0, 0.2, 500, False),
        (98.0, 0.01, 200_000, False),
    ],
)
def test_a_slow_or_costly_sampler_fails(
    achieved_hz: float,
    cpu_ratio: float,
    error_ns: int,
    passes: bool,
    tmp_path: Path,
) -> None:
    report = m.CollectorReport(
        name="host",
        status="obtained",
        requested_hz=100,
        achieved_hz=achieved_hz,
        cpu_ratio=cpu_ratio,
        clock_alignment_error_ns=error_ns,
    )
    rank = m.RankManifest(rank=0, collectors=[report])
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000/manifest.json").write_bytes(m.encode(rank))
    (tmp_path / "manifest.json").write_bytes(
        m.encode(m.RunManifest(kind="recorded", name="made", ranks=[rank]))
    )
    machine = proof.Machine([], Path(), {"training": tmp_path})
    assert proof.samplers(machine)[1] is passes


# ---------------------------------------------------------------- recordings that fail


def test_a_recording_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_LIMIT_S", 1)
    monkeypatch.setattr(proof, "_GRACE_S", 0.5)
    script = 'trap "" TERM; sleep 600 & echo $! > "$0"; wait; wait'
    with pytest.raises(CaptureError, match=r"\(slow\) had not ended after 1 s"):
        proof._record(["sh", "-c", script, str(tmp_path / "child")], tmp_path / "slow")
    child = int((tmp_path / "child").read_text())
    # An orphan that nobody waits for stays as a zombie.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_recording_that_fails_is_made_once_and_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = tmp_path / "attempts"
    script = f"echo x >> {attempts}; echo no permission >&2; exit 3"

    class Failing(proof.Machine):
        def _command(self, name: str) -> list[str]:
            return ["sh", "-c", script if name == "training" else "exit 1"]

    monkeypatch.setitem(proof.CHECKS, "Zeros draw less power than random numbers", lambda _: 1 / 0)
    results = {result.check: result for result in proof.prove(Failing([GPU], tmp_path))}
    assert list(results) == list(proof.CHECKS)
    assert {result.status for result in results.values()} == {"failed"}
    for check in ("Causes sum to the observed time", "Kernels follow their launches"):
        assert results[check].found == "exit code 3: no permission"
    assert results["Calibration reaches the peak"].found == "exit code 1: no message"
    raised = results["Zeros draw less power than random numbers"].found
    assert raised == "the check itself failed: ZeroDivisionError: division by zero"
    assert attempts.read_text() == "x\n"


# ---------------------------------------------------------------- the command


MACHINE: dict[str, Any] = {
    "environment": {
        "chopper": "1",
        "python": "3.12",
        "torch": None,
        "hostname": "node",
        "system": "Linux",
        "cores_count": 2,
        "usable_cores_count": 2,
        "memory_bytes": 1 << 30,
    },
    "devices": [],
    "collectors": [],
}


def test_the_page_shows_failures_first() -> None:
    proof_results = [
        {"check": "A", "status": "passed", "expected": "holds", "found": "all of it"},
        {"check": "B", "status": "not possible", "expected": "holds", "found": "no driver"},
        {"check": "C", "status": "failed", "expected": "sums close", "found": "off by 1 ns"},
    ]
    page = doctor_.page(MACHINE | {"proof": proof_results})
    text = " ".join(to_text.render(page).split())
    assert "1 of 3 checks passed." in text
    assert "✗ C: off by 1 ns; expected: sums close" in text
    assert text.index("off by 1 ns") < text.index("A: all of it") < text.index("B: no driver")


def test_without_torch_nothing_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_, "examine", lambda: MACHINE)
    with pytest.raises(CollectorUnavailable, match="--prove needs torch"):
        doctor_.command.main(["--prove"], standalone_mode=False)


@pytest.mark.long
def test_all_of_it_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "doctor", "--prove", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    results = {result["check"]: result for result in json.loads(done.stdout)["proof"]}
    assert list(results) == list(proof.CHECKS)
    assert results["Causes sum to the observed time"]["status"] == "passed", done.stderr
    # A busy machine adds to what was injected, and makes samplers late.
    assert re.match(r"injected .* found", results["A known cause is found"]["found"]), done.stderr
    assert done.returncode == any(result["status"] == "failed" for result in results.values())
