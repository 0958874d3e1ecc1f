"""What kernels and operators are charged with stands beside how long they ran themselves."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.cli.analyze_ import to_csv, to_json
from chopper.reports import sections
from chopper.reports.story import Story
from chopper.views import view
from tests.kineto_writer import Trace

US = 1_000
STEPS = 2
KERNEL = "void copy_kernel(float*)"


def attributed(folder: Path) -> Attribution:
    """Two steps, each with a kernel of 640 µs that starts 300 µs after its launching call ended."""
    trace = Trace()
    for number in range(STEPS):
        at = number * 2_000 * US
        trace.step(number, at, 2_000 * US)
        op = trace.op("aten::mul", at, 200 * US)
        trace.launch("warm", at, 20 * US, kernel_at=at + 50 * US, kernel_for=50 * US, op=op)
        op = trace.op("aten::copy_", at + 200 * US, 100 * US)
        start = at + 600 * US
        trace.launch(KERNEL, at + 210 * US, 90 * US, kernel_at=start, kernel_for=640 * US, op=op)
    (folder / "trace.json").write_bytes(trace.encode())
    return pipeline.attribute(folder / "trace.json")


def test_own_time_is_the_running_alone_and_is_that_of_the_kernels_view(tmp_path: Path) -> None:
    run = attributed(tmp_path)
    group = next(g for g in run.by("kernel") if g.key == KERNEL)
    assert group.own_ns == STEPS * 640 * US
    assert group.events_count == STEPS
    assert group.time_ns > group.own_ns
    rows = {row["kernel"]: row for row in view(run, "kernels").to_pylist()}
    assert rows[KERNEL]["time_ns"] == group.own_ns
    assert rows[KERNEL]["call_count"] == group.events_count
    assert next(g for g in run.by("op") if g.key == "aten::copy_").own_ns == group.own_ns


def test_what_ran_nothing_has_no_own_time(tmp_path: Path) -> None:
    run = attributed(tmp_path)
    assert [(g.own_ns, g.events_count) for g in run.by("kernel") if g.key is None] == [(0, 0)]
    for level in ("cause", "step", "rank"):
        assert {(g.own_ns, g.events_count) for g in run.by(level)} == {(None, None)}


def test_own_time_stands_in_every_form(tmp_path: Path) -> None:
    run = attributed(tmp_path)
    own_ns = STEPS * 640 * US
    (group,) = [g for g in to_json(run, "kernel", None)["groups"] if g["kernel"] == KERNEL]
    assert (group["own_step_ns"], group["events_count"]) == (640 * US, STEPS)
    (row,) = [
        r for r in csv.DictReader(io.StringIO(to_csv(run, "kernel", None))) if r["kernel"] == KERNEL
    ]
    assert (row["own_step_ns"], row["events_count"]) == (str(640 * US), str(STEPS))
    story = Story(run)
    for level in ("kernel", "op"):
        table = sections.level_table(story, level, rows=None)
        at = [column.heading for column in table.typed_columns()].index("Own time")
        assert "640 µs" in [line[at].text for line in table.typed_rows()]
    (kernels,) = [d for d in sections.level_data(story)["levels"] if d["id"] == "kernel"]
    assert [r[4:6] for r in kernels["rows"] if r[0] == KERNEL] == [(STEPS, own_ns)]
