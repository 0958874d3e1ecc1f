"""Each label of the clock loss, from what each vendor's library says to the cause that it becomes.

Readings come through the vendors' bindings from libraries that play a script; kernels run at the
clock that was scripted.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.analyzers.make import kernel, kernels, span, spans, table
from tests.collectors import amd_player, nvml_player
from tests.made_runs import put_table

MS = 1_000_000
TICK_MS = 10
TICKS = 100
UUID = "aaaa0000-0000-0000-0000-000000000000"
DEVICES = {
    "nvidia": m.Device(device_id=0, name="NVIDIA H100 80GB HBM3", uuid=UUID),
    "amd": m.Device(device_id=0, name="AMD Instinct MI300X", uuid="e1e8b5c8c3a9f2d1"),
}
LABELS = ["power_cap", "thermal", "application", "idle_ramp", "host_limited", "unlabelled"]
LOW = 1200
IDLE_TICKS = 40
"""The ramp comes after an idle stretch of so many readings, and takes ten more."""


def ramp(tick: int) -> int:
    """Clock in MHz of a device that idles, then climbs to 1400."""
    return 900 if tick < IDLE_TICKS else min(900 + 50 * (tick - IDLE_TICKS), 1400)


def nvidia(label: str, folder: Any, tmp_path: Any) -> dict[str, pa.Table]:
    """Readings of NVML: reasons as bits; idling is one, climbing afterwards is none."""
    bits = {"power_cap": 0x4, "thermal": 0x40, "application": 0x2, "host_limited": 0}
    lines = [f"gpu 0 GPU-{UUID} NVIDIA H100 80GB HBM3", "set 0 max_sm 1980"]
    for tick in range(TICKS):
        clock = ramp(tick) if label == "idle_ramp" else LOW
        lines.append(f"set 0 sm {clock} {tick * TICK_MS}")
        if label == "idle_ramp":
            lines.append(f"set 0 reasons {int(tick < IDLE_TICKS)} {tick * TICK_MS}")
    if label in bits:
        lines.append(f"set 0 reasons {bits[label]}")
    code = f"""
    s = opened(_sources.ClockSource()); l = opened(_sources.LimitSource())
    found = rows(l, 0) + rows(s, *range(0, {TICKS * TICK_MS}, {TICK_MS}))
    print(json.dumps(found))
    """
    found = nvml_player.Player(folder, tmp_path)("\n".join(lines), code)
    return as_tables([(row[0], row[1:]) for row in found])


def amd(label: str, library: Any, tmp_path: Any) -> dict[str, pa.Table]:
    """Readings of amdsmi: residencies that grow; a set limit is what it calls the largest clock."""
    folder, fields = library
    player = amd_player.Player(folder, fields, tmp_path)
    counters = {"power_cap": "ppt_residency_acc", "thermal": "hbm_thm_residency_acc"}
    lines = [amd_player.ONE]
    if label == "application":
        lines.append(f"clock 0 {LOW}")
    for tick in range(TICKS):
        clock = ramp(tick) if label == "idle_ramp" else LOW
        # Opening reads once.
        lines.append(player.set(0, "current_gfxclks", clock, tick + 1, item=0))
        if label != "unlabelled":
            lines.append(player.set(0, "accumulation_counter", 1000 + 10 * tick, tick))
            lines.append(player.set(0, "prochot_residency_acc", 5, tick))
            grows = counters.get(label)
            for name in counters.values():
                lines.append(player.set(0, name, 100 + (7 * tick if name == grows else 0), tick))
    limits = "rows(opened(_sources.LimitSource()), 0)" if label == "application" else "[]"
    code = f"""
    out = [["device_limit", list(row.values())] for row in {limits}]
    s = opened(_sources.ClockSource())
    for tick in range({TICKS}):
        out += [["device_clock", list(row.values())] for row in rows(s, tick * {TICK_MS * MS})]
    print(json.dumps(out))
    """
    return as_tables([(name, values) for name, values in player(lines, code)])


def as_tables(found: list[tuple[str, list[Any]]]) -> dict[str, pa.Table]:
    made: dict[str, list[dict[str, Any]]] = {}
    for name, values in found:
        rows = made.setdefault(name, [])
        columns = [c.name for c in TABLES[name].columns][2:]
        row = dict(zip(columns, values, strict=True))
        rows.append({"time_ns": len(rows) * TICK_MS * MS, "span_ns": 0, **row})
    return {name: table(name, rows) for name, rows in made.items()}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("vendor", ["nvidia", pytest.param("amd", marks=amd_player.needs_amdsmi)])
def test_each_label_is_reached(
    vendor: str, label: str, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    library = request.getfixturevalue(f"{'nvml' if vendor == 'nvidia' else 'amd'}_library")
    read = (nvidia if vendor == "nvidia" else amd)(label, library, tmp_path)
    begin = IDLE_TICKS if label == "idle_ramp" else 0
    end = begin + 10 if label == "idle_ramp" else TICKS - 1
    first = [kernel(5 * MS, 6 * MS, "warm", correlation_id=1)] if begin else []
    ops, events = [], list(first)
    for i, tick in enumerate(range(begin + 1, end)):
        start = tick * TICK_MS * MS
        ops.append(
            span(
                i * 1000,
                i * 1000 + 900,
                "aten::mm",
                input_dims="[[8192,8192],[8192,8192]]",
                input_types='["c10::BFloat16","c10::BFloat16"]',
                external_id=i + 1,
            )
        )
        ops.append(
            span(
                i * 1000 + 10, i * 1000 + 20, "cudaLaunchKernel", "runtime", correlation_id=100 + i
            )
        )
        events.append(
            kernel(start, start + TICK_MS * MS, "gemm", correlation_id=100 + i, external_id=i + 1)
        )
    part = m.RankManifest(rank=0, device_id=0, devices=[DEVICES[vendor]], hostname="node")
    tables = {(0, "host_span"): spans(*ops), (0, "device_event"): kernels(*events)}
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, tables, "made")
    for name, one in read.items():
        put_table(run, 0, name, one)
    causes = {
        row.id: row.time_ns
        for row in pipeline.attribute(run).leaves()
        if row.id.startswith("compute.clock.") and row.time_ns
    }
    assert causes, "no time was given to the clock"
    assert max(causes, key=lambda c: causes[c]) == f"compute.clock.{label}"
    assert causes[f"compute.clock.{label}"] >= 0.8 * sum(causes.values())
