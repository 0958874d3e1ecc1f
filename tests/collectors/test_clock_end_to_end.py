"""A clock that is stepped on a script, through the real binding, sampler, join and attribution.

The device is a library that plays the script (tests/native/nvml_shim.c); the trace is written so
that its kernels last as long as that clock makes them. What the attribution says of the clock must
be what the script did, or nothing where the sampling is too sparse for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.collectors.base import CollectorContext
from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.parts import RunWriter
from chopper.tables import TABLES
from chopper.testing import ReplayCollector
from chopper.views import view
from tests.analyzers.make import table
from tests.analyzers.views.clock_script import Script
from tests.collectors import amd_player
from tests.collectors.nvml_player import Player
from tests.kineto_writer import Trace

MS = 1_000_000
HIGH, LOW = 1.98e9, 1.2e9
SIDE = 8192


@dataclass(frozen=True)
class Chip:
    """A device and its bf16 peak, and the clock at which that is quoted."""

    name: str
    flop_per_s: float
    reference_hz: float
    units: int
    memory_bytes: int
    uuid: str

    @property
    def ideal_ns(self) -> float:
        """Of one product."""
        return 2 * SIDE**3 / self.flop_per_s * 1e9


UUID = "aaaa0000-0000-0000-0000-000000000000"
H100 = Chip("NVIDIA H100 80GB HBM3", 989.4e12, 1.83e9, 132, 85_000_000_000, UUID)
MI300X = Chip("AMD Instinct MI300X", 1307.4e12, 2.1e9, 304, 206_141_652_992, "e1e8b5c8c3a9f2d1")
EFFICIENCY = 0.8
PER_STEP = 100


@dataclass(frozen=True)
class Recorded:
    attribution: Attribution
    start_ns: np.ndarray
    end_ns: np.ndarray
    script: Script
    chip: Chip

    @property
    def loss_ns(self) -> float:
        """The clock's share of products that the script slowed down, as the design defines it."""
        taken = (self.end_ns - self.start_ns).astype(np.float64)
        clock = self.script.mean_hz(self.start_ns, self.end_ns)
        ideal, reference = self.chip.ideal_ns, self.chip.reference_hz
        share = (taken - ideal) * np.log(reference / clock) / np.log(taken / ideal)
        return float(share[clock < reference].sum())

    @property
    def found_ns(self) -> dict[str, int]:
        return {
            r.id: r.time_ns
            for r in self.attribution.leaves()
            if r.id.startswith("compute.clock.") and r.time_ns
        }


def sampled(
    player: Player, folder: Path, levels_ms: list[tuple[int, float]], end_ms: int, hz: int
) -> Recorded:
    """Readings of NVML so many times a second, and the trace that the script would have made."""
    period_ms = 1000 // hz
    code = f"""
    s = opened(_sources.ClockSource())
    print(json.dumps([row for t in range(0, {end_ms}, {period_ms}) for row in rows(s, t)]))
    """
    readings = [values for _, *values in player("\n".join(played(levels_ms)), code)]
    script = Script(tuple((at * MS, clock) for at, clock in levels_ms), end_ms * MS)
    return replayed(folder, script, readings, period_ms * MS, H100)


def played(levels_ms: list[tuple[int, float]]) -> list[str]:
    """What the stand-in for NVML plays: the clock, its reason and the power at each level."""
    return [
        f"gpu 0 GPU-{UUID} NVIDIA H100 80GB HBM3",
        *(f"set 0 sm {clock / 1e6:.0f} {at}" for at, clock in levels_ms),
        *(f"set 0 reasons {4 if clock == LOW else 0} {at}" for at, clock in levels_ms),
        *(
            f"set 0 field:186 {700_000 if clock == LOW else 500_000} {at}"
            for at, clock in levels_ms
        ),
    ]


def replayed(
    folder: Path, script: Script, readings: list[list[Any]], period_ns: int, chip: Chip
) -> Recorded:
    """A run with these readings of the clock, one a period, and the script's trace."""
    base_ns = 1_700_000_000 * 10**9
    names = [c.name for c in TABLES["device_clock"].columns]
    found = [
        dict(zip(names, [base_ns + i * period_ns, 0, *values], strict=True))
        for i, values in enumerate(readings)
    ]
    replay = ReplayCollector({"device_clock": table("device_clock", found)})
    part = RunWriter(folder / "run", 0)
    replay.start(CollectorContext(directory=part.directory, run_path=folder / "run", pid=1))
    part.manifest.collectors = [replay.stop()]
    part.manifest.status = "complete"
    part.save()
    return attributed(folder / "run", base_ns, script, chip)


def attributed(out: Path, base_ns: int, script: Script, chip: Chip) -> Recorded:
    """Give what was sampled the trace of products that ran at the script's clock."""
    cycles = chip.ideal_ns / EFFICIENCY * chip.reference_hz / 1e9
    # From 20 ms after the start: what ran before no sample speaks for is another test's matter.
    first = 20 * MS * script.levels[0][1] / 1e9
    count = int((script.cycles[-1] - first) / cycles)
    edges = np.rint(script.ends_ns(first + np.arange(count + 1) * cycles)).astype(np.int64)
    _write_trace(out, base_ns, edges, chip)
    return Recorded(pipeline.attribute(out), edges[:-1], edges[1:], script, chip)


def _write_trace(out: Path, base_ns: int, edges: np.ndarray, chip: Chip) -> None:
    properties = {
        "id": 0,
        "name": chip.name,
        "totalGlobalMem": chip.memory_bytes,
        "numSms": chip.units,
    }
    trace = Trace(base_ns=base_ns, header={"deviceProperties": [properties]})
    for i, (start, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        step, place = divmod(i, PER_STEP)
        at = step * 150_000 + place * 1_400
        if place == 0:
            trace.step(step, at, 149_000)
        op = trace.op(
            "aten::mm", at + 10, 1_000, shapes=[[SIDE, SIDE]] * 2, types=["c10::BFloat16"] * 2
        )
        trace.launch(
            "sm90_xmma_gemm_bf16", at + 100, 50, kernel_at=start, kernel_for=end - start, op=op
        )
    folder = out / "rank-00000"
    (folder / "trace.json").write_bytes(trace.encode())
    part = m.decode_rank((folder / "manifest.json").read_bytes(), "manifest.json")
    part.traces = ("trace.json",)
    part.device_id = 0
    part.devices = [
        m.Device(
            device_id=0,
            name=chip.name,
            uuid=chip.uuid,
            memory_bytes=chip.memory_bytes,
            multiprocessor_count=chip.units,
        )
    ]
    (folder / "manifest.json").write_bytes(m.encode(part))
    finalize(out, command=("train.py",), exit_code=0)


def test_a_stepped_clock_is_recovered_within_one_percent(play: Player, tmp_path: Path) -> None:
    """1980 MHz, 1200 MHz for 2.4 s, 1980 MHz again at 100 Hz; it steps between readings."""
    made = sampled(play, tmp_path, [(0, HIGH), (404, LOW), (2806, HIGH)], 3200, hz=100)
    assert made.found_ns.keys() == {"compute.clock.power_cap"}
    assert sum(made.found_ns.values()) == pytest.approx(made.loss_ns, rel=0.01)
    assert made.attribution.coverage["clock_ratio"] == pytest.approx(1, abs=0.02)
    rows = view(made.attribution, "clocks").filter(pc.field("level") == "step").to_pylist()
    for row in rows[1:]:
        own = slice(row["number"] * PER_STEP, (row["number"] + 1) * PER_STEP)
        taken = (made.end_ns - made.start_ns)[own]
        clock = np.average(made.script.mean_hz(made.start_ns[own], made.end_ns[own]), weights=taken)
        assert row["clock_mean_hz"] == pytest.approx(clock, rel=0.05)


def test_a_clock_that_changes_faster_than_it_is_sampled_is_refused(
    play: Player,
    tmp_path: Path,
) -> None:
    """Levels of 30 to 130 ms, sampled at 8 Hz: any answer would be a guess."""
    times = np.cumsum(np.random.default_rng(7).integers(30, 130, 40))
    levels = [(0, HIGH), *((int(at), (LOW, HIGH)[i % 2]) for i, at in enumerate(times))]
    made = sampled(play, tmp_path, [level for level in levels if level[0] < 2500], 2500, hz=8)
    assert made.found_ns == {}
    basis = made.attribution.bases["compute.efficiency.rest"].text
    assert "clock not measured (the clock changes faster than it was sampled" in basis
    assert made.loss_ns > 200 * MS


def test_a_clock_whose_beat_with_the_sampling_deceives_costs_nothing(
    play: Player,
    tmp_path: Path,
) -> None:
    """Levels of 70 ms at 8 Hz look like levels of half a second; the kernels do not follow them."""
    levels = [(at, (HIGH, LOW)[at // 70 % 2]) for at in range(0, 2500, 70)]
    assert sampled(play, tmp_path, levels, 2500, hz=8).found_ns == {}


def amd_record(
    shim: tuple[Path, dict[str, list[int]]],
    folder: Path,
    levels_ms: list[tuple[float, float]],
    end_ms: int,
    hz: float,
) -> Recorded:
    """Readings of amdsmi so many times a second, and the trace that the script would have made."""
    player = amd_player.Player(*shim, folder)
    script = Script(tuple((round(at * MS), clock) for at, clock in levels_ms), end_ms * MS)
    times = np.arange(0, end_ms * MS, round(1e9 / hz))
    clocks = script.clock_at(times)
    top = max(clock for _, clock in levels_ms)
    held = np.concatenate([[0], np.cumsum(clocks < top)])
    lines = [amd_player.ONE, player.set(0, "prochot_residency_acc", 5)]
    for i, clock in enumerate(clocks.tolist()):
        # Opening reads once.
        lines.append(player.set(0, "current_gfxclks", round(clock / 1e6), i + 1, item=0))
        lines.append(player.set(0, "accumulation_counter", 1000 + 10 * i, i))
        lines.append(player.set(0, "ppt_residency_acc", 100 + 9 * int(held[i]), i))
    code = f"""
    s = opened(_sources.ClockSource())
    out = [list(r.values()) for t in range({len(times)}) for r in rows(s, t * {round(1e9 / hz)})]
    print(json.dumps(out))
    """
    return replayed(folder, script, player(lines, code), round(1e9 / hz), MI300X)


@amd_player.needs_amdsmi
def test_a_stepped_clock_of_amd_is_recovered_within_one_percent(
    amd_library: tuple[Path, dict[str, list[int]]],
    tmp_path: Path,
) -> None:
    """2100 MHz, 1200 MHz for 2.4 s, 2100 MHz again at 100 Hz; it steps between readings."""
    levels = [(0, 2.1e9), (403.7, LOW), (2806.2, 2.1e9)]
    made = amd_record(amd_library, tmp_path, levels, 3200, hz=100)
    assert made.found_ns.keys() == {"compute.clock.power_cap"}
    assert sum(made.found_ns.values()) == pytest.approx(made.loss_ns, rel=0.01)
    assert made.attribution.coverage["clock_ratio"] == pytest.approx(1, abs=0.02)
