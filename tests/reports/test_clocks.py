"""The page about clocks, and what stands under the timeline, of runs whose clock is known."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.reports import clocks, lanes, series
from chopper.reports.export import export
from chopper.reports.page import Fact, Facts, Figure, Section, Table
from chopper.reports.series import Series, thin, with_gaps
from chopper.reports.story import Story
from tests.analyzers.make import table
from tests.analyzers.views.test_clock_views import (  # noqa: F401
    HIGH,
    IDEAL_NS,
    LOW,
    PRODUCTS,
    attribution,
    throttled,
)
from tests.made_runs import put_table
from tests.reports.make import Shape, make
from tests.reports.unpack import unpack

MS = 1_000_000


def section_of(run: Attribution) -> Section | None:
    """The section of a run about its clocks."""
    readings = [*clocks.readings(series.collect(run.recording))]
    return clocks.section(Story(run), readings)


def tiles(section: Section) -> Sequence[Fact]:
    """The quantities at the head of the section."""
    [facts] = [b for b in section.blocks if isinstance(b, Facts)]
    return facts.facts


def drawn(section: Section) -> dict[str, Any]:
    """The figures by name."""
    return {b.name: b.figure for b in section.blocks if isinstance(b, Figure)}


def rows(section: Section, title: str) -> list[dict[str, str]]:
    """The rows of a table as texts by heading."""
    found = []
    for block in section.blocks:
        if isinstance(block, Table) and block.title == title:
            headings = [c.heading for c in block.typed_columns()]
            for row in block.typed_rows():
                texts = [c.text + (f" ({c.below})" if c.below else "") for c in row]
                found.append(dict(zip(headings, texts, strict=True)))
    return found


@pytest.fixture(scope="module")
def page(attribution: Attribution) -> Section:  # noqa: F811
    run = attribution.recording
    first = run.table(0, "device_clock")["time_ns"][0].as_py()
    put_table(
        run,
        0,
        "device_counter",
        table(
            "device_counter",
            [
                {
                    "time_ns": first + i * 10 * MS,
                    "span_ns": 0,
                    "device_id": 0,
                    "temperature_c": 50.0 + i,
                    "link_tx_bytes": i * 10**8,
                }
                for i in range(100)
            ],
        ),
    )
    put_table(
        run,
        0,
        "device_limit",
        table(
            "device_limit",
            [
                {
                    "time_ns": first,
                    "span_ns": 0,
                    "device_id": 0,
                    "power_limit_w": 400.0,
                    "power_basis": "instant",
                }
            ],
        ),
    )
    made = section_of(attribution)
    assert made is not None
    return made


def test_the_lead_says_what_a_step_would_take(page: Section) -> None:
    taken = IDEAL_NS / 0.8 * PRODUCTS
    idle = 5 * MS / 4  # before the first step
    mean = taken * (1 + HIGH / LOW) / 2 + idle
    assert "reference clock of 1.41 GHz" in page.intro
    found = [float(v) for v in re.findall(r"([\d.]+) ms", page.intro)]
    assert found[:2] == pytest.approx([(taken + idle) / 1e6, mean / 1e6], rel=0.01)


def test_facts_name_the_clock_what_held_it_power_and_heat(page: Section) -> None:
    facts = {f.label: (f.value, f.note) for f in tiles(page)}
    assert facts["Clock limited by"] == ("Power cap", "Power cap 100 %")
    assert facts["Board power, mean"] == ("390 W", "max 390 W, limit 400 W; samples: instant")
    assert facts["Clock while computing"][0] == "1.17 GHz"
    assert facts["Temperature, max"][0].endswith("°C")


def test_a_clock_whose_reasons_nobody_recorded_is_held_by_nothing_that_is_known(
    tmp_path: Path,
) -> None:
    run, clocks = throttled(tmp_path, reasons=None)
    put_table(run, 0, "device_clock", clocks)
    bare = pipeline.attribute(run)
    made = section_of(bare)
    assert made is not None
    assert Fact(label="Clock limited by", value="–", note="no reasons were recorded") in tiles(made)
    [kernel] = rows(made, "Kernels that lower the clock")
    assert kernel["Limited by, share of its time"] == "Throttle reason not recorded 100 %"


def test_rows_hold_all_the_time_and_mark_the_reference(page: Section) -> None:
    figure = drawn(page)["clocks_distribution"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["forward", "aten::mm"]
    (mark,) = [s for s in figure["layout"]["shapes"] if s["name"] == "mark"]
    assert mark["x0"] == pytest.approx(1.41)
    heat, means = figure["data"]
    edges, share = np.array(heat["x"]), np.array(heat["z"][0])
    middle = (edges[:-1] + edges[1:]) / 2
    # Two peaks: at the clock of the throttled steps, which took longer, and at that of the others.
    assert middle[share.argmax()] == pytest.approx(LOW / 1e9, abs=0.02)
    assert share[(middle > 1.39) & (middle < 1.43)].max() == pytest.approx(LOW / HIGH, rel=0.1)
    assert means["x"][0] == pytest.approx(1.17, abs=0.01)


def test_power_is_coloured_by_temperature(page: Section) -> None:
    figure = drawn(page)["clocks_power"]
    warm = figure["data"][-1]
    assert warm["marker"]["showscale"]
    assert len(warm["x"]) == len(warm["marker"]["color"]) > 50
    words = [note["text"] for note in figure["layout"]["annotations"]]
    assert words == ["reference 1.41 GHz", "limit 400 W"]
    assert not any("not" in b.note for b in page.blocks if isinstance(b, Figure))


def test_energy_stands_there_or_why_it_is_not_known(page: Section) -> None:
    [energy] = [f for f in tiles(page) if f.label.startswith("Energy")]
    assert (energy.label, energy.value) == ("Energy per step, device 0", "–")
    assert energy.note


def test_the_kernels_that_lost_most_come_first(page: Section) -> None:
    (row,) = rows(page, "Kernels that lower the clock")
    assert row["Kernel"] == "ampere_bf16_s16816gemm (aten::mm · 4096×4096, 4096×4096)"
    # More than half of the time was in the throttled steps; in the others nothing held the clock.
    held = row["Limited by, share of its time"].split("; ")
    assert [words.rpartition(" ")[0].rpartition(" ")[0] for words in held] == [
        "Power cap",
        "Nothing",
    ]


@pytest.mark.usefixtures("page")
def test_the_page_is_in_the_report(attribution: Attribution) -> None:  # noqa: F811
    html = reports.render(attribution, "html")
    assert '<section id="clocks"' in html
    assert '<a href="#clocks">Clocks</a>' in html
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert block is not None
    figures = json.loads(block[1])["figures"]
    assert {"clocks_distribution", "clocks_power"} <= figures.keys()


def test_without_clocks_there_is_no_page() -> None:
    html = reports.render(make(Shape(ranks=1, steps=2)), "html")
    assert 'id="clocks"' not in html
    assert "#clocks" not in html


def test_what_held_the_clock_stands_under_the_timeline(attribution: Attribution) -> None:  # noqa: F811
    made = lanes.build_timeline(attribution, series.collect(attribution.recording))
    last = made.windows[-1]
    rows = unpack(made.packs[last["id"]])[0]["rows"]
    (held,) = [row for row in rows if row["type"] == "clock"]
    assert held["group"] == "Clock held by"
    assert held["n"] == 1  # the whole of the last step, without a break
    first = unpack(made.packs[made.windows[0]["id"]])[0]["rows"]
    assert not [row for row in first if row["type"] == "clock"]


def test_strips_of_clock_and_power_are_aligned_in_time(attribution: Attribution) -> None:  # noqa: F811
    made = lanes.build_timeline(attribution, series.collect(attribution.recording))
    meta, arrays = unpack(made.telemetry)
    panels = [one["panel"] for one in meta["series"]]
    assert panels[:2] == ["SM clock", "Board power"]
    start = int(meta["series"][0]["start_ns"])
    time = start + np.cumsum(arrays["t0"]) * 1000
    third = int(made.windows[2]["start_ns"])
    before, after = arrays["v0"][time < third - 5 * MS], arrays["v0"][time > third + 5 * MS]
    assert before.min() == pytest.approx(HIGH, rel=1e-6)
    assert after.max() == pytest.approx(LOW, rel=1e-6)


def test_the_exported_timeline_has_tracks_of_clock_and_power(
    attribution: Attribution,  # noqa: F811
    tmp_path: Path,
) -> None:
    (path,) = export(attribution, "perfetto", tmp_path / "out")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    clock = [e["args"]["value"] for e in events if e["ph"] == "C" and e["name"] == "SM clock [MHz]"]
    assert {round(v) for v in clock} == {1410, 1005}
    power = {e["args"]["value"] for e in events if e["name"] == "Board power [W]"}
    assert power == {390.0}
    steps = [e for e in events if e.get("cat") == "step"]
    first, last = steps[0]["ts"], steps[-1]["ts"]
    assert all(first <= e["ts"] <= last for e in events if e["ph"] == "C" and "clock" in e["name"])
    held = [e for e in events if e.get("cat") == "clock"]
    assert {e["name"] for e in held} == {"Power cap"}
    # The last two of the four steps.
    assert held[0]["ts"] == pytest.approx(steps[4]["ts"], abs=5_000)


def a_series(time_ms: list[int], panel: str = "SM clock") -> Series:
    time = np.array(time_ms) * MS
    return Series(panel, "rank 0", "hz", 0, time, np.arange(len(time), dtype=np.float64))


def test_a_hole_in_the_samples_is_a_hole_in_the_line() -> None:
    made = with_gaps(a_series([0, 10, 20, 30, 200, 210]))
    assert (made.time_ns // MS).tolist() == [0, 10, 20, 30, 115, 200, 210]
    assert np.flatnonzero(np.isnan(made.value)).tolist() == [4]
    assert len(with_gaps(a_series([0, 10, 20, 30])).time_ns) == 4
    # What is said at events holds until the next one.
    assert len(with_gaps(a_series([0, 10, 20, 200], "Device memory")).time_ns) == 4


def test_thinning_keeps_the_holes() -> None:
    times = [*range(5000), *range(9000, 14000)]
    cut = thin(with_gaps(a_series(times)), 100)
    assert len(cut.time_ns) < 250
    assert np.isnan(cut.value).sum() == 1


def test_readings_without_a_trace_are_shown_by_themselves(attribution: Attribution) -> None:  # noqa: F811
    from chopper.pipeline import attribute
    from chopper.storage import manifest as m
    from chopper.storage.run import Run

    part = m.RankManifest(rank=0)
    run = Run(m.RunManifest(kind="imported", name="log", ranks=[part]), None, {}, "log")
    clocks: pa.Table = attribution.recording.table(0, "device_clock")
    put_table(run, 0, "device_clock", clocks)
    bare = attribute(run)
    made = section_of(bare)
    assert made is not None
    assert "no kernel of a step" in made.intro
    names: Any = drawn(made)["clocks_distribution"]["layout"]["yaxis"]["ticktext"]
    assert names == ["rank 0, all samples"]
    html = reports.render(bare, "html")
    assert 'id="clocks"' in html
    # What is not drawn says why.
    assert "no kernel of a step lies within the samples." in html
    assert "Temperature was not sampled." in html
