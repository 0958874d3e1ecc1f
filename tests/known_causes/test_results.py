from __future__ import annotations

from typing import Any

import pytest

from tests.known_causes import page
from tests.known_causes.results import Case, judged, score


def case(**what: Any) -> Case:
    usual: dict[str, Any] = {
        "suite": "synthetic",
        "injection": "data_stall",
        "cause": "idle.preparation.data",
        "magnitude": "small",
        "flavour": "cuda",
        "injected_ns": 1000,
        "recovered_ns": 1000,
    }
    return Case(**(usual | what))


@pytest.mark.parametrize(
    ("recovered", "leaked", "status"),
    [
        (1000, 0, "ok"),
        (980, 10, "ok"),
        (979, 0, "missed"),
        (1021, 0, "missed"),
        (1000, 11, "missed"),
        (1000, -11, "missed"),
    ],
)
def test_a_case_is_judged_by_both_of_its_bars(recovered: int, leaked: int, status: str) -> None:
    found = judged(case(recovered_ns=recovered, leaked_ns={"idle.call": leaked}))
    assert found.status == status
    # Of what costs nothing, and of a mix, the unit is what was done or injected in all.
    assert judged(case(injected_ns=0, recovered_ns=20, scale_ns=1000)).status == "ok"
    assert judged(case(leaked_ns={"idle.call": 400}, leak_scale_ns=40_000)).status == "ok"
    assert (found.reason is None) == (status == "ok")


def test_a_measurement_holds_when_the_truth_is_within_its_interval() -> None:
    assert judged(case(recovered_ns=900, ci95_ns=(850, 1010))).status == "ok"
    assert judged(case(recovered_ns=900, ci95_ns=(850, 950))).status == "missed"


def test_refused_and_skipped_cases_are_not_scored() -> None:
    cases = [
        judged(case()),
        judged(case(recovered_ns=900)),
        case(status="refused", recovered_ns=0, reason="samples are too far apart"),
        case(status="skipped", recovered_ns=0, reason="needs root"),
    ]
    found = score(cases)
    assert (found.ok, found.missed, found.refused, found.skipped) == (1, 1, 1, 1)
    assert found.recovered_ratio == 0.95
    assert found.worst_error_ratio == 0.1
    assert judged(cases[2]) is cases[2]
    assert score([]).recovered_ratio is None


def test_reports_show_each_row_with_its_worst_case_and_every_reason() -> None:
    cases = [
        judged(case()),
        judged(case(flavour="rocm", recovered_ns=950, leaked_ns={"idle.call": 50})),
        case(magnitude="large", status="refused", reason="samples <too> far apart"),
    ]
    text = page.render(cases)
    row = next(line for line in text.splitlines() if line.startswith("data_stall  small"))
    words = "data_stall small 2 2.00 µs 95.00 % 5.00 % Launch overhead missed"
    assert row.split() == words.split()
    assert "missed: data_stall (small rocm): recovered 95.0 %, bar 98 %" in text
    assert "refused: data_stall (large cuda): samples <too> far apart" in text
