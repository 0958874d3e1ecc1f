"""Views in reports: as data for the page, and as text."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pytest

from chopper import wording as fmt
from chopper.causes import CAUSES
from chopper.pipeline import attribute
from chopper.reports import sections, to_text
from chopper.reports.sections import view_page, view_tables
from chopper.views import VIEWS, in_sections, view, views
from tests.analyzers.replay.make import late_second_launch
from tests.analyzers.replay.make import run as known_run
from tests.reports.make import GEMM, HOSTILE, Shape, make

IDS = {cause for cause in CAUSES if "." in cause}
EXACT = make()


def test_every_view_with_rows_is_in_the_page() -> None:
    tables = view_tables(EXACT, views(EXACT, VIEWS))
    assert [t["id"] for t in tables] == [
        v.name for v in in_sections() if view(EXACT, v.name).num_rows
    ]
    kernels = next(t for t in tables if t["id"] == "kernels")
    table = view(EXACT, "kernels")
    by_label = {c["label"]: c for c in kernels["columns"]}
    assert by_label["time"]["values"] == table["time_ns"].to_pylist()
    assert by_label["time"]["unit"] == "ns"
    name = by_label["kernel"]
    recorded = [fmt.ellipsize(n, sections.MAX_CHARACTERS) for n in table["kernel"].to_pylist()]
    assert [name["names"][c][0] for c in name["values"]] == recorded
    assert [fmt.kernel_name(GEMM)] == [n[1] for n in name["names"] if n[0] == GEMM]
    json.dumps(tables, allow_nan=False)


def test_long_tables_are_cut_and_say_what_prints_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(sections, "MAX_ROWS", 3)
    kernels = next(t for t in view_tables(EXACT, views(EXACT, VIEWS)) if t["id"] == "kernels")
    assert kernels["total"] == view(EXACT, "kernels").num_rows > 3
    assert all(len(c["values"]) == 3 for c in kernels["columns"])
    assert kernels["command"].endswith("--view kernels --csv")


def test_reasons_are_whole_in_the_page() -> None:
    of = next(t for t in view_tables(EXACT, views(EXACT, VIEWS)) if t["id"] == "utilization")
    prose = {c["label"]: c.get("prose", False) for c in of["columns"]}
    assert prose["reason"]
    assert not prose["ceiling"]


def test_no_view_shows_the_id_of_a_cause() -> None:
    run = attribute(known_run(late_second_launch()))
    shown, labelled = [], set()
    for name, table in views(run, VIEWS).items():
        text = to_text.render(view_page(VIEWS[name], table, top=10**6), width=400)
        shown += [(name, word) for word in re.split(r"[\s(),:;]+", text) if word in IDS]
        for column in table.column_names:
            if set(table[column].to_pylist()) & IDS:
                labelled.add(name)
    assert shown == []
    assert labelled >= {"critical_path", "critical_path_timeline"}
    (cause,) = [
        column
        for one in view_tables(run, views(run, VIEWS))
        if one["id"] == "critical_path"
        for column in one["columns"]
        if column["field"] == "cause"
    ]
    # The address of a row in the timeline has the id, the reader sees the label.
    assert ["idle.preparation.python", "User Python"] in cause["names"]


def test_columns_without_a_value_are_left_out() -> None:
    steps = next(t for t in view_tables(EXACT, views(EXACT, VIEWS)) if t["id"] == "steps")
    assert view(EXACT, "steps")["outlier"].null_count == view(EXACT, "steps").num_rows
    assert "outlier" not in [c["label"] for c in steps["columns"]]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("name", ["operations", "operators", "kernels", "steps", "launches"])
def test_a_view_fits_the_terminal(name: str, width: int) -> None:
    hostile = make(Shape(hostile=True))
    table = view(hostile, name)
    shown = to_text.render(view_page(VIEWS[name], table), width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown)


def test_numbers_stand_right_and_what_does_not_fit_is_named() -> None:
    shown = to_text.render(
        view_page(VIEWS["kernels"], view(EXACT, "kernels")), width=80
    ).splitlines()
    header = next(line for line in shown if line.startswith("kernel"))
    end = header.index("time") + len("time")
    cells = [line[:end] for line in shown[shown.index(header) + 1 :] if not line.startswith("…")]
    assert all(re.search(r"(ns|µs|ms|s)$", cell) for cell in cells)
    assert "hidden columns (see --csv and --json): " in " ".join(shown)


def test_an_empty_view_says_why() -> None:
    shown = to_text.render(view_page(VIEWS["cpu_use"], VIEWS["cpu_use"].empty()))
    assert f"No rows: {VIEWS['cpu_use'].needs}." in " ".join(shown.split())


ENERGY_ROW = {"scope": "run", "ranks": "0", "step_count": 5}


def test_why_a_row_has_no_value_stands_in_full_below_the_table() -> None:
    reason = (
        "0.21 s of consecutive steps were sampled; an energy counter resolves nothing below 5 s"
    )
    rows = [
        ENERGY_ROW | {"source": "device 0", "energy_j": 12.0, "power_mean_w": 300.0},
        ENERGY_ROW | {"source": "device 1", "reason": reason},
        ENERGY_ROW | {"source": "device 1", "scope": "phase", "phase": "forward", "reason": "why"},
        *(ENERGY_ROW | {"source": f"device {i}", "reason": reason} for i in range(2, 8)),
    ]
    table = pa.Table.from_pylist(rows, schema=VIEWS["energy"].arrow)
    shown = " ".join(to_text.render(view_page(VIEWS["energy"], table), width=80).split())
    told = (
        f"- run, device 1, ranks 0; run, device 2, ranks 0; run, device 3, ranks 0; run, device 4, "
        f"ranks 0 and 3 more: {reason}"
    )
    assert told in shown
    assert "- phase, device 1, ranks 0, forward: why" in shown
    assert "unknown in every row: energy per step, energy per token," in shown
    assert to_text.render(view_page(VIEWS["energy"], table.slice(0, 1))).count("- run") == 0


def test_nothing_is_said_of_micro_steps_where_no_trainer_told_them() -> None:
    table = view(EXACT, "steps")
    assert table["micro_steps"].null_count == table.num_rows
    shown = to_text.render(view_page(VIEWS["steps"], table))
    assert "icro" not in shown


def test_top_limits_the_rows_of_a_view() -> None:
    table = view(EXACT, "kernels")
    shown = to_text.render(view_page(VIEWS["kernels"], table, top=2))
    assert f"{table.num_rows - 2} more rows (--top N)" in shown


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("input_dims", "[[8,16],[16,4],[],[]]", "8×16, 16×4"),
        ("input_dims", "[[],[2,3]]", "–, 2×3"),
        ("input_dims", "[[[4,4],[2]],[3]]", "(4×4, 2), 3"),
        ("input_dims", "no JSON", "no JSON"),
        ("input_dims", "7", "7"),
        ("stream_id", 12345, "12345"),
        ("step", 2048, "2048"),
        ("call_count", 12345, "12\u202f345"),
        ("mean_depth", 0.25, "0.25"),
        ("mean_depth", 12345.6, "12\u202f346"),
        ("kernel", GEMM, fmt.kernel_name(GEMM)),
        ("outlier", True, "yes"),
    ],
)
def test_cells_for_people(column: str, value: object, shown: str) -> None:
    assert fmt.cell(column, value) == shown


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ("call_count", "calls"),
        ("mfu_ratio", "MFU"),
        ("time_ns", "time"),
        ("input_dims", "input dims"),
        ("context_switch_count", "context switches"),
        ("out_of_sequence_count", "out of sequence"),
    ],
)
def test_headings_for_people(column: str, shown: str) -> None:
    assert fmt.heading(column) == shown


def test_hostile_names_stay_text() -> None:
    hostile = make(Shape(hostile=True))
    tables = view_tables(hostile, views(hostile, VIEWS))
    kernels = next(t for t in tables if t["id"] == "kernels")
    names = {n[0] for c in kernels["columns"] if c["label"] == "kernel" for n in c["names"]}
    assert set(HOSTILE) <= names
