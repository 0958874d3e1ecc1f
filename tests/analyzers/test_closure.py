"""The causes sum to the observed time of every recording kept here, asserted in SQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from chopper.analyzers.attribution import Attribution
from chopper.api import query
from chopper.pipeline import attribute
from tests.golden.own import OWN, ROOT

RECORDINGS = ROOT / "docs" / "recordings"

RUNS = sorted(
    path.parent for path in (*OWN.glob("*/manifest.json"), *RECORDINGS.glob("*/*/manifest.json"))
)
OPEN_STEPS = """
SELECT rank, step_index, end_ns - start_ns AS observed_ns, coalesce(sum(time_ns), 0) AS caused_ns
FROM "window" LEFT JOIN piece USING (rank, step_index)
GROUP BY rank, step_index, start_ns, end_ns
HAVING observed_ns <> caused_ns
"""
OPEN_CAUSES = """
SELECT above.id, above.time_ns, sum(below.time_ns) AS below_ns
FROM cause above JOIN cause below ON below.parent = above.id
GROUP BY ALL
HAVING above.time_ns <> below_ns
"""
OTHER_CAUSES = """
SELECT id, leaf.time_ns, spent_ns
FROM (FROM cause WHERE is_leaf) leaf
FULL JOIN (
    SELECT cause, sum(time_ns) AS spent_ns
    FROM piece JOIN selection USING (rank, step_index)
    WHERE in_step_time
    GROUP BY cause
    HAVING spent_ns > 0
) ON cause = id
WHERE leaf.time_ns IS DISTINCT FROM spent_ns
"""
TIME = """
SELECT
    (SELECT sum(time_ns) FROM cause WHERE is_leaf) AS caused_ns,
    (SELECT sum(end_ns - start_ns) FROM "window" JOIN selection USING (rank, step_index)
     WHERE in_step_time) AS observed_ns
"""


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: run.name)
def run(request: pytest.FixtureRequest) -> Attribution:
    path: Path = request.param
    return attribute(path)


@pytest.mark.parametrize("sql", [OPEN_STEPS, OPEN_CAUSES, OTHER_CAUSES])
def test_no_step_and_no_cause_has_other_time_than_its_parts(run: Attribution, sql: str) -> None:
    assert [*query(run, sql)] == []


def test_leaves_sum_to_the_observed_time(run: Attribution) -> None:
    (time,) = query(run, TIME)
    assert time["caused_ns"] == time["observed_ns"] == run.observed_ns > 0
